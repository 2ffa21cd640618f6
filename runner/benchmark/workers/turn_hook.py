"""A hook at the end of a step in which a run waits for its turns, so that its steps are real.

What a turn measures is what any run of that config does: the loop itself, with the record, the
guard and the reports that it has. The wait is taken out of the step in which it falls. On a CPU
each step is a lap of the run's own stopwatch; an accelerator is waited for at both ends, and its
step is the time in between divided by the steps. Batches of data workers come in rounds, so turns
with workers are whole rounds, several of them.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from statistics import mean, median
from time import perf_counter
from typing import Any

import psutil

from runner.benchmark.workers.messages import FINISH, Lap
from runner.benchmark.workers.results import (
    TrainingLog,
    compute_checksums,
    describe_unchanged,
    find_unchanged,
)
from runner.data.loader import BatchLoader
from runner.device import memory, nvml
from runner.device.nvml import Gpu
from runner.training.hook import Hook, Report, Step, Verdict
from runner.training.run import Run

LEAST = 3  # steps of a turn
LEAST_WARM = 4  # steps before there is a late one
LATE = 3  # warm-up steps whose median is a late one; with workers the mean of a round of them
ROUNDS = 2  # times that a turn uses up what all workers may have in hand, at least
WAITS = 0.01  # share of a step by which batches that lay ready shorten it: less is nothing
STOPPED = "the benchmark has measured it"


class TurnHook(Hook):
    """Lets a run go for a turn at a time.

    `ask(answer)` gives the last one's answer away and waits; it comes back with the seconds of the
    next one, or `FINISH`.
    """

    def __init__(
        self,
        warm_up: int,
        target: float | None,
        ask: Callable[[Any], float | str],
        started: float,
        compiled: Callable[[], float],
    ) -> None:
        """`started` is when the process was, by `time.perf_counter`; `compiled` says for how many
        seconds the compiler has been at work.
        """
        self.ask, self.started, self.compiled = ask, started, compiled
        self.warm_up = max(warm_up, LEAST_WARM)
        self.training = TrainingLog(target)
        self.least, self.deadline = 1, 0.0  # what the stretch in hand is over at
        self.made = 0  # steps of it
        self.then: Callable[[Run], Verdict | None] = self._warm
        self.stamps: list[float] = []  # when the session began, and each warm-up step ended
        self.waited: list[float] = []  # for data, before that
        self.workers = 0  # that fetch data
        self.in_hand = 0  # batches that they may be ahead
        self.lead = 0  # steps before a turn counts, until batches that lay ready are used up
        self.turns: list[float] = []  # a usual step of each, ms; at first the late warm-up step
        self.seconds = self.begun = self.data = 0.0  # of the turn in hand; data: waited before it
        self.laps = 0  # before it
        self.usual_wait = 0.0  # for data, of a late warm-up step
        self.gpu: Gpu | None = None
        self.checksums: dict[str, int] = {}
        self.problems: list[str] = []
        self.peaks = (0, 0)  # of process and device
        self.worker_bytes = 0
        self.asked = False  # to finish

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Begin: what the weights were, and when."""
        self.checksums = compute_checksums(run.model)
        self.gpu = nvml.find(run.device, run.settings.get("stability.watch.gpu"))
        run.device.synchronize()
        pool = run.train.pool if isinstance(run.train, BatchLoader) else None
        if pool is not None:
            self.workers, self.in_hand = pool.count, pool.count * pool.ahead
            self.lead = self.in_hand + 1  # so many more warm-up steps, to see whether it waits
        self.stamps.append(perf_counter())
        self.waited.append(0.0)
        yield

    def on_step(self, run: Run, step: Step) -> Verdict | None:
        """A comparison and, as a rule, a look at the clock."""
        self.made += 1
        if self.made < self.least or perf_counter() < self.deadline:
            return None
        return self.then(run)

    def on_report(self, run: Run, report: Report) -> None:
        """The losses, once they have reached the host anyway."""
        self.training.add(report)

    # -- the stretches -------------------------------------------------------------------------

    def _warm(self, run: Run) -> Verdict | None:
        """After each warm-up step."""
        run.device.synchronize()
        self.stamps.append(perf_counter())
        self.waited.append(run.watch.spent["data"])
        if len(self.stamps) <= self.warm_up + self.lead:
            return None
        laps = [b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False)]
        last = self._round_up(LATE)
        late = mean(laps[-last:]) if self.workers else median(laps[-last:])
        self.usual_wait = (self.waited[-1] - self.waited[-1 - last]) / last
        self.turns.append(late * 1e3)
        return self._wait_for_turn(
            run,
            {
                "samples_per_step": run.train.samples(0),
                "setup_seconds": self.stamps[1] - self.started,
                "first_seconds": sum(laps),
                "warm_ms": late * 1e3,
                "settling_seconds": max(0.0, sum(laps[1:]) - (len(laps) - 1) * late),
                "compile_seconds": self.compiled(),
                "workers": self.workers,
            },
        )

    def _round_up(self, steps: int) -> int:
        """So many steps, or a few more: every worker has its batch in them equally often."""
        return math.ceil(steps / self.workers) * self.workers if self.workers else steps

    def _wait_for_turn(self, run: Run, answer: Any) -> Verdict | None:
        """Hand the answer in, wait for what comes next, and begin it."""
        with run.watch.aside(), pause_workers():
            asked = self.ask(answer)
        if asked == FINISH:
            return self._finish(run)
        self.seconds = float(asked)
        self.made, self.data = 0, run.watch.spent["data"]
        # the first report, which comes after this step, is a slow one, so one more is warm-up
        lead = self.lead or int(len(self.turns) == 1)
        if lead:
            self.least, self.deadline, self.then = lead, 0.0, self._begin_turn
            return None
        return self._begin_turn(run)

    def _begin_turn(self, run: Run) -> Verdict | None:
        """From here on it counts."""
        run.device.synchronize()
        if self.lead:
            gained = self.usual_wait - (run.watch.spent["data"] - self.data) / self.lead
            if gained * 1e3 < WAITS * self.turns[0]:  # it makes no difference what lay ready
                self.lead = 0
        self.made = 0
        self.laps = len(run.watch.steps)  # the step in hand will be the next lap
        self.data = run.watch.spent["data"]
        self.begun = perf_counter()
        self.then = self._end_turn
        least = max(LEAST, ROUNDS * self.in_hand)
        if run.device.kind == "cpu":
            self.least, self.deadline = least, self.begun + self.seconds
            return None
        # the host is far ahead of the device: its clock says little, so steps are counted
        wanted = math.ceil(self.seconds * 1e3 / self.turns[-1])
        self.least, self.deadline = max(least, wanted), 0.0
        return None

    def _end_turn(self, run: Run) -> Verdict | None:
        """The turn is over, within its last step."""
        if self.made != self._round_up(self.made):
            return None
        device_mhz = None
        if self.gpu is not None:
            device_mhz = self.gpu.read().clock_mhz  # while it is at work still
        run.device.synchronize()
        now = perf_counter()
        seconds, steps = now - self.begun, self.made
        done = run.progress.step
        samples = [run.train.samples(number) for number in range(done - steps, done)]
        laps = [seconds / steps]
        per_sample = seconds / sum(samples)
        if run.device.kind == "cpu":
            # the lap of the step at whose end it began is left out, that of this one is open yet
            laps = [*run.watch.steps[self.laps + 1 :], now - run.watch.started]
            per_sample = median(laps) / median(samples)
        self.turns.append(1e3 * (seconds / steps if self.workers else median(laps)))
        data = run.watch.spent["data"] - self.data
        return self._wait_for_turn(
            run,
            Lap(
                steps=steps,
                samples=sum(samples),
                seconds=seconds,
                median_ms=median(laps) * 1e3,
                per_sample_ms=per_sample * 1e3,
                step_ms=[lap * 1e3 for lap in laps],
                data_seconds=data,
                device_mhz=device_mhz,
            ),
        )

    def _finish(self, run: Run) -> Verdict:
        """Before anything is gathered: what it took, and whether it has trained."""
        self.asked = True
        self.peaks = (memory.peak_process_bytes(), memory.peak_device_bytes(run.device))
        self.worker_bytes = worker_bytes()
        self.problems = describe_unchanged(run, find_unchanged(run.model, self.checksums))
        run.stop_reason = STOPPED
        run.saved_step = run.progress.step  # nobody goes on from here: no last checkpoint
        return Verdict.STOP


@contextmanager
def pause_workers() -> Iterator[None]:
    """Data workers are stopped meanwhile (some 20 µs each), or they would fetch ahead on the cores
    of the arm whose turn it is. A stopped one can still be killed, and is when this process dies.
    """
    workers = multiprocessing.active_children()
    try:
        for worker in workers:
            _signal(worker, signal.SIGSTOP)
        yield
    finally:
        for worker in workers:
            _signal(worker, signal.SIGCONT)


def worker_bytes() -> int:
    """Memory of the data workers that no other process shares; some 5 ms each."""
    held = 0
    for worker in multiprocessing.active_children():
        with suppress(psutil.Error):
            memory = psutil.Process(worker.pid).memory_full_info()
            held += getattr(memory, "uss", memory.rss)  # not every sandbox tells it
    return held


def _signal(worker: multiprocessing.process.BaseProcess, number: int) -> None:
    # only we collect our children, so until then its id is not reused
    if worker.pid is not None and worker.exitcode is None:
        with suppress(ProcessLookupError):
            os.kill(worker.pid, number)
