"""A hook that suspends a run between turns, and the collection of an arm's results.

On a CPU each step is a lap of the stopwatch; accelerators are synchronised at both ends of a turn.
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

from runner.core.data.loader import BatchLoader
from runner.core.device import memory
from runner.core.device.device_errors import is_out_of_memory
from runner.core.errors import OutOfMemory, StorageError
from runner.core.interfaces.hook import Hook, Report, Step, Verdict
from runner.core.interfaces.run import Run
from runner.core.record.summary import Summary
from runner.core.record.text import shorten
from runner.core.schemas.jobs import BenchmarkConfig
from runner.measure.benchmark.blocks import FINISH, Turn, WorkerResults, WorkerSetup

MIN_TURN_STEPS = 3  # also of the late warm-up
PREFETCH_ROUNDS = 2  # times, at least, that a turn uses up the batches that workers may prefetch
MAX_STEP_TIMES = 512  # of a turn, evenly spaced, to bound memory
STOP_REASON = "the benchmark has measured it"
LOSS_WINDOW = 50  # first steps, and last steps, whose losses are kept
MIN_TREND_LOSSES = 10  # at each end
# standard errors: below the first the loss does not move, above the second it rises
FLAT_SIGMAS, RISE_SIGMAS = 2.0, 3.0


class TurnHook(Hook):
    """Lets a run continue for one turn at a time.

    `next_request(answer)` sends the last turn's answer and blocks for the next request: the seconds
    of a turn, or `FINISH`. `started` is in the time of `time.perf_counter`.
    """

    def __init__(
        self, settings: BenchmarkConfig, next_request: Callable[[Any], float | str], started: float
    ) -> None:
        self.next_request, self.process_start = next_request, started
        self.warmup_steps = max(settings.warmup_steps, MIN_TURN_STEPS + 1)
        self.training_log = TrainingLog()
        # `next_action` is called after this many steps and this time
        self.min_steps, self.deadline = 1, 0.0
        self.steps_made = 0  # since `next_action` was last called
        self.next_action: Callable[[Run], Verdict | None] = self._time_warmup_step
        # start of the session and end of each warm-up step
        self.warmup_timestamps: list[float] = []
        self.workers = self.prefetch_batches = 0  # data workers; batches that they may prefetch
        self.last_step_ms = 0.0  # of the last turn; at first of the late warm-up
        self.turn_seconds = self.turn_start = 0.0
        self.data_wait_before = 0.0  # seconds, before the turn
        self.laps_before = 0  # number of laps before the turn
        self.peak_bytes = (0, 0)  # of process and device
        self.is_finishing = False

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Count the data workers and start the clock."""
        pool = run.train.pool if isinstance(run.train, BatchLoader) else None
        if pool is not None:
            self.workers, self.prefetch_batches = pool.count, pool.count * pool.ahead
            self.warmup_steps += self.prefetch_batches
        self.warmup_timestamps.append(run.device.clock())
        yield

    def on_step(self, run: Run, step: Step) -> Verdict | None:
        """Count the step, and call `next_action` if it is due."""
        self.steps_made += 1
        if self.steps_made < self.min_steps or perf_counter() < self.deadline:
            return None
        return self.next_action(run)

    def on_report(self, run: Run, report: Report) -> None:
        """Record the losses of a report that has reached the host."""
        self.training_log.add(report)

    def _time_warmup_step(self, run: Run) -> Verdict | None:
        """Time a warm-up step; after the last one, report Ready."""
        self.warmup_timestamps.append(run.device.clock())
        if len(self.warmup_timestamps) <= self.warmup_steps:
            return None
        times = self.warmup_timestamps
        durations = [b - a for a, b in zip(times, times[1:], strict=False)]
        late_durations = durations[-self._round_up_to_workers(MIN_TURN_STEPS) :]
        late_s = mean(late_durations) if self.workers else median(late_durations)
        self.last_step_ms = late_s * 1e3
        setup = WorkerSetup(
            samples_per_step=run.train.batch_size,
            setup_seconds=self.warmup_timestamps[1] - self.process_start,
            warm_ms=self.last_step_ms,
            settling_seconds=max(0.0, sum(durations[1:]) - (len(durations) - 1) * late_s),
            compile_seconds=_compile_seconds(),
            workers=self.workers,
        )
        # the first report comes after this step and makes the next one slow: skip one more
        return self._wait_for_turn(run, setup, lead_steps=1)

    def _round_up_to_workers(self, steps: int) -> int:
        """Round `steps` up to a multiple of the number of data workers."""
        return math.ceil(steps / self.workers) * self.workers if self.workers else steps

    def _wait_for_turn(self, run: Run, answer: Any, lead_steps: int = 0) -> Verdict | None:
        """Send the answer, wait for the next request, and begin a turn or finish."""
        with run.stopwatch.exclude_time(), _pause_workers():
            request = self.next_request(answer)
        if request == FINISH:
            return self._finish(run)
        self.turn_seconds, self.steps_made = float(request), 0
        lead_steps += self.prefetch_batches
        if not lead_steps:
            return self._begin_turn(run)
        self.min_steps, self.deadline, self.next_action = lead_steps, 0.0, self._begin_turn
        return None

    def _begin_turn(self, run: Run) -> Verdict | None:
        """Start timing a turn at the end of the current step."""
        self.turn_start, self.steps_made = run.device.clock(), 0
        self.laps_before = run.stopwatch.count  # the current step will be the next lap
        self.data_wait_before = run.stopwatch.phase_seconds["data"]
        self.next_action = self._end_turn
        self.min_steps = max(MIN_TURN_STEPS, PREFETCH_ROUNDS * self.prefetch_batches)
        self.deadline = self.turn_start + self.turn_seconds
        if run.device.kind != "cpu":
            # the host runs ahead of the device, so count steps instead of watching the clock
            steps = math.ceil(self.turn_seconds * 1e3 / self.last_step_ms)
            self.min_steps, self.deadline = max(self.min_steps, steps), 0.0
        return None

    def _end_turn(self, run: Run) -> Verdict | None:
        """End the turn in its last step and send its times."""
        if self.steps_made != self._round_up_to_workers(self.steps_made):
            return None
        now = run.device.clock()
        seconds, steps, steps_done = now - self.turn_start, self.steps_made, run.progress.step
        samples = [run.train.samples(number) for number in range(steps_done - steps, steps_done)]
        durations, per_sample = [seconds / steps], seconds / sum(samples)
        if run.device.kind == "cpu":
            # skip the lap of the step in which the turn began; the current one is still open
            laps = run.stopwatch.step_seconds(self.laps_before + 1)
            durations = [*laps.tolist(), now - run.stopwatch.started]
            per_sample = median(durations) / median(samples)
        self.last_step_ms = 1e3 * (seconds / steps if self.workers else median(durations))
        turn = Turn(
            steps=steps,
            samples=sum(samples),
            seconds=seconds,
            median_ms=median(durations) * 1e3,
            per_sample_ms=per_sample * 1e3,
            step_ms=[s * 1e3 for s in durations[:: math.ceil(len(durations) / MAX_STEP_TIMES)]],
            data_seconds=run.stopwatch.phase_seconds["data"] - self.data_wait_before,
        )
        return self._wait_for_turn(run, turn)

    def _finish(self, run: Run) -> Verdict:
        """Record memory peaks before anything else allocates, and stop the run."""
        self.is_finishing = True
        self.peak_bytes = (memory.peak_process_bytes(), memory.peak_device_bytes(run.device))
        run.stop_reason = STOP_REASON
        run.saved_step = run.progress.step  # no run continues from here: no last checkpoint
        return Verdict.STOP


def _compile_seconds() -> float:
    """Return the seconds that the compiler has used so far, by its own count."""
    if "torch._dynamo" not in sys.modules:
        return 0.0
    from runner.core.techniques import compiler

    return float(compiler.compilation_facts()["seconds"])


@contextmanager
def _pause_workers() -> Iterator[None]:
    """Stop the data workers (about 20 µs each) so that they do not prefetch in other arms' turns.
    A stopped worker can still be killed, and is when this process dies.
    """
    workers = multiprocessing.active_children()

    def send_signal(number: int) -> None:
        for worker in workers:  # we alone reap our children, so the id is not reused before that
            if worker.pid is not None and worker.exitcode is None:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, number)

    try:
        send_signal(signal.SIGSTOP)
        yield
    finally:
        send_signal(signal.SIGCONT)


# -- the results of an arm, while its run is still open --------------------------------------------


@dataclass
class TrainingLog:
    """Losses and counters of a run's steps, to detect that it does not learn."""

    steps: int = 0
    skipped: int = 0
    not_finite: int = 0
    nonzero_gradients: int = 0  # steps whose gradient was not zero
    first_losses: list[float] = field(default_factory=list)
    last_losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSS_WINDOW))

    def add(self, report: Report) -> None:
        """Add the steps of a report; takes a few µs."""
        self.steps += len(report.loss)
        self.skipped += sum(report.skipped)
        self.not_finite += sum(not math.isfinite(loss) for loss in report.loss)
        self.nonzero_gradients += sum(norm != 0.0 for norm in report.grad_norm)
        self.first_losses += report.loss[: max(0, LOSS_WINDOW - len(self.first_losses))]
        self.last_losses.extend(report.loss)

    def problems(self) -> list[str]:
        """Return the signs that nothing is learned."""
        if not self.steps:
            return []
        signs = {
            "every update was skipped": self.skipped == self.steps,
            f"the loss was not finite in {self.not_finite} of {self.steps} steps": self.not_finite,
            "gradients are zero": not self.nonzero_gradients,
        }
        problems = [text for text, is_seen in signs.items() if is_seen]
        count = min(LOSS_WINDOW, self.steps // 2)
        if count >= MIN_TREND_LOSSES and not self.not_finite:
            problems += _describe_trend(self.first_losses[:count], list(self.last_losses)[-count:])
        return problems


def _describe_trend(first: Sequence[float], last: Sequence[float]) -> list[str]:
    """Describe a loss that rises or does not move, compared with the noise between batches."""
    noise = math.sqrt((np.var(first, ddof=1) + np.var(last, ddof=1)) / len(first))
    before, after = float(np.mean(first)), float(np.mean(last))
    means = f"{before:.4g} over the first {len(first)} steps, {after:.4g} over the last"
    if after - before > RISE_SIGMAS * noise:
        return [f"the loss rises: {means}"]
    if len(first) == LOSS_WINDOW and abs(after - before) <= FLAT_SIGMAS * noise:
        return [f"the loss does not move: {means}"]
    return []


def collect_results(
    run: Run, hook: TurnHook, summary: Summary, metrics: Mapping[str, Callable[[Run], Any]]
) -> WorkerResults:
    """Collect the arm's results, after writing the peaks measured so far to `summary.json`."""
    notes: list[str] = []
    summary.memory.peak_process_bytes, summary.memory.peak_device_bytes = hook.peak_bytes
    if run.folder is not None:
        try:
            summary.write(run.folder)
        except StorageError as error:
            notes.append(str(error))
    if any(row.evidence.get("cache") == "warm" for row in summary.techniques):
        notes.append("compiled from the disk cache; a first run takes longer")
    values: dict[str, Any] = {}
    for name, metric in metrics.items():
        try:
            values[name] = metric(run)
        except Exception as error:  # the other results are valid
            notes.append(f"{name}: not known: {type(error).__name__}: {shorten(str(error), 200)}")
    return WorkerResults(
        asdict(summary), hook.training_log.first_losses, hook.training_log.problems(), values, notes
    )


def is_memory_error(error: BaseException | None) -> bool:
    """Whether the error or one of its causes is an out-of-memory error."""
    while error is not None:
        if isinstance(error, OutOfMemory) or is_out_of_memory(error):
            return True
        error = error.__cause__
    return False
