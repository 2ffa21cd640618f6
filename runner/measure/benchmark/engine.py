"""Run a benchmark: measure the arms, check parity, collect rows and notes."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from runner.core.config.run_config import UNHASHED_KEYS, RunConfig, WrittenConfig, config_hash
from runner.core.device.signals import raise_on_signals
from runner.core.errors import Interrupted, StorageError
from runner.core.format import times_interval
from runner.core.record import provenance
from runner.core.record.text import escape_control_chars as escape
from runner.core.schemas.jobs import BenchmarkConfig
from runner.measure.benchmark.arms import Arm, check_budget, reference_arm
from runner.measure.benchmark.blocks import INTERRUPTED, Turn, WorkerResults, WorkerSetup
from runner.measure.benchmark.parity_checker import ParityChecker, ParityVerdict
from runner.measure.benchmark.result import (
    DONE,
    MEAN,
    MEDIAN,
    ArmResult,
    BenchmarkResult,
    Control,
    Load,
    machine_facts,
)
from runner.measure.benchmark.rounds import MeasureOptions, Round, ending_signal, run_round
from runner.measure.benchmark.statistics import (
    CONFIDENCE,
    ONE_PROCESS_NOISE,
    Estimate,
    bonferroni_alpha,
    classify_ratio,
    median_interval,
    noise_floor,
)
from runner.measure.benchmark.workers.pool import WorkerPool

log = logging.getLogger("runner")

NOISY_LOAD = 0.10  # share of the CPUs used by others above which the machine counts as noisy
IGNORED_KEYS = (*UNHASHED_KEYS, "debug")
WORK_KEYS = {name: name for name in "model objective optimizer stability seed device.tf32".split()}
WORK_KEYS["batch size"] = "training.batch_size"
"""What is trained, without techniques: name → key. Parity is against the arm's own plain run."""


class BenchmarkInterrupted(Interrupted):
    """The benchmark was interrupted; `result` holds the measurements so far."""

    def __init__(self, signal_number: int, result: BenchmarkResult) -> None:
        super().__init__(signal_number, f" after {result.blocks} blocks")
        self.result = result


def measure(
    arms: Sequence[Arm],
    settings: BenchmarkConfig,
    folder: Path | None = None,
    given: Any = None,
    seed: int = 0,
    announce: Callable[[str], None] | None = None,
    pool: Callable[..., AbstractContextManager[WorkerPool]] = WorkerPool,
    clock: Callable[[], float] = time.monotonic,
    start_limits: Mapping[str, float] | None = None,
) -> BenchmarkResult:
    """Start every arm, measure them in blocks, check parity, and return the result.

    The arms are compared with `settings.reference`, or the first one. With a `folder` the runs and
    `benchmark.json` are written there, also if arms failed, which are rows. With `start_limits`,
    seconds for single arms to start, the budget is never exceeded. `attribute` and `baseline` are
    ignored. Raises ConfigError, and `BenchmarkInterrupted` after writing the result so far.
    """
    reference = reference_arm(arms, settings)
    check_budget(settings, len(arms))
    # arms are ranked, so all intervals have to hold jointly
    alpha = bonferroni_alpha(len(arms) - 1)
    options = MeasureOptions(
        settings, folder, given, None, pool, clock, alpha, announce=announce or log.info,
        start_limit_s=(start_limits or {}).get, overdraws=start_limits is None,
    )  # fmt: skip
    benchmark = _Benchmark(arms, reference, options)
    with raise_on_signals():
        try:
            benchmark.measure(seed)
            benchmark.write()  # before parity, which takes its time
            benchmark.check_parity()
        except KeyboardInterrupt:
            benchmark.round.measurements.stop_reason = INTERRUPTED
        result = benchmark.write()
        if result.stopped == INTERRUPTED:
            raise BenchmarkInterrupted(ending_signal(), result)
    return result


class _Benchmark:
    """The stages of a benchmark, and the measurements so far."""

    def __init__(self, arms: Sequence[Arm], reference: Arm, options: MeasureOptions) -> None:
        self.arms, self.reference, self.options = arms, reference, options
        self.settings = options.settings
        self.round = Round()
        self.verdicts: dict[str, ParityVerdict] = {}
        self.measured_arms = [reference, *(arm for arm in arms if arm is not reference)]
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.control = ""  # the name of the reference's second process; "" without one
        if self.settings.control:
            self.control = f"{reference.name}, again"
            while any(arm.name == self.control for arm in arms):
                self.control += "!"
            self.measured_arms.insert(1, replace(reference, name=self.control, folder=""))

    def measure(self, seed: int) -> None:
        """Measure all arms and the control; without the reference only times."""
        run_round(
            self.measured_arms, self.reference.name, self.settings.budget_s, seed, self.options,
            self.round, needs_reference=False,
        )  # fmt: skip
        measurements = self.round.measurements
        blocks = f"{measurements.blocks} blocks in {measurements.seconds:.0f} s"
        self.options.announce(f"{blocks}: {measurements.stop_reason}")
        if measurements.stop_reason == INTERRUPTED:
            raise KeyboardInterrupt

    def check_parity(self) -> None:
        """Judge the numerical parity of each finished arm."""
        results = self.round.results
        arms = [arm for arm in self.arms if arm.name in results]
        if not self.settings.parity or not arms:
            return
        with ParityChecker(self.settings.timeout_s, self.options.given) as checker:
            for arm in arms:
                verdict = checker.check(arm, collect_choices(results[arm.name]))
                self.verdicts[arm.name] = verdict
                self.options.announce(f"parity of {arm.name}: {verdict.parity or verdict.reason}")

    def write(self) -> BenchmarkResult:
        """Return the result so far, after writing it to the folder, if there is one."""
        result = self._result()
        if self.options.folder is not None:
            try:
                result.write(self.options.folder)
            except StorageError as error:  # a full disk does not cost the measurements
                log.error("%s", error)
        return result

    def _result(self) -> BenchmarkResult:
        measurements, reference = self.round.measurements, self.reference
        rows = [self._make_row(arm) for arm in self.arms]
        estimate, control, noise = self._estimate(self.control), None, self._noise_floor()
        if estimate is not None and math.isfinite(estimate.half_width):
            control = Control(estimate.ratio, estimate.interval)
        load = median_load(measurements.turns)
        return BenchmarkResult(
            reference.config.name,
            reference.name,
            rows,
            control=control,
            noise_floor=noise if math.isfinite(noise) else None,
            blocks=measurements.blocks,
            seconds=measurements.seconds,
            compared=self._compared,
            process_starts=list(measurements.launch_starts),
            processes=measurements.processes,
            stopped=measurements.stop_reason or "no arm could be measured",
            machine=machine_facts([row.summary for row in rows]),
            load=load,
            notes=list(self._notes(load, control)),
            command=provenance.command(),
            versions=provenance.versions(),
            git=provenance.git_state() or {},
            config_hash=config_hash(reference.config),
            started=self.started,
        )

    # -- the noise -----------------------------------------------------------------------------

    @property
    def _compared(self) -> str:
        """Which step of a turn is compared, mean or median: see `WorkerPool.turn`."""
        return MEAN if any(setup.workers for setup in self.round.setups.values()) else MEDIAN

    def _estimate(self, name: str) -> Estimate | None:
        """Return the arm's estimate against the reference; None if there is none."""
        if self.reference.name in self.round.failures:
            return None
        estimate = self.round.measurements.estimates.get(name)
        return estimate if estimate is not None and math.isfinite(estimate.ratio) else None

    def _noise_floor(self) -> float:
        """Return the noise floor of the control; inf if it has no interval.

        Without a control it is 0, or `ONE_PROCESS_NOISE` if each arm had one process.
        """
        if self.control:
            return noise_floor(self._estimate(self.control))
        return 0.0 if self.round.measurements.processes > 1 else ONE_PROCESS_NOISE

    # -- rows ----------------------------------------------------------------------------------

    def _make_row(self, arm: Arm) -> ArmResult:
        setup, results = self.round.setups.get(arm.name), self.round.results.get(arm.name)
        interrupted = "the benchmark was interrupted"
        row = ArmResult(
            arm.name,
            list(arm.overrides),
            INTERRUPTED,
            interrupted,
            folder=arm.folder or None,
            command=arm.command,
            config=_effective_config(arm.config),
            samples_per_step=setup.samples_per_step if setup else arm.config.training.batch_size,
            other_work=other_work(arm, self.reference),
        )
        if results is not None:
            row.status, row.reason = DONE, ""
            _fill_run(row, results)
        if (failure := self.round.failures.get(arm.name)) is not None:
            row.status, row.reason = failure.status, str(failure)
        if turns := self.round.measurements.turns.get(arm.name):
            _fill_speed(row, turns, self._compared == MEAN)
        self._fill_ratio(row)
        if setup is not None:
            self._fill_setup(row, setup)
        if (verdict := self.verdicts.get(arm.name)) is not None:
            row.parity, row.parity_reason = verdict.parity, verdict.reason
        elif row.status == DONE:
            reason = interrupted if self.settings.parity else "benchmark.parity=false"
            row.parity_reason = f"not judged: {reason}"
        return row

    def _fill_ratio(self, row: ArmResult) -> None:
        if row.name == self.reference.name:
            row.speedup = 1.0 if row.step_ms is not None else None
            return
        estimate = self._estimate(row.name)
        if estimate is None:
            return
        row.speedup = estimate.ratio
        if math.isfinite(estimate.half_width):
            row.speedup_interval = estimate.interval
        if row.status in (DONE, INTERRUPTED):  # the last analysis is valid even then
            row.claim = classify_ratio(estimate, self._noise_floor())

    def _fill_setup(self, row: ArmResult, setup: WorkerSetup) -> None:
        row.setup_seconds, row.compile_seconds = setup.setup_seconds, setup.compile_seconds
        # the first process also waits for torch to be read from disk, so the faster start is used
        names = self.reference.name, self.control
        plain_setups = [self.round.setups[name] for name in names if name in self.round.setups]
        if row.claim != "faster" or row.speedup is None or row.step_ms is None or not plain_setups:
            return
        # compiling may continue after the first step
        setup_s = setup.setup_seconds + setup.settling_seconds
        plain_s = min(plain.setup_seconds + plain.settling_seconds for plain in plain_setups)
        saved_s = row.step_ms / 1e3 * (row.speedup - 1)  # per step, for the same number of samples
        row.break_even_steps = max(0, math.ceil((setup_s - plain_s) / saved_s))

    def _notes(self, load: Load, control: Control | None) -> Iterator[str]:
        """Yield what restricts the comparison: other work, ended arms, single processes, noise."""
        measurements, started = self.round.measurements, self.round.setups
        yield from describe_differences([x for x in self.arms if x.name in started], self.reference)
        if self._compared == MEAN:
            yield "with data workers the mean step of each turn is compared, not the median one"
        effect = "there are no speed-ups; set benchmark.reference to another arm"
        for name, role in ((self.reference.name, "reference"), (self.control, "control")):
            if (failure := self.round.failures.get(name)) is not None:
                yield f"the {role}, {name}, ended early ({failure.status}: {failure}): {effect}"
            effect = "the noise floor is unknown"
        if measurements.estimates and math.isinf(self._noise_floor()):
            yield "the noise floor is unknown, so no difference is claimed"
        if measurements.processes == 1 and measurements.estimates:
            key = "benchmark.budget_s" if self.settings.processes > 1 else "benchmark.processes"
            limit = f"no difference within {ONE_PROCESS_NOISE:.0%} is claimed"
            yield f"each arm was measured in one process, so {limit}; raise {key} for several"
        if load.others is not None and load.others > NOISY_LOAD:
            yield f"noisy machine: other processes used {load.others:.0%} of the CPUs"
        if control is not None and not control.interval[0] <= 1 <= control.interval[1]:
            ratio = times_interval(control.ratio, control.interval)
            yield f"the reference against itself measured {ratio} instead of 1"


def _effective_config(config: RunConfig) -> dict[str, Any]:
    """Return the config keys that affect the run, as JSON-compatible values."""
    flat = WrittenConfig(config).flat()
    values: dict[str, Any] = json.loads(json.dumps(flat, default=str))
    ignored = (*IGNORED_KEYS, "checkpoint.resume")
    return {k: x for k, x in values.items() if not {k, k.partition(".")[0]} & {*ignored}}


def _fill_speed(row: ArmResult, turns: Sequence[Turn], use_mean: bool) -> None:
    turn_step_ms = [1e3 * t.seconds / t.steps if use_mean else t.median_ms for t in turns]
    step_ms = sorted(ms for turn in turns for ms in turn.step_ms)
    seconds = sum(turn.seconds for turn in turns)
    low, high = median_interval(turn_step_ms, 1 - CONFIDENCE)
    row.blocks = len(turns)
    row.per_sample_ms = [turn.per_sample_ms for turn in turns]
    row.step_ms = median(turn_step_ms)
    row.step_ms_interval = (low, high) if math.isfinite(high) else None
    row.step_ms_p95 = step_ms[math.ceil(0.95 * len(step_ms)) - 1] if step_ms else None
    row.samples_per_second = sum(turn.samples for turn in turns) / seconds
    row.data_wait = min(1.0, sum(turn.data_seconds for turn in turns) / seconds)


def _fill_run(row: ArmResult, results: WorkerResults) -> None:
    row.summary, row.planned = results.summary, dict(results.planned)
    memory = results.summary.get("memory") or {}
    row.peak_process_bytes = memory.get("peak_process_bytes") or None
    row.peak_device_bytes = memory.get("peak_device_bytes") or None
    row.problems, row.losses = list(results.problems), list(results.losses)
    row.notes = [*results.notes, *(f"does not train: {text}" for text in results.problems)]
    requested = [one for one in results.summary.get("techniques") or [] if one.get("requested")]
    idle = [str(one.get("name")) for one in requested if not one.get("engaged")]
    if idle:  # the reasons are in the summary, and in the report
        names = ", ".join(idle)
        row.notes.append(f"{len(idle)} of {len(requested)} techniques did not engage: {names}")


def collect_choices(results: WorkerResults | None) -> dict[str, Any]:
    """Return the choices that a run made automatically, from its summary."""
    rows = (results.summary.get("choices") or []) if results is not None else []
    return {row["key"]: row["value"] for row in rows}


def median_load(turns: Mapping[str, Sequence[Turn]]) -> Load:
    """Return the machine's load: the median over blocks of each block's median over arms."""
    blocks: dict[int, list[float]] = {}
    for arm_turns in turns.values():
        for number, turn in enumerate(arm_turns):
            if turn.other_cpu_share is not None:
                blocks.setdefault(number, []).append(turn.other_cpu_share)
    return Load(median(map(median, blocks.values())) if blocks else None)


def other_work(arm: Arm, reference: Arm) -> list[str]:
    """Return the parts of `WORK_KEYS` in which the arm differs from the reference."""
    a, b = arm.config, reference.config
    return [part for part, key in WORK_KEYS.items() if attrgetter(key)(a) != attrgetter(key)(b)]


def describe_differences(arms: Sequence[Arm], reference: Arm) -> list[str]:
    """Return notes on arms that differ from the reference in model, data order or batch size."""
    notes = []
    for arm in arms:
        if parts := [part for part in other_work(arm, reference) if part != "batch size"]:
            differing = f"{arm.name}: different {', '.join(parts)} from {reference.name}"
            notes.append(f"{escape(differing)}, so only times are compared")
    sizes = {escape(arm.name): arm.config.training.batch_size for arm in arms}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        notes.append(f"batch sizes differ ({listed} samples): times are compared per sample")
    return notes


def list_failed_arms(result: BenchmarkResult) -> list[str]:
    """Return each arm that did not finish, with the reason."""
    return [f"{arm.name} ({arm.status}: {arm.reason})" for arm in result.arms if arm.status != DONE]
