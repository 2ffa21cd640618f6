"""`replay.path`: the config of the run that a capture is from, beneath what is typed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from runner.captures.manifest import find, read_manifest
from runner.errors import CheckpointError, ConfigError, SecurityError
from runner.overrides.groups import ALIASES, FOREIGN
from runner.overrides.spelling import (
    EXCLUSIVE,
    SHARED_KEYS,
    CliOverride,
    Compose,
    parse_override,
    with_argument_keys,
)
from runner.security.plain import check_plain
from runner.security.secrets import permitted

KEY = "replay.path"
NOT_TAKEN = {"security", "hydra", "job", "replay", "monitoring", "checkpoint.resume"}
WORD = re.compile(r"[\w-]+", re.ASCII)
KINDS = ("data", "model")  # groups whose option decides which keys there are


def with_captured(overrides: Sequence[str], compose: Compose) -> list[str]:
    """Put what the captured run was composed of under the overrides, if they replay one.

    All that differs from the defaults of today, so that it does not matter where that run had its
    config from. Whom to trust is never taken from a capture. Raises CheckpointError for a path
    that is not there or damaged, UsageError for one that is something else.
    """
    typed = [parse_override(text) for text in overrides]
    asked = [o for o in typed if o.key == KEY and o.sign != "~"]
    replays = any(o.key in ("job", "job.kind") and o.value == "replay" for o in typed)
    if not asked or not replays:
        return list(overrides)
    if asked[-1].parsed.is_sweep_override():
        raise ConfigError(KEY, "names several captures", "look into one at a time")
    path = asked[-1].parsed.value()
    if path in (None, ""):  # the check that follows says what is missing
        return [str(o) for o in typed if o.key != KEY]
    capture = find(Path(str(path)))
    config = read_manifest(capture).config
    check_plain(config, may_read=permitted())
    mine = _typed_keys(typed)
    try:
        options = [
            f"{group}={_word(config[group]['kind'])}" for group in KINDS if group not in mine
        ]
        base = OmegaConf.to_container(compose(options), resolve=False, enum_to_str=True)
    except (LookupError, TypeError, ConfigError) as error:
        raise CheckpointError(
            f"{capture}: its config is not one of this version's runs ({error})"
        ) from error
    before, now = dict(_leaves(base)), dict(_leaves(config))
    foreign = [g for g in FOREIGN if f"{g}._target_" in mine or now.get(f"{g}._target_")]
    kept = [
        f"{'' if key in before else '++'}{key}={_text(value)}"
        for key, value in now.items()
        if (key not in before or before[key] != value)
        and not _is_beneath(key, mine)
        and not any(_stays_behind(key, group) for group in foreign)
    ]
    return [*options, *kept, *overrides]


def _typed_keys(typed: Sequence[CliOverride]) -> set[str]:
    """What the user says, and so the capture does not."""
    keys = {ALIASES.get(o.key, o.key) for o in typed}
    keys |= {EXCLUSIVE[key] for key in keys if key in EXCLUSIVE}
    return with_argument_keys(keys) | NOT_TAKEN


def _is_beneath(key: str, keys: set[str]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[: n + 1]) in keys for n in range(len(parts)))


def _stays_behind(key: str, group: str) -> bool:
    """Whether it is a key of the option that a class of the user's own takes the place of."""
    name = key.removeprefix(f"{group}.")
    return name != key and group in SHARED_KEYS and name.partition(".")[0] not in SHARED_KEYS[group]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and (value or not path):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{_word(key)}" if path else _word(key))
    else:
        yield path, value


def _word(name: Any) -> str:
    """A name that Hydra's language takes for one; any other could be an override of its own."""
    if not isinstance(name, str) or not WORD.fullmatch(name):
        raise SecurityError(f"{KEY}: {name!r} in the capture's config is refused: it is no name")
    return name


def _text(value: Any) -> str:
    """As Hydra reads it back."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return "'{}'".format(value.replace("\\", "\\\\").replace("'", "\\'"))
    if isinstance(value, list):
        return f"[{','.join(_text(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{_word(key)}:{_text(item)}' for key, item in value.items())}}}"
    return repr(value)
