"""A hook that suspends a run between turns, and the collection of an arm's results.

On a CPU each step is a lap of the run's stopwatch; accelerators are synchronised at both ends of a
turn. With data workers a turn is a multiple of their number, after prefetched batches are used up.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from time import perf_counter
from typing import Any

import numpy as np

from runner.benchmark.blocks import Turn, WorkerResults, WorkerSetup
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.workers.worker import FINISH
from runner.data.loader import BatchLoader
from runner.device import memory
from runner.errors import OutOfMemory, StorageError
from runner.record.text import shorten
from runner.training.hook import Hook, Report, Step, Verdict
from runner.training.recovery import is_out_of_memory
from runner.training.run import Run
from runner.training.summary import Summary

LEAST = 3  # minimum steps of a turn, and of the late warm-up
ROUNDS = 2  # times, at least, that a turn uses up the batches that workers may prefetch
KEPT_STEPS = 512  # of a turn, evenly spaced, to bound memory
STOPPED = "the benchmark has measured it"
FIRST = 50  # first steps, and last steps, whose losses are kept
FEW = 10  # minimum losses at each end for a trend
MOVED, ROSE = 2.0, 3.0  # standard errors: below MOVED the loss does not move, above ROSE it rises


class TurnHook(Hook):
    """Lets a run continue for one turn at a time.

    `ask(answer)` sends the last turn's answer and blocks for the next request: the seconds of a
    turn, or `FINISH`. `started` is the start of the process by `time.perf_counter`.
    """

    def __init__(
        self, settings: BenchmarkConfig, ask: Callable[[Any], float | str], started: float
    ) -> None:
        self.ask, self.started = ask, started
        self.warm_up = max(settings.warmup_steps, LEAST + 1)
        self.training = TrainingLog()
        self.least, self.deadline = 1, 0.0  # `then` is called after this many steps and this time
        self.made = 0  # steps since `then` was last called
        self.then: Callable[[Run], Verdict | None] = self._warm
        self.stamps: list[float] = []  # start of the session and end of each warm-up step
        self.workers = 0  # number of data workers
        self.ahead = 0  # batches that they may prefetch
        self.turns: list[float] = []  # step time of each turn, ms; first that of the late warm-up
        self.seconds = self.begun = self.data = 0.0  # of the current turn; data: wait before it
        self.laps = 0  # number of laps before the turn
        self.peaks = (0, 0)  # bytes, of process and device
        self.finishing = False

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Count the data workers and start the clock."""
        pool = run.train.pool if isinstance(run.train, BatchLoader) else None
        if pool is not None:
            self.workers, self.ahead = pool.count, pool.count * pool.ahead
            self.warm_up += self.ahead
        run.device.synchronize()
        self.stamps.append(perf_counter())
        yield

    def on_step(self, run: Run, step: Step) -> Verdict | None:
        """Count the step, and call `then` if it is due."""
        self.made += 1
        if self.made < self.least or perf_counter() < self.deadline:
            return None
        return self.then(run)

    def on_report(self, run: Run, report: Report) -> None:
        """Record the losses of a report that has reached the host."""
        self.training.add(report)

    def _warm(self, run: Run) -> Verdict | None:
        """Time a warm-up step; after the last one, report Ready."""
        run.device.synchronize()
        self.stamps.append(perf_counter())
        if len(self.stamps) <= self.warm_up:
            return None
        laps = [b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False)]
        last = laps[-self._whole_rounds(LEAST) :]
        late = mean(last) if self.workers else median(last)
        self.turns.append(late * 1e3)
        ready = WorkerSetup(
            samples_per_step=run.train.samples(0),
            setup_seconds=self.stamps[1] - self.started,
            warm_ms=late * 1e3,
            settling_seconds=max(0.0, sum(laps[1:]) - (len(laps) - 1) * late),
            compile_seconds=_compile_seconds(),
            workers=self.workers,
        )
        # the first report comes after this step and makes the next one slow: skip one more
        return self._wait_for_turn(run, ready, lead=1)

    def _whole_rounds(self, steps: int) -> int:
        """Round `steps` up to a multiple of the number of data workers."""
        return math.ceil(steps / self.workers) * self.workers if self.workers else steps

    def _wait_for_turn(self, run: Run, answer: Any, lead: int = 0) -> Verdict | None:
        """Send the answer, wait for the next request, and begin a turn or finish."""
        with run.watch.excluded(), _pause_workers():
            question = self.ask(answer)
        if question == FINISH:
            return self._finish(run)
        self.seconds, self.made = float(question), 0
        lead += self.ahead
        if not lead:
            return self._begin_turn(run)
        self.least, self.deadline, self.then = lead, 0.0, self._begin_turn
        return None

    def _begin_turn(self, run: Run) -> Verdict | None:
        """Start timing a turn at the end of the current step."""
        run.device.synchronize()
        self.made = 0
        self.laps = run.watch.count  # the current step will be the next lap
        self.data = run.watch.spent["data"]
        self.begun = perf_counter()
        self.then = self._end_turn
        self.least = max(LEAST, ROUNDS * self.ahead)
        self.deadline = self.begun + self.seconds
        if run.device.kind != "cpu":
            # the host runs ahead of the device, so count steps instead of watching the clock
            steps = math.ceil(self.seconds * 1e3 / self.turns[-1])
            self.least, self.deadline = max(self.least, steps), 0.0
        return None

    def _end_turn(self, run: Run) -> Verdict | None:
        """End the turn in its last step and send its times."""
        if self.made != self._whole_rounds(self.made):
            return None
        run.device.synchronize()
        now = perf_counter()
        seconds, steps, done = now - self.begun, self.made, run.progress.step
        samples = [run.train.samples(number) for number in range(done - steps, done)]
        laps, per_sample = [seconds / steps], seconds / sum(samples)
        if run.device.kind == "cpu":
            # skip the lap of the step in which the turn began; the current one is still open
            laps = [*run.watch.laps(self.laps + 1).tolist(), now - run.watch.started]
            per_sample = median(laps) / median(samples)
        self.turns.append(1e3 * (seconds / steps if self.workers else median(laps)))
        turn = Turn(
            steps=steps,
            samples=sum(samples),
            seconds=seconds,
            median_ms=median(laps) * 1e3,
            per_sample_ms=per_sample * 1e3,
            step_ms=[lap * 1e3 for lap in laps[:: math.ceil(len(laps) / KEPT_STEPS)]],
            data_seconds=run.watch.spent["data"] - self.data,
        )
        return self._wait_for_turn(run, turn)

    def _finish(self, run: Run) -> Verdict:
        """Record memory peaks before anything else allocates, and stop the run."""
        self.finishing = True
        self.peaks = (memory.peak_process_bytes(), memory.peak_device_bytes(run.device))
        run.stop_reason = STOPPED
        if run.world is None:  # with several ranks all would have to skip it
            run.saved_step = run.progress.step  # no run continues from here: no last checkpoint
        return Verdict.STOP


def _compile_seconds() -> float:
    """Return the seconds that the compiler has used so far, by its own count."""
    if "torch._dynamo" not in sys.modules:
        return 0.0
    from runner.techniques import compiler

    return float(compiler.compilation_facts()["seconds"])


@contextmanager
def _pause_workers() -> Iterator[None]:
    """Stop the data workers (about 20 µs each) so that they do not prefetch in other arms' turns.
    A stopped worker can still be killed, and is when this process dies.
    """
    workers = multiprocessing.active_children()
    try:
        for worker in workers:
            _signal(worker, signal.SIGSTOP)
        yield
    finally:
        for worker in workers:
            _signal(worker, signal.SIGCONT)


def _signal(worker: multiprocessing.process.BaseProcess, number: int) -> None:
    # we alone reap our children, so the id is not reused before that
    if worker.pid is not None and worker.exitcode is None:
        with suppress(ProcessLookupError):
            os.kill(worker.pid, number)


# -- the results of an arm, while its run is still open --------------------------------------------


@dataclass
class TrainingLog:
    """Losses and counters of a run's steps, to detect that it does not learn."""

    steps: int = 0
    skipped: int = 0
    not_finite: int = 0
    with_gradient: int = 0  # steps whose gradient was not zero
    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=FIRST))

    def add(self, report: Report) -> None:
        """Add the steps of a report; takes a few µs."""
        self.steps += len(report.loss)
        self.skipped += sum(report.skipped)
        self.not_finite += sum(not math.isfinite(loss) for loss in report.loss)
        self.with_gradient += sum(norm != 0.0 for norm in report.grad_norm)
        self.first += report.loss[: max(0, FIRST - len(self.first))]
        self.last.extend(report.loss)

    def problems(self) -> list[str]:
        """Return the signs that nothing is learned."""
        if not self.steps:
            return []
        problems = []
        if self.skipped == self.steps:
            problems.append("every update was skipped")
        if self.not_finite:
            problems.append(f"the loss was not finite in {self.not_finite} of {self.steps} steps")
        if not self.with_gradient:
            problems.append("gradients are zero")
        count = min(FIRST, self.steps // 2)
        if count >= FEW and not self.not_finite:
            problems += _describe_trend(self.first[:count], list(self.last)[-count:])
        return problems


def _describe_trend(first: Sequence[float], last: Sequence[float]) -> list[str]:
    """Describe a loss that rises or does not move, compared with the noise between batches."""
    noise = math.sqrt((np.var(first, ddof=1) + np.var(last, ddof=1)) / len(first))
    before, after = float(np.mean(first)), float(np.mean(last))
    means = f"{before:.4g} over the first {len(first)} steps, {after:.4g} over the last"
    if after - before > ROSE * noise:
        return [f"the loss rises: {means}"]
    if len(first) == FIRST and abs(after - before) <= MOVED * noise:
        return [f"the loss does not move: {means}"]
    return []


def collect_results(
    run: Run, hook: TurnHook, summary: Summary, metrics: Mapping[str, Callable[[Run], Any]]
) -> WorkerResults:
    """Collect the arm's results, after writing the peaks measured so far to `summary.json`."""
    notes: list[str] = []
    summary.memory.peak_process_bytes, summary.memory.peak_device_bytes = hook.peaks
    if run.folder is not None:
        try:
            summary.write(run.folder)
        except StorageError as error:
            notes.append(str(error))
    if run.world is not None:
        notes.append(f"memory is of one of {run.world.size} processes")
    if any(row.evidence.get("cache") == "warm" for row in summary.techniques):
        notes.append("compiled from the disk cache; a first run takes longer")
    values: dict[str, Any] = {}
    for name, metric in metrics.items():
        try:
            values[name] = metric(run)
        except Exception as error:  # the other results are valid
            notes.append(f"{name}: not known: {type(error).__name__}: {shorten(str(error), 200)}")
    return WorkerResults(
        asdict(summary), hook.training.first, hook.training.problems(), values, notes
    )


def is_memory_error(error: BaseException | None) -> bool:
    """Whether the error or one of its causes is an out-of-memory error."""
    while error is not None:
        if isinstance(error, OutOfMemory) or is_out_of_memory(error):
            return True
        error = error.__cause__
    return False
