"""`replay.path`: the captured run's own config makes the step, so nothing of it can be typed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from runner.captures.manifest import find, read_manifest
from runner.composing import from_plain
from runner.errors import ConfigError
from runner.overrides.spelling import parse_override

KEY = "replay.path"
TYPED = ("job", "replay", "security", "monitoring", "hydra", "name")
NAME = re.compile(r"[\w.-]+", re.ASCII)


def with_captured(overrides: Sequence[str], trusted: Sequence[str]) -> list[str]:
    """Add the captured run's name to the overrides, if they replay one.

    Raises CheckpointError for a path that does not exist or is damaged, UsageError for one that is
    something else, SecurityError for code that is not `trusted`, and ConfigError for a key that
    would change the captured step.
    """
    typed = [parse_override(text) for text in overrides]
    paths = [o for o in typed if o.key == KEY and o.sign != "~"]
    if not paths or not any(o.key in ("job", "job.kind") and o.value == "replay" for o in typed):
        return list(overrides)
    if paths[-1].parsed.is_sweep_override():
        raise ConfigError(KEY, "names several captures", "replay one at a time")
    path = paths[-1].parsed.value()
    if path in (None, ""):  # the config's own check says what is missing
        return [str(o) for o in typed if o.key != KEY]
    for override in typed:
        if re.split(r"[./@]", override.key)[0] not in TYPED:
            problem = "has no effect: a step is replayed with the config of its run"
            raise ConfigError(override.key, problem, "leave it out")
    manifest = read_manifest(find(Path(str(path))))
    from_plain(manifest.config, trusted)  # refused here, before there is a folder
    if NAME.fullmatch(manifest.name) and all(o.key != "name" for o in typed):
        return [*overrides, f"name={manifest.name}"]
    return list(overrides)
