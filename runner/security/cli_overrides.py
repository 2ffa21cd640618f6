"""The command line, as far as security asks: only what is typed may allow anything more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from math import ceil, isfinite
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString, RangeSweep
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.errors import ConfigError, SecurityError, UsageError
from runner.security.config import SecurityConfig, SecurityLevel
from runner.security.registry import EVERYTHING, permit

MOST_JOBS = 10_000
REFUSED = {
    "hydra.job.env_set": "a config sets no variables of processes; set them where you start it",
    "hydra.job.env_copy": "a config reads no variables of processes; use security.environment",
    "hydra.runtime": "Hydra fills it in itself",
    "hydra.overrides": "Hydra fills it in itself",
}
CALLED = ("callbacks", "launcher", "sweeper", "job_logging", "hydra_logging")
"""Parts of Hydra's config that it makes objects of."""
FACTORIES = ("_target_", "class", "()", "custom_search_space")
"""Keys below those parts whose value Hydra, a plugin of it or `dictConfig` calls."""
OF_HYDRA = frozenset(
    {
        "hydra.experimental.callbacks.LogJobReturnCallback",
        "hydra_plugins.runner_isolated.launcher.IsolatedLauncher",
        *(f"logging.{name}" for name in ("Formatter", "Filter", "FileHandler", "StreamHandler")),
        *(f"optuna.samplers.{name}Sampler" for name in ("TPE", "Random", "Grid", "CmaEs", "QMC")),
    }
)


@dataclass(frozen=True)
class CliOverrides:
    """What was typed; `values` are those of its keys, the last one of each."""

    security: SecurityConfig = field(default_factory=SecurityConfig)
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def off(self) -> bool:
        """Whether names and files of other people are not checked."""
        return self.security.level is SecurityLevel.off

    @property
    def strict(self) -> bool:
        """Whether no config of other people is read."""
        return self.security.level is SecurityLevel.strict

    @property
    def searchpath(self) -> list[str]:
        """Folders with more config groups, as Hydra names them."""
        folders = self.values.get("hydra.searchpath")
        return [str(one) for one in folders] if isinstance(folders, list) else []

    def has(self, key: str) -> bool:
        """Whether a value for this key was typed, by itself or in a mapping above it."""
        if key in self.values:
            return True
        above, _, last = key.rpartition(".")
        mapping = self.values.get(above) if above else None
        return isinstance(mapping, dict) and last in mapping


def read_overrides(overrides: Sequence[str], conf: Path) -> CliOverrides:
    """Read what was typed; `conf` is the folder of our own configs.

    Raises SecurityError for what no config may ask for. An override that cannot be parsed is left
    for others to report.
    """
    parsed = [one for text in overrides if (one := parse(text)) is not None]
    check_job_count(parsed)
    values = {one.key_or_group: one.value() for one in parsed if not one.is_delete()}
    typed = CliOverrides(_security(parsed, conf), values)
    for one in parsed:
        check_hydra_key(one, typed.security.names)
    if [one.key_or_group for one in parsed].count("hydra.searchpath") > 1:
        raise SecurityError("hydra.searchpath: comes twice: Hydra takes the first; type one list")
    for folder in typed.searchpath:
        _check_folder("hydra.searchpath", folder.removeprefix("file://"), typed, conf)
    return typed


def parse(text: str) -> Override | None:
    """An override taken apart, or None where it cannot be parsed."""
    try:
        return OverridesParser.create().parse_override(text)
    except (HydraException, RecursionError):
        return None


def check_hydra_key(override: Override, trusted: Sequence[str]) -> None:
    """Raise SecurityError for a typed key of Hydra's that sets processes up or calls something."""
    key, value = override.key_or_group, override.value()
    for name in (key, override.package or ""):
        why = next((REFUSED[k] for k in REFUSED if f"{name}.".startswith(f"{k}.")), "")
        if why:
            raise SecurityError(f"{name}: is refused: {why}")
    if key == "hydra" or (override.package or "").startswith("hydra"):
        raise SecurityError(f"{key}: is refused: set Hydra's keys one by one, hydra.run.dir=…")
    if key.split(".")[:1] != ["hydra"] or key.split(".")[1] not in CALLED:
        return
    for one in value.list if isinstance(value, ChoiceSweep) else [value]:
        for where, leaf in _leaves(one.text if isinstance(one, QuotedString) else one, key):
            if isinstance(leaf, str) and "${" in leaf:
                raise SecurityError(f"{where}: {leaf} is refused: write the value itself")
            if where.rpartition(".")[2] in FACTORIES and leaf is not None:
                _check_factory(str(leaf), where, trusted)


def _check_factory(target: str, key: str, trusted: Sequence[str]) -> None:
    plugins = (one for kind in (Launcher, Sweeper) for one in Plugins.instance().discover(kind))
    names = {f"{one.__module__}.{one.__name__}" for one in plugins}
    if EVERYTHING not in trusted and target not in OF_HYDRA | names:
        permit(target, key, trusted)


def _leaves(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for name, inner in node.items():
            yield from _leaves(inner, f"{key}.{name}")
    elif isinstance(node, list):
        for number, inner in enumerate(node):
            yield from _leaves(inner, f"{key}.{number}")
    else:
        yield key, node


def check_folders(flags: dict[str, str | None], typed: CliOverrides, conf: Path) -> dict[str, str]:
    """The folders that Hydra's flags name, made absolute; under strict only ours."""
    folders = {flag: text for flag, text in flags.items() if text is not None}
    for flag, text in folders.items():
        _check_folder(flag, text, typed, conf)
        if not Path(text).absolute().is_dir():
            raise UsageError(f"{flag}: there is no folder {text}")
    return {flag: str(Path(text).absolute()) for flag, text in folders.items()}


def _check_folder(what: str, text: str, typed: CliOverrides, conf: Path) -> None:
    if "://" in text:
        raise SecurityError(f"{what}: {text} is refused: it would import a package; name a folder")
    if typed.strict and not Path(text).resolve().is_relative_to(conf.resolve()):
        raise SecurityError(
            f"{what}={text}: is refused under security=strict: it takes no configs of other "
            "folders; type its keys, or look through it and use security=standard"
        )


def check_job_count(parsed: Sequence[Override], where: str = "") -> None:
    """Raise SecurityError for a sweep of more than MOST_JOBS jobs; no range is expanded."""
    jobs = 1
    for one in parsed:
        jobs *= max(1, _count(one))
        if jobs > MOST_JOBS:
            raise SecurityError(
                f"{where or one.key_or_group}: a sweep of {jobs} jobs is refused, more than "
                f"{MOST_JOBS}; name fewer values"
            )


def _count(override: Override) -> int:
    value = override.value() if override.is_sweep_override() else None
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    if not isinstance(value, RangeSweep):
        return 1  # a glob has no more values than there are files
    numbers = (value.start, value.stop, value.step)
    if any(n is None or not isfinite(float(n)) for n in numbers) or not value.step:
        raise SecurityError(
            f"{override.key_or_group}: a range needs a beginning, an end and a step that are "
            "numbers"
        )
    start, stop, step = (Decimal(str(n)) for n in numbers)
    return max(0, ceil((stop - start) / step))


def security_of_overrides(overrides: Sequence[str], conf: Path) -> SecurityConfig:
    """What these overrides say about security, wherever they come from."""
    parsed = (parse(text) for text in overrides if "security" in text)
    return _security([one for one in parsed if one is not None], conf)


def _security(parsed: Sequence[Override], conf: Path) -> SecurityConfig:
    """The `security` group as typed, on top of nothing but our own files."""
    config = OmegaConf.structured(SecurityConfig)
    for one in parsed:
        if one.key_or_group.partition(".")[0] != "security":
            continue
        if one.is_sweep_override():
            raise SecurityError(
                f"{one.key_or_group}: is not swept over: a sweep has one answer to what is trusted"
            )
        if "${" in (one.input_line or ""):
            raise SecurityError(f"{one.key_or_group}: stands for another value; type it out")
        if one.package is None and not one.is_delete():
            config = _updated(config, one.key_or_group, one.value(), conf)
    made = OmegaConf.to_object(config)
    if not isinstance(made, SecurityConfig):
        raise ConfigError("security", "is not that group")
    return made


def _updated(config: DictConfig, key: str, value: Any, conf: Path) -> DictConfig:
    try:
        if key != "security":
            if key in ("security.trusted", "security.environment") and isinstance(value, str):
                value = [value]
            OmegaConf.update(config, key.partition(".")[2], value, merge=False)
            return config
        if isinstance(value, str):
            file = conf / "security" / f"{value}.yaml"
            value = OmegaConf.load(file) if value.isidentifier() and file.is_file() else {}
        merged = OmegaConf.merge(config, value)
    except (OmegaConfBaseException, ValueError, TypeError):  # composing says what is wrong
        return config
    return merged if isinstance(merged, DictConfig) else config
