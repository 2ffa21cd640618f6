"""The pool of measured processes: one for each arm; started, asked for turns, ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from multiprocessing import resource_tracker
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Self

from runner import fork_server
from runner.benchmark.arms import Arm
from runner.benchmark.blocks import ArmEnded, Finished, Ready, Turn
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.machine import LoadMonitor
from runner.benchmark.workers import worker
from runner.benchmark.workers.process import ENDING_S, ChildProcess, block_interrupt
from runner.benchmark.workers.worker import FINISH, LOG, WorkerSpec
from runner.device.config import omp_env
from runner.errors import StorageError
from runner.security.pickle_transfer import packed
from runner.training.summary import Summary

PRELOAD = [
    "torch._dynamo",  # which every optimizer of torch's imports
    "runner.build",
    "runner.training.loop",
    "runner.benchmark.workers.turn_hook",
    "runner.record.tensorboard",
]
"""What a worker needs in any case."""
FINISH_S = 300.0  # to gather the results of an arm; by then it has been measured
SLOW_S, SLOW = 60.0, 20.0  # a turn may take so long, and so many times as long as it should
STEPS = 20  # of a turn, at most, where a step takes longer than the turn should
LEAVING_S = 30.0  # for one that is done, to close its files


class WorkerPool:
    """The arms' processes; as a context manager, none outlives it.

    They are forks of one process that has imported torch, so that a start is quick; `renew`
    replaces that process too: where its memory lies is drawn again. Where this process has a fork
    server of its own already, and on other systems than Linux, they are spawned.

    `given` are parts that the caller has made (`build.Components`), `metrics` functions of the
    finished run by their names; both are sent to each process and must be picklable: else
    UsageError. Every method raises `ArmEnded` for an arm that has ended: failed (with the error),
    killed (by which signal), timeout, oom.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        settings: BenchmarkConfig,
        folder: Path | None,
        given: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        self.arms = {arm.name: arm for arm in arms}
        self.settings, self.folder = settings, folder
        parts = {} if given is None else {f.name: getattr(given, f.name) for f in fields(given)}
        self.parcel = packed({**parts, "metrics": dict(metrics or {})})
        self.workers: dict[str, ChildProcess] = {}
        self.ready: dict[str, Ready] = {}
        self.mean = False  # compare mean steps: an arm has data workers
        self.forks = fork_server.available() and not fork_server.is_running()
        self.scratch: TemporaryDirectory[str] | None = None  # for the runs of further processes

    def __enter__(self) -> Self:
        self._start_server()
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave no process, and nothing of the runs but those of the first ones."""
        try:
            self._end_all()
        finally:
            if self.forks:
                fork_server.stop()
            if self.scratch is not None:
                self.scratch.cleanup()

    def renew(self) -> None:
        """End all processes. Those started from now on are new ones, whose runs leave no record."""
        self._end_all()
        self._start_server()
        if self.scratch is None and self.folder is not None:
            self.scratch = TemporaryDirectory(dir=self.folder, prefix=".runs-")

    def _start_server(self) -> None:
        if not self.forks:
            return
        fork_server.stop()
        environment = {**os.environ, **omp_env(os.environ)}
        resource_tracker.ensure_running()  # which lets signals in again when it starts
        with block_interrupt():
            path = fork_server.module_path()
            fork_server.start(PRELOAD, {**environment, "PYTHONPATH": path})

    def _end_all(self) -> None:
        """Ask waiting workers to leave, so that they close their files; then end all."""
        try:
            waiting = [self.workers[name] for name in self.ready]
            for process in waiting:
                process.dismiss()
            until = time.monotonic() + ENDING_S
            for process in waiting:
                process.wait(until - time.monotonic())
        finally:  # also at a second Ctrl-C
            for name in list(self.workers):
                self.end(name)

    def start(self, name: str, within_s: float | None = None) -> Ready:
        """Start the process, build the run, make the warm-up steps, within `timeout_s`."""
        self.end(name)
        arm, folder = self.arms[name], self._folder(name)
        log = None if folder is None else folder / LOG
        began = None if self.forks else time.perf_counter()  # a fork server may still be importing
        if folder is not None and self.scratch is not None:
            folder = Path(mkdtemp(dir=self.scratch.name)) / arm.folder
        spec = WorkerSpec(arm.config, self.settings, folder, arm.command, began)
        with self._cleaned_up(name):
            self.workers[name] = process = ChildProcess(worker.main, (spec,), log, self.forks)
            process.start()
            if self.forks and fork_server.has_threads():  # a fork may hang in what they had locked
                self.forks = False
                return self.start(name, within_s)
            process.ask(self.parcel)
            timeout_s = self.settings.timeout_s if within_s is None else within_s
            ready: Ready = process.answer(timeout_s)
        self.ready[name] = ready
        self.mean = self.mean or ready.workers > 0
        return ready

    def turn(self, name: str, seconds: float) -> Turn:
        """Steps for so many seconds, at least three, while the other arms are paused.

        Data workers deliver a batch each and then none for a while, so where any arm has them the
        median step is not what steps cost: times per sample are those of the mean, in all arms.
        """
        with self._busy(name) as (process, ready):
            monitor = LoadMonitor(process.pid)
            process.ask(seconds)
            limit_s = SLOW_S + SLOW * max(seconds, STEPS * ready.warm_ms / 1e3)
            turn: Turn = process.answer(limit_s)
            turn = replace(turn, others=monitor.others())
        if self.mean:
            turn = replace(turn, per_sample_ms=1e3 * turn.seconds / turn.samples)
        return turn

    def finish(self, name: str) -> Finished:
        """Let the run end as runs do, with its evidence, and its process after it."""
        with self._busy(name) as (process, _):
            process.ask(FINISH)
            finished: Finished = process.answer(FINISH_S)
        process.wait(LEAVING_S)
        self.end(name)
        return finished

    def end(self, name: str) -> None:
        """End the process at once, with all that it started; nothing if there is none."""
        self.ready.pop(name, None)
        process = self.workers.get(name)
        if process is not None:
            process.end()
            del self.workers[name]

    @contextmanager
    def _busy(self, name: str) -> Iterator[tuple[ChildProcess, Ready]]:
        """The arm's process while it works: should that be cut short, it is not asked to leave."""
        if name not in self.ready:
            raise ArmEnded("failed", f"{name} was not started, or has ended")
        ready = self.ready.pop(name)
        with self._cleaned_up(name):
            yield self.workers[name], ready
        self.ready[name] = ready

    @contextmanager
    def _cleaned_up(self, name: str) -> Iterator[None]:
        """An arm that ended leaves no process behind, and a summary with how it ended."""
        try:
            yield
        except ArmEnded as ended:
            self.end(name)
            _write_end(self._folder(name), ended)
            raise

    def _folder(self, name: str) -> Path | None:
        folder = self.arms[name].folder
        return self.folder / folder if self.folder is not None and folder else None


def _write_end(folder: Path | None, ended: ArmEnded) -> None:
    """The run itself could not record that it was killed."""
    if folder is None:
        return
    with suppress(StorageError):  # it had none yet, or the disk is full: the arm's row says it
        summary = Summary.read(folder)
        if summary.status == "running" or ended.status == "oom":
            summary.status, summary.reason = ended.status, ended.reason
            summary.write(folder)
