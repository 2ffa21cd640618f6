"""A benchmark from its arms to its result."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runner.benchmark import rows
from runner.benchmark.arms import Arm, check_budget, reference_of
from runner.benchmark.blocks import INTERRUPTED
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.machine import machine
from runner.benchmark.parity_checker import ParityChecker
from runner.benchmark.result import DONE, BenchmarkResult
from runner.benchmark.rounds import MeasureOptions, interruptible, run_round
from runner.benchmark.statistics import each_alpha
from runner.benchmark.workers.pool import WorkerPool
from runner.config import config_hash
from runner.errors import Interrupted, StorageError
from runner.record import provenance

log = logging.getLogger("runner")


class Cut(Interrupted):
    """A benchmark was asked to end; `result` holds what was measured."""

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
) -> BenchmarkResult:
    """Start every arm, measure them in blocks, check parity, and collect the results.

    The arms are compared with `settings.reference`, else the first one. With a `folder` the arms'
    runs are recorded in it and `benchmark.json` is written, also when arms failed. `attribute`,
    `baseline` and `claims` of the settings are not used here. An arm that fails is a row. Raises
    ConfigError, and `Cut` on Ctrl-C and SIGTERM once the result so far has been written.
    """
    reference = reference_of(arms, settings)
    check_budget(settings, len(arms))
    alpha = each_alpha(len(arms) - 1)  # the best of several is named: all intervals hold together
    options = MeasureOptions(
        settings, folder, given, None, pool, clock, alpha, announce=announce or log.info
    )
    benchmark = _Benchmark(arms, reference, options)
    with interruptible() as received:
        try:
            benchmark.measure(seed)
            benchmark.write()  # before parity, which takes its time
            benchmark.check_parity()
        except KeyboardInterrupt:
            benchmark.measurements.measured.stopped = INTERRUPTED
    result = benchmark.write()
    if result.stopped == INTERRUPTED:
        raise Cut(received[0] if received else signal.SIGINT, result)
    return result


class _Benchmark:
    """The steps of a benchmark, and the measurements so far."""

    def __init__(self, arms: Sequence[Arm], reference: Arm, options: MeasureOptions) -> None:
        self.arms, self.reference, self.options = arms, reference, options
        self.measurements = rows.Measurements(reference=reference.name)
        self.processes = [reference, *(arm for arm in arms if arm is not reference)]
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        if options.settings.control:
            name = f"{reference.name}, again"
            while any(arm.name == name for arm in arms):
                name += "!"
            self.measurements.control = name
            self.processes.insert(1, replace(reference, name=name, folder=""))

    def measure(self, seed: int) -> None:
        """All arms and the control in one round; a reference that died leaves times alone."""
        budget_s = self.options.settings.budget_s
        measured = run_round(
            self.processes,
            self.reference.name,
            budget_s,
            seed,
            self.options,
            self.measurements,
            needs_reference=False,
        ).measured
        blocks = f"{measured.blocks} blocks in {measured.seconds:.0f} s"
        self.options.announce(f"{blocks}: {measured.stopped}")
        if measured.stopped == INTERRUPTED:
            raise KeyboardInterrupt

    def check_parity(self) -> None:
        """Whether each arm's numbers are right."""
        settings, finished = self.options.settings, self.measurements.finished
        arms = [arm for arm in self.arms if arm.name in finished]
        if not settings.parity or not arms:
            return
        with ParityChecker(settings.timeout_s, self.options.given) as checker:
            for arm in arms:
                verdict = checker.check(arm, rows.collect_choices(finished[arm.name]))
                self.measurements.verdicts[arm.name] = verdict
                self.options.announce(f"parity of {arm.name}: {verdict.parity or verdict.reason}")

    def write(self) -> BenchmarkResult:
        """The result so far; kept in the folder where there is one."""
        result = self._result()
        if self.options.folder is not None:
            try:
                result.write(self.options.folder)
            except StorageError as error:  # a full disk does not cost the measurements
                log.error("%s", error)
        return result

    def _result(self) -> BenchmarkResult:
        measurements, measured = self.measurements, self.measurements.measured
        settings, reference = self.options.settings, self.reference
        results = [rows.make_row(arm, measurements, settings, reference) for arm in self.arms]
        control, floor = measurements.control_result(), measurements.noise_floor()
        load = rows.median_load(measured.turns)
        alive = [arm for arm in self.arms if arm.name in measurements.ready]
        notes = rows.describe_differences(alive, reference) + rows.describe_ends(measurements)
        notes += rows.describe_processes(measured, settings)
        return BenchmarkResult(
            reference.config.name,
            reference.name,
            results,
            control=control,
            noise_floor=floor if math.isfinite(floor) else None,
            blocks=measured.blocks,
            seconds=measured.seconds,
            compared=measurements.compared,
            process_starts=list(measured.starts),
            processes=measured.processes,
            stopped=measured.stopped or "no arm could be measured",
            machine=machine([row.summary for row in results]),
            load=load,
            notes=[*notes, *rows.describe_noise(load, control)],
            command=provenance.command(),
            versions=provenance.versions(),
            git=provenance.git_state() or {},
            config_hash=config_hash(reference.config),
            started=self.started,
        )


def failures(result: BenchmarkResult) -> list[str]:
    """Each arm that did not end as it should, and why."""
    return [f"{arm.name} ({arm.status}: {arm.reason})" for arm in result.arms if arm.status != DONE]
