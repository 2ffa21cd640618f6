"""From the measurements of a benchmark's arms to the rows and notes of its result."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from runner.benchmark.arms import Arm
from runner.benchmark.blocks import INTERRUPTED, Finished, Measured, Ready, Turn
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.parity_checker import ParityVerdict
from runner.benchmark.result import DONE, MEAN, MEDIAN, ArmResult, Control, Load
from runner.benchmark.rounds import Round
from runner.benchmark.statistics import (
    CONFIDENCE,
    ONE_PROCESS,
    Estimate,
    claim,
    median_interval,
    noise_floor,
)
from runner.config import OF_NO_CONSEQUENCE, RunConfig, flat
from runner.record.text import escape_control_chars

NOISY = 0.10  # share of the CPUs that others take on a noisy machine
LEFT_OUT = (*OF_NO_CONSEQUENCE, "debug")
WORK: dict[str, Callable[[RunConfig], Any]] = {
    "model": lambda config: config.model,
    "objective": lambda config: config.objective,
    "optimizer": lambda config: config.optimizer,
    "stability": lambda config: config.stability,
    "seed": lambda config: config.seed,
    "batch size": lambda config: config.training.batch_size,
    "device.tf32": lambda config: config.device.tf32,
}
"""What is trained, techniques left out: parity holds an arm against its own."""


@dataclass
class Measurements(Round):
    """All that is known of a benchmark's arms, by name, so far."""

    reference: str = ""
    control: str = ""  # the name of the reference's second process; "" without one
    verdicts: dict[str, ParityVerdict] = field(default_factory=dict)

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
        """What the control says is noise; inf where it has no interval.

        Without one 0, or with one process of each arm `ONE_PROCESS`.
        """
        if self.control:
            return noise_floor(self.estimate(self.control))
        return 0.0 if self.measured.processes > 1 else ONE_PROCESS


def make_row(
    arm: Arm, measurements: Measurements, settings: BenchmarkConfig, reference: Arm
) -> ArmResult:
    """One arm's result."""
    ready, finished = measurements.ready.get(arm.name), measurements.finished.get(arm.name)
    row = ArmResult(
        arm.name,
        list(arm.overrides),
        DONE if finished is not None else INTERRUPTED,
        reason="" if finished is not None else "the benchmark was interrupted",
        folder=arm.folder or None,
        command=arm.command,
        config=_shaping_keys(arm.config),
        samples_per_step=ready.samples_per_step if ready else arm.config.training.batch_size,
        other_work=other_work(arm, reference),
    )
    if (ended := measurements.ended.get(arm.name)) is not None:
        row.status, row.reason = ended.status, str(ended)
    if turns := measurements.measured.turns.get(arm.name):
        _fill_speed(row, turns, measurements.compared == MEAN)
    _fill_ratio(row, measurements)
    if ready is not None:
        _fill_setup(row, ready, measurements)
    if finished is not None:
        _fill_run(row, finished)
    verdict = measurements.verdicts.get(arm.name)
    if verdict is not None:
        row.parity, row.parity_reason = verdict.parity, verdict.reason
    elif row.status == DONE:
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
    usual = [1e3 * turn.seconds / turn.steps if of_mean else turn.median_ms for turn in turns]
    steps = sorted(ms for turn in turns for ms in turn.step_ms)
    seconds = sum(turn.seconds for turn in turns)
    low, high = median_interval(usual, 1 - CONFIDENCE)
    row.blocks = len(turns)
    row.per_sample_ms = [turn.per_sample_ms for turn in turns]
    row.step_ms = median(usual)
    row.step_ms_interval = (low, high) if math.isfinite(high) else None
    row.step_ms_p95 = steps[math.ceil(0.95 * len(steps)) - 1] if steps else None
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


def _fill_setup(row: ArmResult, ready: Ready, measurements: Measurements) -> None:
    """What it takes to start, and from how many steps on that is paid back."""
    row.setup_seconds, row.compile_seconds = ready.setup_seconds, ready.compile_seconds
    # the first process of all also waits for the disk to bring torch, so the faster start counts
    names = measurements.reference, measurements.control
    plain = [measurements.ready[name] for name in names if name in measurements.ready]
    if row.claim != "faster" or row.speedup is None or row.step_ms is None or not plain:
        return
    # some compile after the first step too
    start = ready.setup_seconds + ready.settling_seconds
    extra = start - min(one.setup_seconds + one.settling_seconds for one in plain)
    saved = row.step_ms / 1e3 * (row.speedup - 1)  # over the reference, with as many samples
    row.break_even_steps = max(0, math.ceil(extra / saved))


def _fill_run(row: ArmResult, finished: Finished) -> None:
    row.summary = finished.summary
    memory = finished.summary.get("memory") or {}
    row.peak_process_bytes = memory.get("peak_process_bytes") or None
    row.peak_device_bytes = memory.get("peak_device_bytes") or None
    row.problems = list(finished.problems)
    row.losses = list(finished.losses)
    row.notes = [*finished.notes, *(f"does not train: {text}" for text in finished.problems)]
    requested = [one for one in finished.summary.get("techniques") or [] if one.get("requested")]
    idle = [str(one.get("name")) for one in requested if not one.get("engaged")]
    if idle:  # the reasons are in the summary, and in the report
        row.notes.append(
            f"{len(idle)} of {len(requested)} techniques did not engage: {', '.join(idle)}"
        )


def collect_choices(finished: Finished | None) -> dict[str, Any]:
    """What a run had chosen automatically, from its summary."""
    rows = (finished.summary.get("choices") or []) if finished is not None else []
    return {row["key"]: row["value"] for row in rows if "key" in row and "value" in row}


def median_load(turns: Mapping[str, Sequence[Turn]]) -> Load:
    """The load of the machine: the median over all blocks of each block's median."""
    blocks: dict[int, list[float]] = {}
    for arm_turns in turns.values():
        for number, turn in enumerate(arm_turns):
            if turn.others is not None:
                blocks.setdefault(number, []).append(turn.others)
    return Load(median(map(median, blocks.values())) if blocks else None)


# -- notes -----------------------------------------------------------------------------------------


def describe_noise(load: Load, control: Control | None) -> list[str]:
    """Notes on a machine on which small differences cannot be seen."""
    notes = []
    if load.others is not None and load.others > NOISY:
        notes.append(f"noisy machine: other processes took {load.others:.0%} of the CPUs")
    if control is not None and not control.interval[0] <= 1 <= control.interval[1]:
        low, high = control.interval
        notes.append(
            f"the reference against itself came out at {control.ratio:.3f} ({low:.3f} to "
            f"{high:.3f}), which should be 1: no difference as small as that is claimed"
        )
    return notes


def describe_processes(measured: Measured, settings: BenchmarkConfig) -> list[str]:
    """A note where intervals are of one process of each arm."""
    if measured.processes > 1 or not measured.estimates:
        return []
    fix = "a larger benchmark.budget_s, or fewer arms, allows several"
    if settings.processes == 1:
        fix = "benchmark.processes=5 measures several"
    return [
        "each arm was measured in one process, and how processes differ is in no interval: "
        f"nothing within {ONE_PROCESS:.0%} is claimed; {fix}"
    ]


def other_work(arm: Arm, reference: Arm) -> list[str]:
    """In what the arm trains something else than the reference."""
    return [part for part, of in WORK.items() if of(arm.config) != of(reference.config)]


def describe_differences(arms: Sequence[Arm], reference: Arm) -> list[str]:
    """Notes on arms that train something else, or have other batches."""
    notes = []
    for arm in arms:
        parts = [part for part in other_work(arm, reference) if part != "batch size"]
        if parts:
            notes.append(
                f"{escape_control_chars(arm.name)}: another {', '.join(parts)} than "
                f"{escape_control_chars(reference.name)}, so only times can be compared"
            )
    sizes = {escape_control_chars(arm.name): arm.config.training.batch_size for arm in arms}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        notes.append(
            f"steps are of different sizes ({listed} samples): times are compared per sample, and "
            "after as many samples a larger batch has made fewer updates, so losses are not alike"
        )
    return notes


def describe_ends(measurements: Measurements) -> list[str]:
    """Notes on a reference or control that ended, and on which step is compared."""
    notes, name = [], measurements.reference
    if measurements.compared == MEAN:
        notes.append(
            "data workers hand over several batches at a time: what is compared, and the step "
            "that is shown, is the mean step of each turn, not the median one"
        )
    if (ended := measurements.ended.get(name)) is not None:
        notes.append(
            f"the reference, {name}, ended ({ended.status}: {ended}): the others have times "
            "and no speed-ups; benchmark.reference=… names another"
        )
    if (ended := measurements.ended.get(measurements.control)) is not None:
        notes.append(f"the control ended ({ended.status}: {ended})")
    if measurements.measured.estimates and math.isinf(measurements.noise_floor()):
        notes.append(
            f"{measurements.control} has no interval: the noise floor is not known, "
            "so nothing is claimed"
        )
    return notes
