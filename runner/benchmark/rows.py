"""From what was measured of a benchmark's arms to the rows and notes of its result."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from runner.benchmark.arms import Arm
from runner.benchmark.blocks import Turn
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.parity_checker import Verdict
from runner.benchmark.result import DONE, MEAN, MEDIAN, ArmResult, Control, Load
from runner.benchmark.rounds import INTERRUPTED, Round
from runner.benchmark.statistics import (
    CONFIDENCE,
    Estimate,
    claim,
    lag1_rank_autocorrelation,
    median_interval,
    noise_floor,
)
from runner.benchmark.workers.messages import Finished, Ready
from runner.config import OF_NO_CONSEQUENCE, RunConfig, flat
from runner.record.text import escape_control_chars

OTHERS, CLOCK, STOLEN = 0.10, 0.10, 0.02  # above these the machine was noisy
RARE = 1.5  # times by which mean and median may tell different speedups
LEFT_OUT = (*OF_NO_CONSEQUENCE, "debug")


@dataclass
class Measurements(Round):
    """All that is known of a benchmark's arms, by name, so far."""

    reference: str = ""
    control: str = ""  # the name of the reference's second process; "" without one
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    def turns(self, name: str) -> list[Turn]:
        """The arm's turns, none where it has not had one."""
        return self.measured.turns.get(name, [])

    @property
    def compared(self) -> str:
        """Which step of a turn is compared: see `WorkerPool.turn`."""
        return MEAN if any(ready.workers for ready in self.ready.values()) else MEDIAN

    def estimate(self, name: str) -> Estimate | None:
        """The arm against the reference; None where the reference was not measured."""
        if self.reference in self.ended:
            return None
        estimate = self.measured.estimates.get(name)
        return estimate if estimate is not None and math.isfinite(estimate.ratio) else None

    def control_result(self) -> Control | None:
        """The reference against itself; None without an interval."""
        estimate = self.estimate(self.control)
        if estimate is None or not math.isfinite(estimate.half_width):
            return None
        return Control(estimate.ratio, (estimate.low, estimate.high))

    def noise_floor(self) -> float:
        """What the control says is noise: 0 without one, inf where it has no interval."""
        return noise_floor(self.estimate(self.control)) if self.control else 0.0


def make_row(
    arm: Arm, measurements: Measurements, settings: BenchmarkConfig, reference: Arm
) -> ArmResult:
    """One arm's result."""
    ready = measurements.ready.get(arm.name)
    finished, ended = measurements.finished.get(arm.name), measurements.ended.get(arm.name)
    row = ArmResult(
        arm.name,
        list(arm.overrides),
        DONE if finished is not None else INTERRUPTED,
        folder=arm.folder or None,
        command=arm.command,
        config=_shaping_keys(arm.config),
        samples_per_step=ready.samples_per_step if ready else arm.config.training.batch_size,
        setup_seconds=ready.setup_seconds if ready else None,
        other_work=other_work(arm, reference),
    )
    if ended is not None:
        row.status, row.reason = ended.status, str(ended)
    elif finished is None:
        row.reason = "the benchmark was interrupted"
    _fill_speed(row, measurements.turns(arm.name), measurements.compared == MEAN)
    _fill_ratio(row, measurements)
    _fill_setup(row, measurements)
    if finished is not None:
        _fill_run(row, finished)
    verdict = measurements.verdicts.get(arm.name)
    if verdict is not None:
        row.parity, row.parity_reason = verdict.parity, verdict.reason
    elif finished is not None:
        why = "the benchmark was interrupted" if settings.parity else "benchmark.parity=false"
        row.parity_reason = f"not judged: {why}"
    return row


def _shaping_keys(config: RunConfig) -> dict[str, Any]:
    """Keys of the config that shape the run, as JSON will hold them."""
    keys = {
        key: value
        for key, value in flat(config).items()
        if key.partition(".")[0] not in LEFT_OUT and key != "checkpoint.resume"
    }
    values: dict[str, Any] = json.loads(json.dumps(keys, default=str))
    return values


def _fill_speed(row: ArmResult, turns: Sequence[Turn], of_mean: bool) -> None:
    if not turns:
        return
    usual = [1e3 * turn.seconds / turn.steps if of_mean else turn.median_ms for turn in turns]
    steps = sorted(ms for turn in turns for ms in turn.step_ms)
    seconds = sum(turn.seconds for turn in turns)
    low, high = median_interval(usual, 1 - CONFIDENCE)
    row.blocks = len(turns)
    row.per_sample_ms = [turn.per_sample_ms for turn in turns]
    row.step_ms = median(usual)
    row.step_ms_interval = (low, high) if math.isfinite(high) else None
    row.step_ms_p95 = steps[math.ceil(0.95 * len(steps)) - 1] if steps else None
    if seconds > 0:
        row.samples_per_second = sum(turn.samples for turn in turns) / seconds
        row.data_wait = min(1.0, sum(turn.data_seconds for turn in turns) / seconds)


def _fill_ratio(row: ArmResult, measurements: Measurements) -> None:
    if row.name == measurements.reference:
        row.speedup = 1.0 if row.step_ms is not None else None
        return
    estimate = measurements.estimate(row.name)
    if estimate is None:
        return
    row.speedup = estimate.ratio
    if math.isfinite(estimate.half_width):
        row.speedup_interval = (estimate.low, estimate.high)
    if row.status in (DONE, INTERRUPTED):  # the last look's interval holds however it ended
        row.claim = claim(estimate, measurements.noise_floor())


def _fill_setup(row: ArmResult, measurements: Measurements) -> None:
    """What it takes to start, and from how many steps on that is paid back."""
    ready = measurements.ready.get(row.name)
    if ready is None:
        return
    row.compile_seconds = ready.compile_seconds
    # the first process of all also waits for the disk to bring torch, so the faster start counts
    names = measurements.reference, measurements.control
    plain = [measurements.ready[name] for name in names if name in measurements.ready]
    if row.claim != "faster" or row.speedup is None or row.step_ms is None or not plain:
        return
    extra = _settled_seconds(ready) - min(map(_settled_seconds, plain))
    saved = row.step_ms / 1e3 * (row.speedup - 1)  # over the reference, with as many samples
    row.break_even_steps = max(0, math.ceil(extra / saved))


def _settled_seconds(ready: Ready) -> float:
    """Seconds until its steps were at full speed: some compile after the first one too."""
    return ready.setup_seconds + ready.settling_seconds


def _fill_run(row: ArmResult, finished: Finished) -> None:
    row.summary = finished.summary
    memory = finished.summary.get("memory") or {}
    own = memory.get("peak_process_bytes")
    row.peak_process_bytes = own + finished.worker_bytes if own else None
    row.peak_device_bytes = memory.get("peak_device_bytes") or None
    row.mfu = finished.mfu
    row.problems = list(finished.problems)
    row.losses = list(finished.losses)
    row.metrics = dict(finished.metrics)
    row.seconds_to_target = finished.seconds_to_target
    row.notes = [*finished.notes, *(f"does not train: {text}" for text in finished.problems)]
    requested = [one for one in finished.summary.get("techniques") or [] if one.get("requested")]
    idle = [str(one.get("name")) for one in requested if not one.get("engaged")]
    if idle:  # the reasons are in the summary, and in the report
        row.notes.append(
            f"{len(idle)} of {len(requested)} techniques did not take hold: {', '.join(idle)}"
        )


def collect_choices(finished: Finished | None) -> dict[str, Any]:
    """What a run had chosen automatically, from its summary."""
    rows = (finished.summary.get("choices") or []) if finished is not None else []
    return {row["key"]: row["value"] for row in rows if "key" in row and "value" in row}


def median_load(turns: Mapping[str, Sequence[Turn]]) -> Load:
    """The load of the machine over all arms' turns."""
    blocks = max((len(some) for some in turns.values()), default=0)

    def over_blocks(key: str) -> list[float]:
        loads = (
            [getattr(some[n].load, key) for some in turns.values() if n < len(some)]
            for n in range(blocks)
        )
        return [
            median(known) for values in loads if (known := [v for v in values if v is not None])
        ]

    middle = {key: over_blocks(key) for key in ("others", "mhz", "device_mhz", "stolen")}
    values = {key: median(some) if some else None for key, some in middle.items()}
    clocks, mhz = middle["mhz"], values["mhz"]
    return Load(**values, mhz_spread=(max(clocks) - min(clocks)) / mhz if mhz else None)


# -- notes -----------------------------------------------------------------------------------------


def note_rare_steps(rows: Sequence[ArmResult], reference: str) -> None:
    """Add a note where rare, slow steps tell another story than the median step."""
    plain = next((row.samples_per_second for row in rows if row.name == reference), None)
    for row in rows:
        if row.samples_per_second is None or not plain or row.speedup is None:
            continue
        overall = row.samples_per_second / plain
        if max(overall / row.speedup, row.speedup / overall) > RARE:
            row.notes.append(
                f"with rare, slow steps in it, {overall:.2f}× the samples a second of {reference}; "
                f"a step of the usual kind is {row.speedup:.2f}× as fast"
            )


def describe_noise(load: Load, control: Control | None) -> list[str]:
    """Notes on a machine on which small differences cannot be seen."""
    notes = []
    if load.others is not None and load.others > OTHERS:
        notes.append(
            f"noisy machine: other processes took {load.others:.0%} of the CPUs meanwhile: times "
            "by themselves are too long, and whether all arms lost as much by it is not known"
        )
    if load.mhz_spread is not None and load.mhz_spread > CLOCK:
        notes.append(f"noisy machine: the CPU's clock varied by {load.mhz_spread:.0%}")
    if load.stolen is not None and load.stolen > STOLEN:
        notes.append(
            f"noisy machine: the hypervisor gave {load.stolen:.0%} of the time to other machines"
        )
    if control is not None and not control.interval[0] <= 1 <= control.interval[1]:
        low, high = control.interval
        notes.append(
            f"the reference against itself came out at {control.ratio:.3f} ({low:.3f} to "
            f"{high:.3f}), which should be 1: one process was better off than the other, and "
            "so may others be; no difference as small as that is claimed"
        )
    return notes


def describe_dependence(measurements: Measurements) -> list[str]:
    """A note where blocks are correlated with the ones before, which makes intervals wider."""
    base = [turn.per_sample_ms for turn in measurements.turns(measurements.reference)]
    correlations = {}
    for name, turns in measurements.measured.turns.items():
        if name == measurements.reference or measurements.estimate(name) is None:
            continue
        pairs = zip(base, turns, strict=False)
        ratios = [math.log(one / other.per_sample_ms) for one, other in pairs]
        correlation = lag1_rank_autocorrelation(ratios)
        if correlation > 2 / math.sqrt(len(ratios)):  # more than chance
            correlations[name] = correlation
    if not correlations:
        return []
    return [
        f"blocks depend on each other: ratios of {', '.join(correlations)} resemble those of the "
        f"block before (correlation {max(correlations.values()):.1f}), so their intervals are "
        "wider than by chance alone; where such spells last for many blocks, even that may be too "
        "narrow"
    ]


# -- where arms train something else, so that not everything can be compared -----------------------

WORK: dict[str, Callable[[RunConfig], Any]] = {
    "model": lambda config: config.model,
    "objective": lambda config: config.objective,
    "optimizer": lambda config: config.optimizer,
    "stability": lambda config: config.stability,
    "seed": lambda config: config.seed,
    "batch size": lambda config: config.training.batch_size,
    "device.tf32": lambda config: config.device.tf32,
}
"""What is trained, whatever techniques are asked for: parity holds an arm against its own."""
LEVEL = "optimization level"
"""Of an arm that does other work and names no level: it has another one as well."""


def other_work(arm: Arm, reference: Arm) -> list[str]:
    """In what the arm trains something else than the reference."""
    parts = [part for part, of in WORK.items() if of(arm.config) != of(reference.config)]
    return [*parts, LEVEL] if parts and _inherits_other_level(arm, reference) else parts


def describe_differences(arms: Sequence[Arm], reference: Arm) -> list[str]:
    """Notes on arms that train something else, are at another level, or have other batches."""
    plain, notes = escape_control_chars(reference.name), []
    for part in WORK:
        others = [arm for arm in arms if part in other_work(arm, reference)]
        if others and part != "batch size":  # which has a note of its own
            notes.append(
                f"{_names(others)}: another {part} than {plain}, so only times can be compared, "
                "not losses"
            )
    inherited: dict[str, list[Arm]] = {}
    for arm in arms:
        if _inherits_other_level(arm, reference):
            inherited.setdefault(arm.base, []).append(arm)
    for base, some in inherited.items():
        notes.append(
            f"{_names(some)}: on top of {base}, unlike {plain}; "
            "write optimization=none in an arm for its overrides alone"
        )
    sizes = {escape_control_chars(arm.name): arm.config.training.batch_size for arm in arms}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        notes.append(
            f"steps are of different sizes ({listed} samples): times are compared per sample, and "
            "after as many samples a larger batch has made fewer updates, so losses are not alike"
        )
    return notes


def _names(arms: Sequence[Arm]) -> str:
    return ", ".join(escape_control_chars(arm.name) for arm in arms)


def _inherits_other_level(arm: Arm, reference: Arm) -> bool:
    levels = arm.config.optimization.level, reference.config.optimization.level
    return bool(arm.base) and levels[0] != levels[1]
