"""A stored benchmark to hold another one against: read and checked before anything is measured.

What somebody has kept for months, or made by hand, may be damaged; a number that no measurement
comes to would make every comparison with it right, or wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.benchmark.result import ArmResult, BenchmarkResult
from runner.errors import ConfigError, StorageError
from runner.record.text import escape_control_chars

KEY = "benchmark.baseline"
NEEDED: dict[str, type] = {"cpu": str, "cores": int, "memory_gib": int, "platform": str}
"""What every result knows of its machine."""
LEAST_MS, MOST_MS = 1e-9, 1e12  # for a sample: a picosecond, and thirty years
MOST_FLOOR = 10.0  # beyond this a control says nothing
PARITY = ("exact", "explained by precision", "FAIL")  # from good to bad


def read(path: str) -> BenchmarkResult:
    """The stored result in a file or folder. ConfigError where there is none, or it is damaged."""
    try:
        found = BenchmarkResult.read(Path(path))
    except StorageError as error:
        raise ConfigError(
            KEY, escape_control_chars(str(error)), "name a benchmark.json or its folder"
        ) from error
    wrong = next(_wrong(found), None)
    if wrong is not None:
        raise ConfigError(
            KEY, f"{escape_control_chars(path)} is damaged: {escape_control_chars(wrong)}",
            "measure it anew, or name another",
        )  # fmt: skip
    return found


def _wrong(found: BenchmarkResult) -> Iterator[str]:
    """Everything in it that no benchmark leaves."""
    for key, kind in NEEDED.items():
        value = found.machine.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            yield f"machine.{key} is {value!r:.40}"
    for key, value in found.machine.items():
        if not isinstance(value, str | int | float | None):
            yield f"machine.{key} is {value!r:.40}"
    if found.noise_floor is not None and not 0 <= found.noise_floor <= MOST_FLOOR:
        yield f"noise_floor is {found.noise_floor}"
    for key in ("others", "stolen"):
        share = getattr(found.load, key)
        if share is not None and not 0 <= share <= 1:
            yield f"load.{key} is {share}"
    names = [arm.name for arm in found.arms]
    if not names:
        yield "there is no arm"
    if len(set(names)) < len(names):
        yield "an arm comes twice"
    for number, arm in enumerate(found.arms):
        yield from (f"arms[{number}].{what}" for what in _wrong_in(arm))


def _wrong_in(arm: ArmResult) -> Iterator[str]:
    for n, ms in enumerate(arm.per_sample_ms):
        if not LEAST_MS <= ms <= MOST_MS:
            yield f"per_sample_ms[{n}] is {ms}"
    for n, loss in enumerate(arm.losses):
        if math.isinf(loss):  # NaN is how one that was not finite is kept
            yield f"losses[{n}] is {loss}"
    for key in ("peak_process_bytes", "peak_device_bytes"):
        peak = getattr(arm, key)
        if peak is not None and not 0 <= peak < 2**60:
            yield f"{key} is {peak}"
    if arm.parity not in (None, *PARITY):
        yield f"parity is {arm.parity!r:.40}"
    if not _are_techniques(arm.summary.get("techniques")):
        yield "summary.techniques is no list of techniques"


def _are_techniques(rows: Any) -> bool:
    if rows is None:
        return True
    return (
        isinstance(rows, Sequence)
        and not isinstance(rows, str)
        and all(isinstance(row, Mapping) and isinstance(row.get("name"), str) for row in rows)
    )
