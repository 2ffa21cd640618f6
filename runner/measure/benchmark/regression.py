"""Compare a benchmark with a stored one: slower arms, more memory, worse parity.

By the speedup over the reference of their session; its own time counts on quiet machines only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.core.errors import ConfigError, StorageError
from runner.core.record.text import escape_control_chars as escape
from runner.core.schemas.jobs import BenchmarkConfig
from runner.measure.benchmark.arms import compose_arms
from runner.measure.benchmark.result import DONE, ArmResult, BenchmarkResult, Load, machine_facts
from runner.measure.benchmark.statistics import (
    ONE_PROCESS_NOISE,
    Estimate,
    bonferroni_alpha,
    unpaired_ratio,
)

KEY = "benchmark.baseline"
PARITY_ORDER = ("exact", "explained by precision", "FAIL")  # best to worst
MEMORY_NOISE_BYTES = 16 << 20  # more than the memory of two equal runs differs by
QUIET_LOAD = 0.05  # share of CPUs used by others, up to which absolute times are judged

FACTS = "cpu cores memory_gib platform device device_name device_memory_gib threads".split()
"""Facts that must be equal for two machines to be comparable; the torch version is not one."""

ArmPair = tuple[ArmResult, ArmResult]  # (current, baseline)


@dataclass
class BaselineComparison:
    """One benchmark compared with another."""

    path: str
    started: str  # when the stored one was measured
    regressions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compared: list[dict[str, Any]] = field(default_factory=list)  # ratios with intervals

    def to_dict(self) -> dict[str, Any]:
        """Return the dict that is stored as `BenchmarkResult.baseline`."""
        return {
            "path": self.path,
            "started": escape(self.started),
            "regressed": bool(self.regressions),
            "sentences": [*(self.regressions or ["no regressions"]), *self.notes],
            "regressions": self.regressions,
            "compared": self.compared,
        }


def check_arms(
    settings: BenchmarkConfig, overrides: Sequence[str], folders: Sequence[Path], config_name: str
) -> None:
    """Check that every arm composes, and that the stored result to compare with exists."""
    arms = compose_arms(settings, overrides, folders, config_name)
    load_baseline(settings, [arm.name for arm in arms])


def load_baseline(settings: BenchmarkConfig, names: Sequence[str]) -> BenchmarkResult | None:
    """Load the result that `benchmark.baseline` names; None if it is not set.

    Raises ConfigError before anything is measured: no file, damaged, other machine, no arm of
    `names`.
    """
    if settings.baseline is None:
        return None
    try:
        baseline = BenchmarkResult.read(Path(settings.baseline))
        for number, arm in enumerate(baseline.arms):
            if not all(0 < ms < math.inf for ms in arm.per_sample_ms):
                damage = f"arms[{number}].per_sample_ms has a time ≤ 0"
                raise StorageError(f"{settings.baseline} is damaged: {damage}")
    except StorageError as error:
        raise ConfigError(KEY, escape(str(error)), "name a benchmark.json or its folder") from error
    _check_machine(baseline, machine_facts())
    stored_names = [arm.name for arm in baseline.arms]
    if not set(stored_names) & set(names):
        text = f"has none of the measured arms, only {escape(', '.join(stored_names))}"
        raise ConfigError(KEY, text)
    return baseline


def _check_machine(baseline: BenchmarkResult, current: dict[str, Any]) -> None:
    was = baseline.machine
    keys = (key for key in FACTS if key in current and key in was and current[key] != was[key])
    differences = [f"{key.replace('_', ' ')} is {current[key]}, was {was[key]}" for key in keys]
    if differences:
        problem = f"was measured on another machine: {escape('; '.join(differences))}"
        raise ConfigError(KEY, problem, "measure a new baseline on this machine")


def compare_with_baseline(
    current: BenchmarkResult, baseline: BenchmarkResult, settings: BenchmarkConfig
) -> BaselineComparison:
    """Compare every arm that both results have. Raises ConfigError for another machine."""
    _check_machine(baseline, current.machine)
    result = BaselineComparison(str(settings.baseline), baseline.started)
    pairs = _pair_arms(current, baseline, result)
    torch, baseline_torch = current.machine.get("torch"), baseline.machine.get("torch")
    if torch != baseline_torch:
        result.notes.append(escape(f"torch is {torch}, was {baseline_torch}"))
    for arm, baseline_arm in pairs:
        if arm.status != DONE and baseline_arm.status == DONE:
            result.regressions.append(escape(f"{arm.name} ended: {arm.status}: {arm.reason}"))
    _compare_times(current, baseline, pairs, settings.tolerance, result)
    for arm, baseline_arm in pairs:
        result.regressions += map(escape, _compare_results(arm, baseline_arm, settings.tolerance))
    return result


def _pair_arms(
    current: BenchmarkResult, baseline: BenchmarkResult, result: BaselineComparison
) -> list[ArmPair]:
    """Pair arms of the same name and work; the others become notes."""
    unpaired = {arm.name: arm for arm in baseline.arms}
    pairs: list[ArmPair] = []
    for arm in current.arms:
        baseline_arm = unpaired.pop(arm.name, None)
        if baseline_arm is None:
            result.notes.append(escape(f"{arm.name} is not in the baseline"))
            continue
        values = {"its command": " ".join(arm.overrides), **arm.config}
        stored = {"its command": " ".join(baseline_arm.overrides), **baseline_arm.config}
        keys = (key for key in values if key in stored and values[key] != stored[key])
        if (key := next(keys, None)) is None:
            pairs.append((arm, baseline_arm))
            continue
        difference = f"{key} is {values[key]}, was {stored[key]}"
        result.notes.append(escape(f"{arm.name} is not compared: {difference}"))
    result.notes += [escape(f"{name} is only in the baseline") for name in unpaired]
    return pairs


# -- times and memory ------------------------------------------------------------------------------


def _compare_times(
    current: BenchmarkResult,
    baseline: BenchmarkResult,
    pairs: Sequence[ArmPair],
    tolerance: float,
    result: BaselineComparison,
) -> None:
    """Compare the reference by its own time, the other arms by their speedup over it.

    A speedup has the noise floor of its session, so a ratio of two has both. If an arm's own time
    is not longer (on a quiet machine), a lower speedup means that the reference got faster.
    """
    timed = [(a, b) for a, b in pairs if a.per_sample_ms and b.per_sample_ms]
    if current.compared != baseline.compared:  # an arm with data workers came or went
        text = f"times are not compared: this result has the {current.compared}"
        result.notes.append(escape(f"{text}, the baseline the {baseline.compared}"))
        return
    if current.noise_floor is None or baseline.noise_floor is None:
        result.notes.append("times are not compared: one of the two noise floors is unknown")
        return
    if not timed:
        return
    limit = max(math.hypot(_noise_floor(current), _noise_floor(baseline)), tolerance)
    alpha = bonferroni_alpha(len(timed))
    reference_pair = next((pair for pair in timed if pair[0].name == current.reference), timed[0])
    reference = reference_pair[0].name
    disturbance = _describe_disturbance(current.load, baseline.load)
    own = {a.name: unpaired_ratio(b.per_sample_ms, a.per_sample_ms, alpha) for a, b in timed}
    common = len({_direction(one, limit) for one in own.values()}) == 1 < len(own)
    _add_change(result, limit, reference, own[reference], disturbance, of_all_arms=common)
    for pair in timed:
        if pair is reference_pair:
            continue
        speedups, baseline_speedups = (
            [a / b for a, b in zip(one.per_sample_ms, base.per_sample_ms, strict=False)]
            for one, base in zip(pair, reference_pair, strict=True)
        )
        name, exemption = pair[0].name, ""
        if not disturbance and own[name].ratio >= 1 / (1 + limit):
            exemption = "its own time is within the limit"
        change = unpaired_ratio(baseline_speedups, speedups, alpha)
        _add_change(result, limit, name, change, exemption, relative_to=reference)


def _noise_floor(result: BenchmarkResult) -> float:
    """Return the noise floor; at least `ONE_PROCESS_NOISE` if each arm had one process."""
    floor = result.noise_floor or 0.0
    return floor if result.processes > 1 else max(floor, ONE_PROCESS_NOISE)


def _describe_disturbance(current: Load, baseline: Load) -> str:
    """Return why times of the two sessions cannot be compared directly; "" if they can."""
    if current.others is None or baseline.others is None:
        return "the machine's load is unknown"
    if max(current.others, baseline.others) > QUIET_LOAD:
        shares = f"{current.others:.0%} of the CPUs (baseline: {baseline.others:.0%})"
        return f"other processes used {shares}"
    return ""


def _direction(change: Estimate, limit: float) -> int:
    """Return 1 if slower by more than the limit, -1 if faster, else 0."""
    if change.high < 1 and change.ratio < 1 / (1 + limit):
        return 1
    return -int(change.low > 1 and change.ratio > 1 + limit)


def _add_change(
    result: BaselineComparison,
    limit: float,
    name: str,
    change: Estimate,
    exemption: str,
    relative_to: str = "",
    of_all_arms: bool = False,
) -> None:
    """Add a regression if the time grew beyond the limit; a note if it has an exemption."""
    has_interval = math.isfinite(change.half_width)
    interval = [change.low, change.high] if has_interval else None
    row = {"name": name, "beside": relative_to, "ratio": change.ratio, "interval": interval}
    result.compared.append({**row, "limit": limit})
    name, suffix = escape(name), escape(f" next to {relative_to}") if relative_to else ""
    if not has_interval:
        result.notes.append(f"{name}: too few blocks to compare its times")
        return
    direction = _direction(change, limit)
    factor, low, high = (1 / ratio for ratio in (change.ratio, change.high, change.low))
    text = f"{name} takes {1 - factor:.1%} less time{suffix}"
    if of_all_arms:
        text = f"all arms took {factor:.2f} times as long per sample ({low:.2f} to {high:.2f}, by "
        text += "the reference); the machine or shared code changed"
    elif direction > 0:
        text = f"{name} takes {factor - 1:.1%} more time per sample{suffix} ({low - 1:.1%} to "
        text += f"{high - 1:.1%}; up to {limit:.1%} is no regression)"
    if direction > 0 and not exemption:
        result.regressions.append(text)
    elif direction:
        result.notes.append(f"{text}; not judged: {exemption}" if direction > 0 else text)


def _compare_results(current: ArmResult, baseline: ArmResult, tolerance: float) -> Iterator[str]:
    for key, owner in (("peak_process_bytes", "process"), ("peak_device_bytes", "device")):
        peak, was = getattr(current, key), getattr(baseline, key)
        if peak and was and peak - was > max(MEMORY_NOISE_BYTES, was * tolerance):
            growth = f"{(peak - was) / 2**20:,.0f} MiB more peak {owner} memory"
            yield f"{current.name} uses {growth} ({peak / was - 1:.0%})"
    order = {verdict: place for place, verdict in enumerate(PARITY_ORDER)}
    parity, was = current.parity, baseline.parity
    if parity in order and was in order and order[parity] > order[was]:
        yield f"{current.name}: parity is {parity}, was {was} ({current.parity_reason})"
