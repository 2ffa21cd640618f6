"""What a benchmark's arms came to: from what was measured to the rows of its result."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from runner.benchmark.agreement import Verdict
from runner.benchmark.arms import Arm
from runner.benchmark.blocks import ArmEnded, Measured, Turn
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.crew.crew import Finished, Ready
from runner.benchmark.differences import other_work
from runner.benchmark.result import DONE, MEAN, MEDIAN, ArmResult, Control, Load
from runner.benchmark.statistics import (
    CONFIDENCE,
    Estimate,
    claim,
    likeness,
    median_interval,
    noise_floor,
)
from runner.config import OF_NO_CONSEQUENCE, flat

OTHERS, CLOCK, STOLEN = 0.10, 0.10, 0.02  # above these the machine was noisy
INTERRUPTED = "interrupted"
RARE = 1.5  # times by which mean and median may tell different speedups
LEFT_OUT = (*OF_NO_CONSEQUENCE, "debug")


@dataclass
class Seen:
    """All that is known of the arms, by name, as far as it came."""

    reference: str
    control: str = ""  # the name of the reference's second process; "" without one
    ready: dict[str, Ready] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)
    ended: dict[str, ArmEnded] = field(default_factory=dict)
    measured: Measured = field(default_factory=lambda: Measured({}, {}))
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    def turns(self, name: str) -> list[Turn]:
        """The arm's turns, none where it has not had one."""
        return self.measured.turns.get(name, [])

    @property
    def compared(self) -> str:
        """Which step of a turn is held against others: see `Crew.turn`."""
        return MEAN if any(ready.workers for ready in self.ready.values()) else MEDIAN

    def estimate(self, name: str) -> Estimate | None:
        """The arm against the reference; None where the reference came to nothing."""
        if self.reference in self.ended:
            return None
        found = self.measured.estimates.get(name)
        return found if found is not None and math.isfinite(found.ratio) else None


def row(arm: Arm, seen: Seen, settings: BenchmarkConfig, reference: Arm) -> ArmResult:
    """One arm's result."""
    ready, finished, ended = (
        seen.ready.get(arm.name), seen.finished.get(arm.name), seen.ended.get(arm.name),
    )  # fmt: skip
    found = ArmResult(
        arm.name,
        list(arm.overrides),
        DONE if finished is not None else INTERRUPTED,
        folder=arm.folder or None,
        command=arm.command,
        samples_per_step=ready.samples_per_step if ready else arm.config.training.batch_size,
        setup_seconds=ready.setup_seconds if ready else None,
        other_work=other_work(arm, reference),
    )
    shapes = {
        key: value
        for key, value in flat(arm.config).items()
        if key.partition(".")[0] not in LEFT_OUT and key != "checkpoint.resume"
    }
    found.config = json.loads(json.dumps(shapes, default=str))  # as it will be read again
    if ended is not None:
        found.status, found.reason = ended.status, str(ended)
    elif finished is None:
        found.reason = "the benchmark was interrupted"
    _speed(found, seen.turns(arm.name), seen.compared == MEAN)
    _ratio(found, seen)
    _price(found, seen)
    if finished is not None:
        _run(found, finished)
    verdict = seen.verdicts.get(arm.name)
    if verdict is not None:
        found.parity, found.parity_reason = verdict.parity, verdict.reason
    elif finished is not None and settings.parity:
        found.parity_reason = "not judged: the benchmark was interrupted"
    elif finished is not None:
        found.parity_reason = "not judged: benchmark.parity=false"
    return found


def _speed(found: ArmResult, turns: Sequence[Turn], of_mean: bool) -> None:
    if not turns:
        return
    usual = [1e3 * turn.seconds / turn.steps if of_mean else turn.median_ms for turn in turns]
    steps = sorted(ms for turn in turns for ms in turn.step_ms)
    seconds = sum(turn.seconds for turn in turns)
    low, high = median_interval(usual, 1 - CONFIDENCE)
    found.blocks = len(turns)
    found.per_sample_ms = [turn.per_sample_ms for turn in turns]
    found.step_ms = median(usual)
    found.step_ms_interval = (low, high) if math.isfinite(high) else None
    found.step_ms_p95 = steps[math.ceil(0.95 * len(steps)) - 1] if steps else None
    if seconds > 0:
        found.samples_per_second = sum(turn.samples for turn in turns) / seconds
        found.data_wait = min(1.0, sum(turn.data_seconds for turn in turns) / seconds)


def _ratio(found: ArmResult, seen: Seen) -> None:
    if found.name == seen.reference:
        found.speedup = 1.0 if found.step_ms is not None else None
        return
    estimate = seen.estimate(found.name)
    if estimate is None:
        return
    found.speedup = estimate.ratio
    if math.isfinite(estimate.width):
        found.speedup_interval = (estimate.low, estimate.high)
    if found.status in (DONE, INTERRUPTED):  # the last look's interval holds however it ended
        found.claim = claim(estimate, floor_of(seen))


def note_rare(found: Sequence[ArmResult], reference: str) -> None:
    """Say of an arm where steps that are rare and slow tell another story than the median one."""
    plain = next((one.samples_per_second for one in found if one.name == reference), None)
    for one in found:
        if one.samples_per_second is None or not plain or one.speedup is None:
            continue
        overall = one.samples_per_second / plain
        if max(overall / one.speedup, one.speedup / overall) > RARE:
            one.notes.append(
                f"with rare, slow steps in it, {overall:.2f}× the samples a second of {reference}; "
                f"a step of the usual kind is {one.speedup:.2f}× as fast"
            )


def control_of(seen: Seen) -> Estimate | None:
    """The reference against itself."""
    return seen.estimate(seen.control) if seen.control else None


def floor_of(seen: Seen) -> float:
    """What the control says is noise: inf where one was asked for that says nothing, 0 without."""
    return noise_floor(control_of(seen)) if seen.control else 0.0


def as_control(estimate: Estimate | None) -> Control | None:
    """The same as a part of the result; None without an interval."""
    if estimate is None or not math.isfinite(estimate.width):
        return None
    return Control(estimate.ratio, (estimate.low, estimate.high))


def _price(found: ArmResult, seen: Seen) -> None:
    """What it takes to get there, and when that is paid back."""
    ready = seen.ready.get(found.name)
    if ready is None:
        return
    found.compile_seconds = ready.compile_seconds
    # the first process of all also waits for the disk to bring torch, so the faster start counts
    plain = [seen.ready[n] for n in (seen.reference, seen.control) if n in seen.ready]
    if found.claim != "faster" or found.speedup is None or found.step_ms is None or not plain:
        return
    extra = _price_of(ready) - min(map(_price_of, plain))
    saved = found.step_ms / 1e3 * (found.speedup - 1)  # over the reference, with as many samples
    found.break_even_steps = max(0, math.ceil(extra / saved))


def _price_of(ready: Ready) -> float:
    """Seconds until its steps were as fast as they are: some compile after the first one too."""
    return ready.setup_seconds + ready.settling_seconds


def _run(found: ArmResult, finished: Finished) -> None:
    """What the run itself says."""
    found.summary = finished.summary
    memory = finished.summary.get("memory") or {}
    own = memory.get("peak_process_bytes")
    found.peak_process_bytes = own + finished.worker_bytes if own else None
    found.peak_device_bytes = memory.get("peak_device_bytes") or None
    found.mfu = finished.mfu
    found.problems = list(finished.problems)
    found.losses = list(finished.losses)
    found.metrics = dict(finished.metrics)
    found.seconds_to_target = finished.seconds_to_target
    found.notes = list(finished.notes)
    found.notes += [f"does not train: {problem}" for problem in finished.problems]
    asked = [one for one in finished.summary.get("techniques") or [] if one.get("requested")]
    idle = [str(one.get("name")) for one in asked if not one.get("engaged")]
    if idle:  # the reasons are in the summary, and in the report
        found.notes.append(
            f"{len(idle)} of {len(asked)} techniques did not take hold: {', '.join(idle)}"
        )


def choices_of(finished: Finished | None) -> dict[str, Any]:
    """What a run had chosen by itself, from its summary."""
    rows = (finished.summary.get("choices") or []) if finished is not None else []
    return {row["key"]: row["value"] for row in rows if "key" in row and "value" in row}


def load_of(turns: Mapping[str, Sequence[Turn]]) -> Load:
    """How the machine was, from all arms' turns."""
    blocks = max((len(some) for some in turns.values()), default=0)

    def over_blocks(key: str) -> list[float]:
        seen = (
            [getattr(some[n].load, key) for some in turns.values() if n < len(some)]
            for n in range(blocks)
        )
        return [median(known) for values in seen if (known := [v for v in values if v is not None])]

    def middle(values: Sequence[float]) -> float | None:
        return median(values) if values else None

    clocks = over_blocks("mhz")
    mhz = middle(clocks)
    return Load(
        others=middle(over_blocks("others")),
        mhz=mhz,
        mhz_spread=(max(clocks) - min(clocks)) / mhz if mhz else None,
        device_mhz=middle(over_blocks("device_mhz")),
        stolen=middle(over_blocks("stolen")),
    )


def noise(load: Load, control: Control | None) -> list[str]:
    """What to say of a machine on which small differences cannot be seen."""
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


def dependence(seen: Seen) -> list[str]:
    """Say of blocks that they resemble the ones before, which makes intervals wider."""
    base, alike = [turn.per_sample_ms for turn in seen.turns(seen.reference)], {}
    for name, turns in seen.measured.turns.items():
        if name == seen.reference or seen.estimate(name) is None:
            continue
        pairs = zip(base, turns, strict=False)
        ratios = [math.log(one / other.per_sample_ms) for one, other in pairs]
        if (found := likeness(ratios)) > 2 / math.sqrt(len(ratios)):  # more than chance
            alike[name] = found
    if not alike:
        return []
    worst = max(alike, key=lambda name: alike[name])
    return [
        f"blocks depend on each other: ratios of {', '.join(alike)} resemble those of the block "
        f"before (correlation {alike[worst]:.1f}), so their intervals are wider than by chance "
        "alone; where such spells last for many blocks, even that may be too narrow"
    ]
