"""Compare a benchmark with a stored one: slower arms, more memory, worse parity.

Arms are compared by their speedup over the reference of their own session, so that effects common
to all arms cancel. The reference's own time is judged only if the machine was quiet both times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.machine import machine_differences, machine_facts
from runner.benchmark.result import DONE, ArmResult, BenchmarkResult, Load
from runner.benchmark.statistics import (
    ONE_PROCESS_NOISE,
    Estimate,
    bonferroni_alpha,
    unpaired_ratio,
)
from runner.errors import ConfigError, StorageError
from runner.record.text import escape_control_chars as escape

KEY = "benchmark.baseline"
PARITY = ("exact", "explained by precision", "FAIL")  # best to worst
LEAST_BYTES = 16 << 20  # more than the memory of two equal runs differs by
QUIET = 0.05  # share of CPUs used by others, up to which absolute times are judged

Pair = tuple[ArmResult, ArmResult]  # (now, then)


@dataclass
class BaselineComparison:
    """One benchmark compared with another."""

    path: str
    started: str  # when the stored one was measured
    regressions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compared: list[dict[str, Any]] = field(default_factory=list)  # ratios with intervals

    def plain(self) -> dict[str, Any]:
        """Return the dict that is stored as `BenchmarkResult.baseline`."""
        return {
            "path": self.path,
            "started": escape(self.started),
            "regressed": bool(self.regressions),
            "sentences": [*(self.regressions or ["no regressions"]), *self.notes],
            "regressions": self.regressions,
            "compared": self.compared,
        }


def stored(settings: BenchmarkConfig, names: Sequence[str]) -> BenchmarkResult | None:
    """Load the result that `benchmark.baseline` names; None if it is not set.

    Raises ConfigError before anything is measured: no such file, damaged, from another machine (its
    device is compared only later, by `against`), or none of the arms `names`.
    """
    if settings.baseline is None:
        return None
    try:
        baseline = BenchmarkResult.read(Path(settings.baseline))
    except StorageError as error:
        raise ConfigError(KEY, escape(str(error)), "name a benchmark.json or its folder") from error
    for number, arm in enumerate(baseline.arms):
        if not all(0 < ms < math.inf for ms in arm.per_sample_ms):
            damage = f"arms[{number}].per_sample_ms has a time ≤ 0"
            raise ConfigError(KEY, escape(f"{settings.baseline} is damaged: {damage}"))
    _check_machine(baseline, machine_facts())
    theirs = [arm.name for arm in baseline.arms]
    if not set(theirs) & set(names):
        text = f"has none of the measured arms, only {escape(', '.join(theirs))}"
        raise ConfigError(KEY, text)
    return baseline


def _check_machine(then: BenchmarkResult, now: dict[str, Any]) -> None:
    differing = machine_differences(now, then.machine)
    if differing:
        what = f"was measured on another machine: {escape('; '.join(differing))}"
        raise ConfigError(KEY, what, "measure a new baseline on this machine")


def against(
    now: BenchmarkResult, then: BenchmarkResult, settings: BenchmarkConfig
) -> BaselineComparison:
    """Compare every arm that both results have. Raises ConfigError for another machine."""
    _check_machine(then, now.machine)
    result = BaselineComparison(str(settings.baseline), then.started)
    pairs = _pair_arms(now, then, result)
    torch, was = now.machine.get("torch"), then.machine.get("torch")
    if torch != was:
        result.notes.append(escape(f"torch is {torch}, was {was}"))
    for arm, old in pairs:
        if arm.status != DONE and old.status == DONE:
            ended = escape(f"{arm.name} ended: {arm.status}: {arm.reason}")
            result.regressions.append(ended)
    _compare_times(now, then, pairs, settings.tolerance, result)
    for arm, old in pairs:
        result.regressions += _compare_memory(arm, old, settings.tolerance)
        known = arm.parity in PARITY and old.parity in PARITY
        if known and PARITY.index(arm.parity or "") > PARITY.index(old.parity or ""):
            text = f"{arm.name}: parity is {arm.parity}, was {old.parity} ({arm.parity_reason})"
            result.regressions.append(escape(text))
    return result


def _pair_arms(
    now: BenchmarkResult, then: BenchmarkResult, result: BaselineComparison
) -> list[Pair]:
    """Pair arms of the same name and work; the others become notes."""
    before = {arm.name: arm for arm in then.arms}
    pairs: list[Pair] = []
    for arm in now.arms:
        old = before.pop(arm.name, None)
        if old is None:
            result.notes.append(escape(f"{arm.name} is not in the baseline"))
        elif differing := _different_work(arm, old):
            result.notes.append(escape(f"{arm.name} is not compared: {differing}"))
        else:
            pairs.append((arm, old))
    result.notes += [escape(f"{name} is only in the baseline") for name in before]
    return pairs


def _different_work(now: ArmResult, then: ArmResult) -> str:
    """Return how overrides or config differ; "" if not. Keys that only one has are ignored."""
    if now.overrides != then.overrides:
        return f"its overrides are {' '.join(now.overrides)}, were {' '.join(then.overrides)}"
    for key in now.config.keys() & then.config.keys():
        if now.config[key] != then.config[key]:
            return f"{key} is {now.config[key]}, was {then.config[key]}"
    return ""


# -- times and memory ------------------------------------------------------------------------------


def _compare_times(
    now: BenchmarkResult,
    then: BenchmarkResult,
    pairs: Sequence[Pair],
    tolerance: float,
    result: BaselineComparison,
) -> None:
    """Compare the reference by its own time, the other arms by their speedup over it.

    A speedup has the noise floor of its session, so a ratio of two has both. If an arm's own time
    is not longer, a lower speedup means that the reference got faster, which is no regression. That
    rule needs a quiet machine.
    """
    timed = [(a, b) for a, b in pairs if a.per_sample_ms and b.per_sample_ms]
    if now.compared != then.compared:  # an arm with data workers came or went
        text = f"times are not compared: this result has the {now.compared}"
        result.notes.append(escape(f"{text}, the baseline the {then.compared}"))
        return
    if now.noise_floor is None or then.noise_floor is None:
        result.notes.append("times are not compared: one of the two noise floors is unknown")
        return
    if not timed:
        return
    changes = _Changes(max(math.hypot(_floor(now), _floor(then)), tolerance), result)
    alpha = bonferroni_alpha(len(timed))
    plain = next((pair for pair in timed if pair[0].name == now.reference), timed[0])
    disturbance = _describe_disturbance(now.load, then.load)
    own = {a.name: unpaired_ratio(b.per_sample_ms, a.per_sample_ms, alpha) for a, b in timed}
    changes.note(plain[0].name, own[plain[0].name], disturbance, everything=list(own.values()))
    for arm, old in timed:
        if arm is plain[0]:
            continue
        before, speedups = (
            [a / b for a, b in zip(one.per_sample_ms, base.per_sample_ms, strict=False)]
            for one, base in zip((old, arm), reversed(plain), strict=True)
        )
        excuse = ""
        if not disturbance and own[arm.name].ratio >= 1 / (1 + changes.limit):
            excuse = "its own time is within the limit"
        changes.note(
            arm.name, unpaired_ratio(before, speedups, alpha), excuse, beside=plain[0].name
        )


def _floor(result: BenchmarkResult) -> float:
    """Return the noise floor; at least `ONE_PROCESS_NOISE` if each arm had one process."""
    floor = result.noise_floor or 0.0
    return floor if result.processes > 1 else max(floor, ONE_PROCESS_NOISE)


def _describe_disturbance(now: Load, then: Load) -> str:
    """Return why times of the two sessions cannot be compared directly; "" if they can."""
    if now.others is None or then.others is None:
        return "the machine's load is unknown"
    if max(now.others, then.others) > QUIET:
        return f"other processes used {now.others:.0%} of the CPUs (baseline: {then.others:.0%})"
    return ""


@dataclass
class _Changes:
    """Collects changes of times as regressions or notes of `result`."""

    limit: float  # changes up to this are ignored
    result: BaselineComparison

    def note(
        self,
        name: str,
        change: Estimate,
        excuse: str,
        beside: str = "",
        everything: Sequence[Estimate] = (),
    ) -> None:
        """Add a regression if the time grew by more than the limit; a note if there is an excuse.

        `beside` is the arm it is a ratio to. `everything` holds the changes of all arms, for one
        sentence if all got slower or all faster.
        """
        known = math.isfinite(change.half_width)
        interval = [change.low, change.high] if known else None
        row = {"name": name, "beside": beside, "ratio": change.ratio, "interval": interval}
        self.result.compared.append({**row, "limit": self.limit})
        name, by = escape(name), escape(f" next to {beside}") if beside else ""
        if not known:
            self.result.notes.append(f"{name}: too few blocks to compare its times")
            return
        sign = self.sign(change)
        factor, least, most = (1 / ratio for ratio in (change.ratio, change.high, change.low))
        slower = (
            f"{name} takes {factor - 1:.1%} more time per sample{by} ({least - 1:.1%} to "
            f"{most - 1:.1%}; up to {self.limit:.1%} is no regression)"
        )
        text = slower if sign > 0 else f"{name} takes {1 - factor:.1%} less time{by}"
        if len(everything) > 1 and all(self.sign(one) == sign for one in everything):
            text = (
                f"all arms took {factor:.2f} times as long per sample ({least:.2f} to {most:.2f}, "
                "by the reference); the machine or shared code changed"
            )
        if sign > 0 and not excuse:
            self.result.regressions.append(text)
        elif sign:
            self.result.notes.append(f"{text}; not judged: {excuse}" if sign > 0 else text)

    def sign(self, change: Estimate) -> int:
        """Return 1 if slower by more than the limit, -1 if faster, else 0."""
        if change.high < 1 and change.ratio < 1 / (1 + self.limit):
            return 1
        return -int(change.low > 1 and change.ratio > 1 + self.limit)


def _compare_memory(now: ArmResult, then: ArmResult, tolerance: float) -> Iterator[str]:
    for key, owner in (("peak_process_bytes", "process"), ("peak_device_bytes", "device")):
        ours, theirs = getattr(now, key), getattr(then, key)
        if ours and theirs and ours - theirs > max(LEAST_BYTES, theirs * tolerance):
            yield (
                f"{escape(now.name)} uses {(ours - theirs) / 2**20:,.0f} MiB more "
                f"peak {owner} memory ({ours / theirs - 1:.0%})"
            )
