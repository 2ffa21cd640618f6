"""How logs are set up, by a config: each part of a `dictConfig` is what it is there for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runner.errors import SecurityError
from runner.security.intent import registry
from runner.security.intent.formats import FORMATS, check_formats, check_shown
from runner.security.intent.names import FACTORIES, leaves, valued
from runner.security.intent.said import Said
from runner.security.intent.settled import LOGS

STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
SECTIONS = {
    "formatters": registry.FORMATTERS,
    "filters": registry.FILTERS,
    "handlers": registry.HANDLERS,
}
DEFAULT = {"formatters": "logging.Formatter", "filters": "logging.Filter"}
OF_LOGGERS = ("level", "propagate", "handlers", "filters")
PLAIN = ("version", "incremental", "disable_existing_loggers")
MAKES = (*FACTORIES, "_target_", ".")


def check_logs(hydra: Mapping[str, Any], said: Said) -> None:
    """Raise SecurityError for what Hydra's part, with references followed, may not do to logs."""
    for part in () if said.off else LOGS:
        check_logging(hydra.get(part), f"hydra.{part}")


def check_logging(node: Any, key: str) -> None:
    """Raise SecurityError for what is no log of a terminal or a file.

    `dictConfig` hands whatever class it is told the arguments of its section: a handler among the
    formatters would open the file that its format names.
    """
    for name, part in _entries(node, key):
        where = f"{key}.{name}"
        if name in SECTIONS:
            for inner, entry in _entries(part, where):
                _check_made(entry, f"{where}.{inner}", str(name))
            continue
        if name == "loggers":
            for inner, entry in _entries(part, where):
                _check_keys(entry, f"{where}.{inner}", OF_LOGGERS)
        elif name == "root":
            _check_keys(part, where, OF_LOGGERS)
        elif name not in PLAIN:
            known = ", ".join((*PLAIN, *SECTIONS, "loggers", "root"))
            raise SecurityError(f"{where}: is refused: the set-up of logs has {known}")
        _check_values(part, where)


def _check_made(entry: Any, where: str, section: str) -> None:
    known = SECTIONS[section]
    made = [(name, value) for name, value in _entries(entry, where) if name in FACTORIES]
    for name, value in made:
        if not isinstance(value, str) or value not in known:
            raise SecurityError(
                f"{where}.{name}: {value} is refused: logs go to a terminal or a file; "
                f"{section} are {', '.join(sorted(known))}"
            )
    names = [value for _, value in made] or [DEFAULT.get(section)]
    keys = {key for name in names if name is not None for key in known[name]}
    _check_keys(entry, where, (*FACTORIES, *sorted(keys)))
    check_formats(entry or {}, where)
    for name, value in _entries(entry, where):
        folded = name in FORMATS and isinstance(value, str)  # a block of YAML ends in a new line
        _check_values(value.removesuffix("\n") if folded else value, f"{where}.{name}")


def _check_keys(entry: Any, where: str, known: tuple[str, ...]) -> None:
    for name, value in _entries(entry, where):
        if name not in known:
            raise SecurityError(
                f"{where}.{name}: is refused: what can be set there is {', '.join(known)}"
            )
        for deeper, _ in valued(value, f"{where}.{name}", MAKES):
            raise SecurityError(f"{deeper}: is refused: nothing is made there")


def _check_values(node: Any, key: str) -> None:
    for where, value in leaves(node, key):
        check_shown(value, where)
        if str(value).startswith(("ext://", "cfg://")) and value not in STREAMS:
            raise SecurityError(
                f"{where}: {value} is refused: it stands for any object; use {STREAMS[0]}"
            )


def _entries(node: Any, where: str) -> Iterator[tuple[Any, Any]]:
    if node is not None and not isinstance(node, dict):
        raise SecurityError(f"{where}: {node} is refused: it is no group of settings")
    yield from (node or {}).items()
