"""Command lines and environments of jobs; a sweep of benchmarks as one benchmark."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import runner
from runner.device.capabilities import usable_cores
from runner.overrides.groups import as_typed
from runner.overrides.spelling import CliOverride, parse_override
from runner.record.text import quote_for_hydra

NOT_OF_A_JOB = (
    "hydra/launcher",
    "hydra/sweeper",
    "hydra.launcher",
    "hydra.sweeper",
    "hydra.sweep",
    "hydra.mode",
    "hydra.run",
)
MOST_VALUES = 64  # of a key, that are worth check boxes
KEY = re.compile(r"[\w.]+", re.ASCII)


def typed(flags: Sequence[str], hydras: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """What to type to do one job of a sweep alone."""
    kept = [text for text in hydras if not text.lstrip("+~").startswith(NOT_OF_A_JOB)]
    return [*flags, *map(as_typed, overrides), *kept]


def shown(arguments: Sequence[str]) -> str:
    """That as a command for a shell."""
    return shlex.join(["python", "-m", "runner", *arguments])


def process(arguments: Sequence[str]) -> list[str]:
    """The command that a process is started with: the same interpreter, the same runner.

    Without -P Python would put the current folder first, where a module may stand in for an
    installed one. Only where the runner itself lies there is it needed; it takes the folder off
    the path again before plugins are looked for.
    """
    apart = [] if _lies_here() and not sys.flags.safe_path else ["-P"]
    return [sys.executable, *apart, "-m", "runner", *arguments]


def environment(jobs: int) -> dict[str, str]:
    """Ours, with the module path as it is here.

    Jobs that run at the same time share the cores: threads that wait for one another's cores made
    steps four times as long.
    """
    here = os.getcwd()
    asked = {os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p}
    kept = [p for p in map(os.path.abspath, sys.path) if p != here or here in asked]
    if not _lies_here() or sys.flags.safe_path:
        kept.append(str(Path(runner.__file__).parents[1]))
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(kept))}
    if jobs > 1:
        found.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // jobs)))
    return found


def _lies_here() -> bool:
    return str(Path(runner.__file__).resolve().parents[1]) == os.path.realpath(os.getcwd())


def domains(jobs: Sequence[tuple[Sequence[str], Mapping[str, Any]]]) -> str | None:
    """`monitoring.domains`: the keys swept over, each with every value that it takes in the sweep.

    From overrides and flat config of every job; TensorBoard makes check boxes of them. A config
    group has the names of its options. None where nothing is swept over. What an interpolation
    comes to is no job's but its own: it may be a secret.
    """
    found: dict[str, dict[str, None]] = {}
    hidden = set()
    for overrides, flat in jobs:
        for o in map(parse_override, overrides):
            if "${" in o.value:
                hidden.add(o.key)
            value = flat.get(o.key, o.value)
            found.setdefault(o.key, {})[_text(value)] = None
    parts = [
        f"{key}:[{','.join(values)}]"
        for key, values in found.items()
        if 1 < len(values) <= MOST_VALUES and key not in hidden and KEY.fullmatch(key)
    ]
    return f"++monitoring.domains={{{','.join(parts)}}}" if parts else None


def _text(value: Any) -> str:
    """As Hydra reads it back."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    return quote_for_hydra(str(value))


OF_THE_SWEEP = ("hydra.sweep", "hydra/launcher", "hydra.launcher", "hydra.mode", "sweep.")
MOST = 64  # arms; more are a mistake


def merge_benchmark(overrides: Sequence[str]) -> list[str] | None:
    """`benchmark.arms=[…]` in place of the values swept over; None where that is not possible.

    To be asked only where every job is a benchmark. What is swept over may be neither the
    benchmark's own settings nor its arms.
    """
    typed = [o for o in map(parse_override, overrides) if not o.key.startswith(OF_THE_SWEEP)]
    swept = [o for o in typed if o.parsed.is_sweep_override()]
    fixed = [o for o in typed if not o.parsed.is_sweep_override()]
    if not swept:
        return [str(o) for o in fixed]
    if any(o.key == "benchmark.arms" for o in fixed):
        return None
    if any(o.key.partition(".")[0] in ("benchmark", "job") for o in swept):
        return None
    values = [_values(o) for o in swept]
    if not all(values):
        return None
    arms = [" ".join(map(shlex.quote, one)) for one in product(*values)]
    if len(arms) > MOST:
        return None
    listed = ",".join(quote_for_hydra(_name(arm)) for arm in arms)
    return [*(str(o) for o in fixed), f"benchmark.arms=[{listed}]"]


def _values(typed: CliOverride) -> list[str]:
    """The override once for each of its values; none where Hydra alone knows them."""
    if not typed.parsed.is_discrete_sweep() or type(typed.parsed.value()).__name__ == "Glob":
        return []
    key = typed.parsed.get_key_element()
    return [f"{key}={value}" for value in typed.parsed.sweep_string_iterator()]


def _name(arm: str) -> str:
    """Levels go by their name."""
    key, _, value = arm.partition("=")
    return value if key == "optimization" and value.isidentifier() else arm
