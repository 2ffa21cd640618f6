"""The pool of measured processes: start one per arm, request turns, end them."""

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
from runner.benchmark.blocks import ArmEnded, Turn, WorkerResults, WorkerSetup
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
    "torch._dynamo",  # imported by every torch optimizer
    "runner.build",
    "runner.training.loop",
    "runner.benchmark.workers.turn_hook",
    "runner.record.tensorboard",
]
"""Modules that every worker imports."""
FINISH_S = 300.0  # seconds to gather an arm's results after it was measured
SLOW_S, SLOW = 60.0, 20.0  # limit of a turn: SLOW_S + SLOW times its expected seconds
STEPS = 20  # assumed steps of a turn in that limit
LEAVING_S = 30.0  # seconds for a finished worker to close its files


class WorkerPool:
    """The arms' processes; leaving the context ends them all.

    They are forked from a server process that has imported torch, for a fast start; `renew` also
    replaces the server, so that its memory layout changes. They are spawned instead if this process
    already has a fork server, or on systems other than Linux.

    `given` (`build.Components`) and `metrics`, functions of the finished run by name, are pickled
    for each process: UsageError if they cannot be. Every method raises `ArmEnded` for an arm that
    has ended: failed (with the error), killed (with the signal), timeout, oom.
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
        self.ready: dict[str, WorkerSetup] = {}
        self.mean = False  # compare mean steps, because an arm has data workers
        self.forks = fork_server.available() and not fork_server.is_running()
        self.scratch: TemporaryDirectory[str] | None = None  # holds run folders of later launches

    def __enter__(self) -> Self:
        self._start_server()
        return self

    def __exit__(self, *exc: object) -> None:
        """End all processes and delete the run folders of all launches but the first."""
        try:
            self._end_all()
        finally:
            if self.forks:
                fork_server.stop()
            if self.scratch is not None:
                self.scratch.cleanup()

    def renew(self) -> None:
        """End all processes. Later ones use a new fork server, and their runs leave no record."""
        self._end_all()
        self._start_server()
        if self.scratch is None and self.folder is not None:
            self.scratch = TemporaryDirectory(dir=self.folder, prefix=".runs-")

    def _start_server(self) -> None:
        if not self.forks:
            return
        fork_server.stop()
        environment = {**os.environ, **omp_env(os.environ)}
        resource_tracker.ensure_running()  # starting it unblocks signals
        with block_interrupt():
            path = fork_server.module_path()
            fork_server.start(PRELOAD, {**environment, "PYTHONPATH": path})

    def _end_all(self) -> None:
        """Ask waiting workers to leave, so that they close their files; then kill all."""
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

    def start(self, name: str, within_s: float | None = None) -> WorkerSetup:
        """Start the arm's process and make its warm-up steps, within `within_s` or `timeout_s`."""
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
            if self.forks and fork_server.has_threads():  # a fork may deadlock on their locks
                self.forks = False
                return self.start(name, within_s)
            process.ask(self.parcel)
            timeout_s = self.settings.timeout_s if within_s is None else within_s
            ready: WorkerSetup = process.answer(timeout_s)
        self.ready[name] = ready
        self.mean = self.mean or ready.workers > 0
        return ready

    def turn(self, name: str, seconds: float) -> Turn:
        """Run steps for about `seconds`, at least three, while the other arms are paused.

        Data workers deliver batches in bursts, so the median step is not representative: if any arm
        has workers, times per sample are those of the mean step, in all arms.
        """
        with self._busy(name) as (process, ready):
            monitor = LoadMonitor(process.pid)
            process.ask(seconds)
            limit_s = SLOW_S + SLOW * max(seconds, STEPS * ready.warm_ms / 1e3)
            turn: Turn = process.answer(limit_s)
            turn = replace(turn, other_cpu_share=monitor.other_cpu_share())
        if self.mean:
            turn = replace(turn, per_sample_ms=1e3 * turn.seconds / turn.samples)
        return turn

    def finish(self, name: str) -> WorkerResults:
        """Finish the run normally, return its results, and end its process."""
        with self._busy(name) as (process, _):
            process.ask(FINISH)
            finished: WorkerResults = process.answer(FINISH_S)
        process.wait(LEAVING_S)
        self.end(name)
        return finished

    def end(self, name: str) -> None:
        """Kill the arm's process and its children; a no-op if it has none."""
        self.ready.pop(name, None)
        process = self.workers.get(name)
        if process is not None:
            process.end()
            del self.workers[name]

    @contextmanager
    def _busy(self, name: str) -> Iterator[tuple[ChildProcess, WorkerSetup]]:
        """Yield the arm's process, which does not count as waiting meanwhile or after an error."""
        if name not in self.ready:
            raise ArmEnded("failed", f"{name} was not started, or has ended")
        ready = self.ready.pop(name)
        with self._cleaned_up(name):
            yield self.workers[name], ready
        self.ready[name] = ready

    @contextmanager
    def _cleaned_up(self, name: str) -> Iterator[None]:
        """On ArmEnded, end the process and record the status in its summary; then re-raise."""
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
    """Record in the summary how the process ended, which a killed run cannot do itself."""
    if folder is None:
        return
    with suppress(StorageError):  # no summary yet, or disk full: the arm's row has the status
        summary = Summary.read(folder)
        if summary.status == "running" or ended.status == "oom":
            summary.status, summary.reason = ended.status, ended.reason
            summary.write(folder)
