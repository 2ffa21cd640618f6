"""A hook at the end of a step in which a run waits for its turns; and the results of an arm.

On a CPU each step is a lap of the run's own stopwatch; an accelerator is waited for at both ends of
a turn. Turns with data workers are whole rounds, once the batches that lay ready are used up.
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

from runner.benchmark.blocks import Finished, Ready, Turn
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

LEAST = 3  # steps of a turn, and warm-up steps whose median is a late one
ROUNDS = 2  # times that a turn uses up what all workers may have in hand, at least
KEPT_STEPS = 512  # of a turn, evenly spaced: hours of small steps fit the memory
STOPPED = "the benchmark has measured it"
FIRST = 50  # steps whose losses are kept, and as many of the last ones
FEW = 10  # losses at each end that say something of a trend
MOVED, ROSE = 2.0, 3.0  # standard errors by which a loss has


class TurnHook(Hook):
    """Lets a run continue for one turn at a time.

    `ask(answer)` sends the last turn's answer and waits; it returns the seconds of the next one, or
    `FINISH`. `started` is when the process was, by `time.perf_counter`.
    """

    def __init__(
        self, settings: BenchmarkConfig, ask: Callable[[Any], float | str], started: float
    ) -> None:
        self.ask, self.started = ask, started
        self.warm_up = max(settings.warmup_steps, LEAST + 1)
        self.training = TrainingLog()
        self.least, self.deadline = 1, 0.0  # steps and time after which `then` is called
        self.made = 0  # steps since it was last called
        self.then: Callable[[Run], Verdict | None] = self._warm
        self.stamps: list[float] = []  # when the session began, and each warm-up step ended
        self.workers = 0  # that fetch data
        self.ahead = 0  # batches that they may be ahead
        self.turns: list[float] = []  # a usual step of each, ms; at first the late warm-up step
        self.seconds = self.begun = self.data = 0.0  # of the current turn; data: waited before it
        self.laps = 0  # before it
        self.peaks = (0, 0)  # of process and device
        self.finishing = False

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Keep the time."""
        pool = run.train.pool if isinstance(run.train, BatchLoader) else None
        if pool is not None:
            self.workers, self.ahead = pool.count, pool.count * pool.ahead
            self.warm_up += self.ahead
        run.device.synchronize()
        self.stamps.append(perf_counter())
        yield

    def on_step(self, run: Run, step: Step) -> Verdict | None:
        """A comparison, and as a rule reading the clock."""
        self.made += 1
        if self.made < self.least or perf_counter() < self.deadline:
            return None
        return self.then(run)

    def on_report(self, run: Run, report: Report) -> None:
        """Keep the losses, once they have reached the host anyway."""
        self.training.add(report)

    def _warm(self, run: Run) -> Verdict | None:
        """After each warm-up step."""
        run.device.synchronize()
        self.stamps.append(perf_counter())
        if len(self.stamps) <= self.warm_up:
            return None
        laps = [b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False)]
        last = laps[-self._whole_rounds(LEAST) :]
        late = mean(last) if self.workers else median(last)
        self.turns.append(late * 1e3)
        ready = Ready(
            samples_per_step=run.train.samples(0),
            setup_seconds=self.stamps[1] - self.started,
            warm_ms=late * 1e3,
            settling_seconds=max(0.0, sum(laps[1:]) - (len(laps) - 1) * late),
            compile_seconds=_compile_seconds(),
            workers=self.workers,
        )
        # the first report, which comes after this step, is a slow one, so one more is warm-up
        return self._wait_for_turn(run, ready, lead=1)

    def _whole_rounds(self, steps: int) -> int:
        """So many steps, or a few more: every worker has its batch in them equally often."""
        return math.ceil(steps / self.workers) * self.workers if self.workers else steps

    def _wait_for_turn(self, run: Run, answer: Any, lead: int = 0) -> Verdict | None:
        """Send the answer, wait for the next question, and begin a turn or the end."""
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
        """From here on it counts."""
        run.device.synchronize()
        self.made = 0
        self.laps = run.watch.count  # the current step will be the next lap
        self.data = run.watch.spent["data"]
        self.begun = perf_counter()
        self.then = self._end_turn
        self.least = max(LEAST, ROUNDS * self.ahead)
        self.deadline = self.begun + self.seconds
        if run.device.kind != "cpu":
            # the host is far ahead of the device: its clock says little, so steps are counted
            steps = math.ceil(self.seconds * 1e3 / self.turns[-1])
            self.least, self.deadline = max(self.least, steps), 0.0
        return None

    def _end_turn(self, run: Run) -> Verdict | None:
        """The turn is over, within its last step."""
        if self.made != self._whole_rounds(self.made):
            return None
        run.device.synchronize()
        now = perf_counter()
        seconds, steps, done = now - self.begun, self.made, run.progress.step
        samples = [run.train.samples(number) for number in range(done - steps, done)]
        laps, per_sample = [seconds / steps], seconds / sum(samples)
        if run.device.kind == "cpu":
            # the lap of the step at whose end it began is left out, that of this one is open yet
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
        """Before anything is gathered: what it took."""
        self.finishing = True
        self.peaks = (memory.peak_process_bytes(), memory.peak_device_bytes(run.device))
        run.stop_reason = STOPPED
        if run.world is None:  # which would all have to leave it out
            run.saved_step = run.progress.step  # no run continues from here: no last checkpoint
        return Verdict.STOP


def _compile_seconds() -> float:
    """Seconds that the compiler has taken so far, by its own count."""
    if "torch._dynamo" not in sys.modules:
        return 0.0
    from runner.techniques import compiler

    return float(compiler.compilation_facts()["seconds"])


@contextmanager
def _pause_workers() -> Iterator[None]:
    """Stop data workers meanwhile (some 20 µs each), or they would fetch ahead on the cores of the
    arm whose turn it is. A stopped one can still be killed, and is when this process dies.
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
    # only we collect our children, so until then its id is not reused
    if worker.pid is not None and worker.exitcode is None:
        with suppress(ProcessLookupError):
            os.kill(worker.pid, number)


# -- the results of an arm, while its run is still open --------------------------------------------


@dataclass
class TrainingLog:
    """Whether a run trains, by the numbers of its steps as they reach the host anyway."""

    steps: int = 0
    skipped: int = 0
    not_finite: int = 0
    with_gradient: int = 0  # steps whose gradient was not zero
    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=FIRST))

    def add(self, report: Report) -> None:
        """A window of steps; some µs."""
        self.steps += len(report.loss)
        self.skipped += sum(report.skipped)
        self.not_finite += sum(not math.isfinite(loss) for loss in report.loss)
        self.with_gradient += sum(norm != 0.0 for norm in report.grad_norm)
        self.first += report.loss[: max(0, FIRST - len(self.first))]
        self.last.extend(report.loss)

    def problems(self) -> list[str]:
        """Signs, in these numbers, that nothing is learned."""
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
    """A loss that rises or stays, by more than the noise from batch to batch."""
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
) -> Finished:
    """The arm's results; `summary.json` then has its peaks without this."""
    notes: list[str] = []
    summary.memory.peak_process_bytes, summary.memory.peak_device_bytes = hook.peaks
    if run.folder is not None:
        try:
            summary.write(run.folder)
        except StorageError as error:
            notes.append(str(error))
    if run.world is not None:
        notes.append(f"memory is that of one of {run.world.size} processes")
    if any(row.evidence.get("cache") == "warm" for row in summary.techniques):
        notes.append("compiled from the cache on disk; the first time takes longer")
    values: dict[str, Any] = {}
    for name, metric in metrics.items():
        try:
            values[name] = metric(run)
        except Exception as error:  # the rest was measured all the same
            notes.append(f"{name}: not known: {type(error).__name__}: {shorten(str(error), 200)}")
    return Finished(asdict(summary), hook.training.first, hook.training.problems(), values, notes)


def is_memory_error(error: BaseException | None) -> bool:
    """Whether it is memory that was missing, here or where the error came from."""
    while error is not None:
        if isinstance(error, OutOfMemory) or is_out_of_memory(error):
            return True
        error = error.__cause__
    return False
