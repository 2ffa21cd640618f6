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
from runner.overrides.groups import without_arguments
from runner.overrides.spelling import parse_override
from runner.record.text import quote_for_hydra

SWEEP_KEYS = ("hydra/launcher", "hydra.launcher", "hydra.sweep", "hydra.mode")
KEY = re.compile(r"[\w.]+", re.ASCII)
MAX_ARMS = MAX_VALUES = 64  # of a merged benchmark; of a key that TensorBoard has check boxes for


def job_arguments(
    flags: Sequence[str], hydras: Sequence[str], overrides: Sequence[str]
) -> list[str]:
    """What to type to do one job of a sweep alone."""
    dropped = (*SWEEP_KEYS, "hydra/sweeper", "hydra.sweeper", "hydra.run")
    kept = [text for text in hydras if not text.lstrip("+~").startswith(dropped)]
    return [*flags, *map(without_arguments, overrides), *kept]


def process_command(arguments: Sequence[str]) -> list[str]:
    """The command that a process is started with: the same interpreter, the same runner.

    Without -P Python would put the current folder first, where a module may shadow an installed
    one. Only where the runner itself lies in that folder is that needed.
    """
    apart = [] if _in_current_folder() and not sys.flags.safe_path else ["-P"]
    return [sys.executable, *apart, "-m", "runner", *arguments]


def environment(jobs: int) -> dict[str, str]:
    """This process's environment and module path, for one of so many jobs at a time.

    They share the cores: threads that wait for one another's cores made steps four times as long.
    """
    here = os.getcwd()
    typed = {os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p}
    paths = [p for p in map(os.path.abspath, sys.path) if p != here or here in typed]
    if not _in_current_folder() or sys.flags.safe_path:
        paths.append(str(Path(runner.__file__).parents[1]))
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    if jobs > 1:
        variables.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // jobs)))
    return variables


def _in_current_folder() -> bool:
    return str(Path(runner.__file__).resolve().parents[1]) == os.path.realpath(os.getcwd())


def domains(jobs: Sequence[tuple[Sequence[str], Mapping[str, Any]]]) -> str | None:
    """`monitoring.domains`: the keys swept over, with every value of theirs in the sweep.

    From overrides and flat config of every job, for TensorBoard's check boxes. None where nothing
    is swept over. What an interpolation resolves to may be a secret, and is left out.
    """
    values: dict[str, dict[str, None]] = {}
    hidden = set()
    for overrides, settings in jobs:
        for override in map(parse_override, overrides):
            if "${" in override.value:
                hidden.add(override.key)
            value = settings.get(override.key, override.value)
            values.setdefault(override.key, {})[_text(value)] = None
    parts = [
        f"{key}:[{','.join(several)}]"
        for key, several in values.items()
        if 1 < len(several) <= MAX_VALUES and key not in hidden and KEY.fullmatch(key)
    ]
    return f"++monitoring.domains={{{','.join(parts)}}}" if parts else None


def _text(value: Any) -> str:
    """The value as Hydra reads it back."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, int | float) else quote_for_hydra(str(value))


def merge_benchmark(overrides: Sequence[str]) -> list[str] | None:
    """`benchmark.arms=[…]` in place of the values swept over, where every job is a benchmark.

    None where that is not possible: what is swept over is the benchmark's own, or Hydra's to
    enumerate.
    """
    typed = [o for o in map(parse_override, overrides) if not o.key.startswith(SWEEP_KEYS)]
    typed = [o for o in typed if not o.key.startswith("sweep.")]
    swept = [o for o in typed if o.parsed.is_sweep_override()]
    fixed = [o for o in typed if not o.parsed.is_sweep_override()]
    if not swept:
        return [str(o) for o in fixed]
    own = any(o.key.partition(".")[0] in ("benchmark", "job") for o in swept)
    if own or any(o.key == "benchmark.arms" for o in fixed):
        return None
    values = [[f"{o.parsed.get_key_element()}={value}" for value in o.values()] for o in swept]
    arms = [" ".join(map(shlex.quote, one)) for one in product(*values)]
    if not 0 < len(arms) <= MAX_ARMS:
        return None
    listed = ",".join(quote_for_hydra(_arm_name(arm)) for arm in arms)
    return [*(str(o) for o in fixed), f"benchmark.arms=[{listed}]"]


def _arm_name(arm: str) -> str:
    """Levels go by their name."""
    key, _, value = arm.partition("=")
    return value if key == "optimization" and value.isidentifier() else arm
