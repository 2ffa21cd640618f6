"""A benchmark held against a stored one: what got slower, fatter or numerically different.

Times of two sessions are not paired, so a difference counts only if it is beyond what each session
says of its own noise and beyond `benchmark.tolerance`; memory and losses are compared as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.machine import differences, machine
from runner.benchmark.result import DONE, ArmResult, BenchmarkResult
from runner.benchmark.statistics import CONFIDENCE, unpaired
from runner.errors import ConfigError, StorageError
from runner.record.console import one_line

KEY = "benchmark.baseline"
LEAST_BYTES = 16 << 20  # what two runs of the same differ by in memory, and more
PARITY = ("exact", "explained by precision", "FAIL")  # from good to bad
ROUNDINGS = {"amp": 2**-8, "tf32": 2**-11}  # of bf16, the coarser of the 16-bit types, and TF32
FULL = 2**-24  # of fp32
GROWTH = {True: 2.0, False: 64.0}  # roundings a step that a loss may be off by: 16 bits, fp32


@dataclass
class Against:
    """What came of holding one benchmark against another."""

    path: str
    started: str  # when the stored one was measured
    regressions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compared: list[dict[str, Any]] = field(default_factory=list)  # an arm's ratio and interval

    def plain(self) -> dict[str, Any]:
        """As `BenchmarkResult.baseline` keeps it."""
        said = self.regressions or ["nothing got worse"]
        return {
            "path": self.path,
            "started": self.started,
            "regressed": bool(self.regressions),
            "sentences": [*said, *self.notes],
            "regressions": self.regressions,
            "compared": self.compared,
        }


def stored(settings: BenchmarkConfig, names: Sequence[str]) -> BenchmarkResult | None:
    """The result that `benchmark.baseline` names, if it names one.

    Raises ConfigError where there is none, it is damaged, of another machine, or has none of the
    arms `names`; before anything is measured, as far as the machine is known by then.
    """
    if settings.baseline is None:
        return None
    try:
        found = BenchmarkResult.read(Path(settings.baseline))
    except StorageError as error:
        raise ConfigError(KEY, str(error), "name a benchmark.json or its folder") from error
    _same_machine(found, machine())
    theirs = [arm.name for arm in found.arms]
    if not set(theirs) & set(names):
        raise ConfigError(
            KEY, f"none of its arms is measured now: it has {', '.join(map(one_line, theirs))}",
            "measure one of them",
        )  # fmt: skip
    return found


def _same_machine(then: BenchmarkResult, now: dict[str, Any]) -> None:
    differing = differences(now, then.machine)
    if differing:
        raise ConfigError(
            KEY, f"is of another machine: {'; '.join(differing)}",
            "measure the stored one anew, on this machine",
        )  # fmt: skip


def against(now: BenchmarkResult, then: BenchmarkResult, settings: BenchmarkConfig) -> Against:
    """Every arm that both have, held against itself. Raises ConfigError for another machine."""
    _same_machine(then, now.machine)
    found = Against(str(settings.baseline), then.started)
    before = {arm.name: arm for arm in then.arms}
    pairs = []
    for arm in now.arms:
        old = before.pop(arm.name, None)
        if old is None:
            found.notes.append(f"{one_line(arm.name)} is not in the stored result")
        elif differing := _differing_work(arm, old):
            found.notes.append(f"{one_line(arm.name)} is not compared: {differing}")
        else:
            pairs.append((arm, old))
    found.notes += [f"{one_line(name)} was not measured now" for name in before]
    torch, was = now.machine.get("torch"), then.machine.get("torch")
    if torch != was:
        found.notes.append(f"torch is {torch} and was {was}")
    limit = max(now.noise_floor, then.noise_floor, settings.tolerance)
    for arm, old in pairs:
        found.regressions += _ended(arm, old)
        found.regressions += _slower(arm, old, limit, (1 - CONFIDENCE) / len(pairs), found)
        found.regressions += _fatter(arm, old, settings.tolerance)
        found.regressions += _other_numbers(arm, old, found)
    if found.regressions and _all_alike(found, limit):
        found.notes.append("all arms are slower alike: it may be the machine, and not the code")
    return found


def _differing_work(now: ArmResult, then: ArmResult) -> str:
    """Why the two did not do the same; keys that only one version of the runner has are left."""
    if now.overrides != then.overrides:
        return f"it stands for {' '.join(now.overrides)} and stood for {' '.join(then.overrides)}"
    for key in now.config.keys() & then.config.keys():
        if now.config[key] != then.config[key]:
            return f"{key} is {now.config[key]} and was {then.config[key]}"
    return ""


def _ended(now: ArmResult, then: ArmResult) -> Iterator[str]:
    if now.status != DONE and then.status == DONE:
        yield f"{one_line(now.name)} did not come to its end ({now.status}: {one_line(now.reason)})"


def _slower(
    now: ArmResult, then: ArmResult, limit: float, alpha: float, found: Against
) -> Iterator[str]:
    if not now.per_sample_ms or not then.per_sample_ms:
        return
    estimate = unpaired(then.per_sample_ms, now.per_sample_ms, alpha)
    known = math.isfinite(estimate.width)
    found.compared.append(
        {
            "name": now.name,
            "ratio": estimate.ratio,
            "interval": [estimate.low, estimate.high] if known else None,
            "limit": limit,
        }
    )
    if not known:
        found.notes.append(f"{one_line(now.name)}: too few blocks to compare its times")
    elif estimate.high < 1 and estimate.ratio < 1 / (1 + limit):
        slower, least, most = (1 / r - 1 for r in (estimate.ratio, estimate.high, estimate.low))
        yield (
            f"{one_line(now.name)} takes {slower:.1%} more time per sample ({least:.1%} to "
            f"{most:.1%}; up to {limit:.1%} is no regression)"
        )
    elif estimate.low > 1 and estimate.ratio > 1 + limit:
        found.notes.append(f"{one_line(now.name)} takes {1 - 1 / estimate.ratio:.1%} less time")


def _all_alike(found: Against, limit: float) -> bool:
    ratios = [row["ratio"] for row in found.compared]
    return len(ratios) > 1 and max(ratios) < 1 / (1 + limit) and max(ratios) / min(ratios) < 1.05


def _fatter(now: ArmResult, then: ArmResult, tolerance: float) -> Iterator[str]:
    for key, whose in (("peak_process_bytes", "process"), ("peak_device_bytes", "device")):
        more, less = getattr(now, key), getattr(then, key)
        if more is None or not less or more - less <= LEAST_BYTES:
            continue
        if more > less * (1 + tolerance):
            yield (
                f"{one_line(now.name)} holds {(more - less) / 2**20:,.0f} MiB more memory of the "
                f"{whose} at its peak ({more / less - 1:.0%})"
            )


def _other_numbers(now: ArmResult, then: ArmResult, found: Against) -> Iterator[str]:
    name = one_line(now.name)
    ours, theirs = now.parity, then.parity
    if ours in PARITY and theirs in PARITY and PARITY.index(ours) > PARITY.index(theirs):
        yield f"{name}: parity is {ours} and was {theirs} ({one_line(now.parity_reason)})"
    taken, took = _engaged(now), _engaged(then)
    if taken != took:
        gone, new = sorted(took - taken), sorted(taken - took)
        words = [*(f"not {n}" for n in gone), *new]
        found.notes.append(
            f"{name}: took hold now: {', '.join(words)}; its losses are not compared"
        )
        return
    rounding = max((ROUNDINGS.get(technique, FULL) for technique in taken), default=FULL)
    for step, (a, b) in enumerate(zip(now.losses, then.losses, strict=False), 1):
        bound = GROWTH[rounding != FULL] * rounding * step
        if math.isnan(a) and math.isnan(b):
            continue
        if not abs(a - b) <= bound * max(abs(b), 1e-6):
            yield (
                f"{name}: the loss at step {step} is {a:.6g} and was {b:.6g}; rounding explains "
                f"{bound:.1e} of it"
            )
            return


def _engaged(arm: ArmResult) -> set[str]:
    rows = arm.summary.get("techniques") or []
    return {str(row.get("name")) for row in rows if isinstance(row, dict) and row.get("engaged")}
