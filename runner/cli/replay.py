"""`replay.path`: the config of the captured run, below what is typed."""

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

    That is all that differs from today's defaults, but for trust. Raises CheckpointError for a path
    that does not exist or is damaged, UsageError for one that is something else.
    """
    typed = [parse_override(text) for text in overrides]
    paths = [o for o in typed if o.key == KEY and o.sign != "~"]
    replays = any(o.key in ("job", "job.kind") and o.value == "replay" for o in typed)
    if not paths or not replays:
        return list(overrides)
    if paths[-1].parsed.is_sweep_override():
        raise ConfigError(KEY, "names several captures", "replay one at a time")
    path = paths[-1].parsed.value()
    if path in (None, ""):  # the config's own check says what is missing
        return [str(o) for o in typed if o.key != KEY]
    capture = find(Path(str(path)))
    config = read_manifest(capture).config
    check_plain(config, may_read=permitted())
    keys = {ALIASES.get(o.key, o.key) for o in typed}
    keys = with_argument_keys(keys | {EXCLUSIVE[k] for k in keys if k in EXCLUSIVE}) | NOT_TAKEN
    try:
        options = [f"{g}={_word(config[g]['kind'])}" for g in KINDS if g not in keys]
        base = OmegaConf.to_container(compose(options), resolve=False, enum_to_str=True)
    except (LookupError, TypeError, ConfigError) as error:
        reason = f"its config is not one of this version's runs ({error})"
        raise CheckpointError(f"{capture}: {reason}") from error
    return [*options, *_differences(dict(_leaves(base)), dict(_leaves(config)), keys), *overrides]


def _differences(
    defaults: Mapping[str, Any], captured: Mapping[str, Any], typed: set[str]
) -> Iterator[str]:
    """The captured values that are neither today's defaults nor typed, as overrides."""
    foreign = {g for g in FOREIGN if f"{g}._target_" in typed or captured.get(f"{g}._target_")}
    for key, value in captured.items():
        parts = key.split(".")
        below = any(".".join(parts[: n + 1]) in typed for n in range(len(parts)))
        # a key of the option that a class of the user's own takes the place of
        replaced = parts[0] in foreign and parts[1] not in SHARED_KEYS.get(parts[0], parts)
        if not below and not replaced and (key not in defaults or defaults[key] != value):
            yield f"{'' if key in defaults else '++'}{key}={_text(value)}"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and (value or not path):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{_word(key)}" if path else _word(key))
    else:
        yield path, value


def _word(name: Any) -> str:
    """A name in Hydra's language; any other could be an override of its own."""
    if not isinstance(name, str) or not WORD.fullmatch(name):
        raise SecurityError(f"{KEY}: {name!r} in the capture's config is refused: it is no name")
    return name


def _text(value: Any) -> str:
    """The value as Hydra reads it back."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return "'{}'".format(value.replace("\\", "\\\\").replace("'", "\\'"))
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{_word(key)}:{_text(item)}' for key, item in value.items())}}}"
    return repr(value)
