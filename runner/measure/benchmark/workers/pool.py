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

from runner.core import fork_server
from runner.core.device.load import LoadMonitor
from runner.core.errors import StorageError, WorkerFailure
from runner.core.record.storage import make_folder
from runner.core.record.summary import Summary
from runner.core.schemas.device import omp_env
from runner.core.schemas.jobs import BenchmarkConfig
from runner.core.security.child_process import EXIT_TIMEOUT_S, RequestProcess, block_interrupt
from runner.core.security.pickle_transfer import pickle_parts
from runner.measure.benchmark.arms import Arm
from runner.measure.benchmark.blocks import FINISH, Turn, WorkerResults, WorkerSetup
from runner.measure.benchmark.workers import worker
from runner.measure.benchmark.workers.worker import WORKER_LOG, WorkerSpec

PRELOADED_MODULES = [
    "torch._dynamo",  # imported by every torch optimizer
    "runner.core.build.build",
    "runner.core.train.loop",
    "runner.measure.benchmark.workers.turn_hook",
    "runner.core.record.tensorboard",
]
"""Modules that every worker imports."""
FINISH_TIMEOUT_S = 300.0  # seconds to gather an arm's results after it was measured
# limit of a turn: TURN_TIMEOUT_S + TURN_TIMEOUT_FACTOR times its expected seconds
TURN_TIMEOUT_S, TURN_TIMEOUT_FACTOR = 60.0, 20.0
ASSUMED_TURN_STEPS = 20  # in that limit
FINISHED_EXIT_S = 30.0  # seconds for a finished worker to close its files


class WorkerPool:
    """The arms' processes; leaving the context ends them all.

    They are forked from a server process that has imported torch, for a fast start; `renew` also
    replaces the server, so that its memory layout changes. They are spawned instead if this process
    already has a fork server, or on systems other than Linux.

    `given` (`setup.Components`) and `metrics`, functions of the finished run by name, are pickled
    for each process: UsageError if they cannot be. Every method raises `WorkerFailure` for an arm
    that has ended: failed (with the error), killed (with the signal), timeout, oom.
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
        self.payload = pickle_parts({**parts, "metrics": dict(metrics or {})})
        self.workers: dict[str, RequestProcess] = {}
        self.idle_workers: dict[str, WorkerSetup] = {}  # those that wait for a request
        self.use_mean_step = False  # compare mean steps, because an arm has data workers
        self.use_fork_server = fork_server.available() and not fork_server.is_running()
        self.scratch: TemporaryDirectory[str] | None = None  # holds run folders of later launches

    def __enter__(self) -> Self:
        self._start_fork_server()
        return self

    def __exit__(self, *exc: object) -> None:
        """End all processes and delete the run folders of all launches but the first."""
        try:
            self._end_all()
        finally:
            if self.use_fork_server:
                fork_server.stop()
            if self.scratch is not None:
                self.scratch.cleanup()

    def renew(self) -> None:
        """End all processes. Later ones use a new fork server, and their runs leave no record."""
        self._end_all()
        self._start_fork_server()
        if self.scratch is None and self.folder is not None:
            self.scratch = TemporaryDirectory(dir=self.folder, prefix=".runs-")

    def _start_fork_server(self) -> None:
        if not self.use_fork_server:
            return
        fork_server.stop()
        resource_tracker.ensure_running()  # starting it unblocks signals
        with block_interrupt():
            path = {"PYTHONPATH": fork_server.child_pythonpath()}
            fork_server.start(PRELOADED_MODULES, {**os.environ, **omp_env(os.environ), **path})

    def _end_all(self) -> None:
        """Ask idle workers to exit, so that they close their files; then kill all."""
        try:
            idle = [self.workers[name] for name in self.idle_workers]
            for process in idle:
                process.request_exit()
            deadline = time.monotonic() + EXIT_TIMEOUT_S
            for process in idle:
                process.wait(deadline - time.monotonic())
        finally:  # also at a second Ctrl-C
            for name in list(self.workers):
                self.end(name)

    def start(self, name: str, within_s: float | None = None) -> WorkerSetup:
        """Start the arm's process and make its warm-up steps, within `within_s` or `timeout_s`."""
        self.end(name)
        arm, folder = self.arms[name], self._arm_folder(name)
        log = None if folder is None else folder / WORKER_LOG
        if log is not None:
            make_folder(log.parent)  # the new process does not know the guarded folder
        # a fork server may still be importing
        start_time = None if self.use_fork_server else time.perf_counter()
        if folder is not None and self.scratch is not None:
            folder = Path(mkdtemp(dir=self.scratch.name)) / arm.folder
        spec = WorkerSpec(arm.config, self.settings, folder, arm.command, start_time)
        with self._end_on_failure(name):
            if self.use_fork_server and not fork_server.is_running():  # it was killed
                self._start_fork_server()
            process = RequestProcess(worker.main, (spec,), log, self.use_fork_server)
            self.workers[name] = process
            process.start(arm.config.data.timeout_s)
            # a fork may deadlock on the locks of threads
            if self.use_fork_server and fork_server.has_threads():
                self.use_fork_server = False
                return self.start(name, within_s)
            process.ask(self.payload)
            limit_s = self.settings.timeout_s if within_s is None else within_s
            setup: WorkerSetup = process.answer(limit_s)
        self.idle_workers[name] = setup
        self.use_mean_step = self.use_mean_step or setup.workers > 0
        return setup

    def turn(self, name: str, seconds: float) -> Turn:
        """Run steps for about `seconds`, at least three, while the other arms are paused.

        Data workers deliver in bursts: if any arm has some, times per sample are of the mean step.
        """
        with self._reserve(name) as (process, setup):
            monitor = LoadMonitor(process.pid)
            process.ask(seconds)
            expected_s = max(seconds, ASSUMED_TURN_STEPS * setup.warm_ms / 1e3)
            turn: Turn = process.answer(TURN_TIMEOUT_S + TURN_TIMEOUT_FACTOR * expected_s)
            turn = replace(turn, other_cpu_share=monitor.other_cpu_share())
        if self.use_mean_step:
            turn = replace(turn, per_sample_ms=1e3 * turn.seconds / turn.samples)
        return turn

    def finish(self, name: str) -> WorkerResults:
        """Finish the run normally, return its results, and end its process."""
        with self._reserve(name) as (process, _):
            process.ask(FINISH)
            results: WorkerResults = process.answer(FINISH_TIMEOUT_S)
        process.wait(FINISHED_EXIT_S)
        self.end(name)
        return results

    def end(self, name: str) -> None:
        """Kill the arm's process and its children; a no-op if it has none."""
        self.idle_workers.pop(name, None)
        if name in self.workers:
            self.workers[name].end()
            del self.workers[name]

    @contextmanager
    def _reserve(self, name: str) -> Iterator[tuple[RequestProcess, WorkerSetup]]:
        """Yield the arm's process, which is not idle meanwhile or after an error."""
        if name not in self.idle_workers:
            raise WorkerFailure("failed", f"{name} was not started, or has ended")
        setup = self.idle_workers.pop(name)
        with self._end_on_failure(name):
            yield self.workers[name], setup
        self.idle_workers[name] = setup

    @contextmanager
    def _end_on_failure(self, name: str) -> Iterator[None]:
        """On WorkerFailure, end the process and record the status in its summary; then re-raise."""
        try:
            yield
        except WorkerFailure as failure:
            self.end(name)
            _record_failure(self._arm_folder(name), failure)
            raise

    def _arm_folder(self, name: str) -> Path | None:
        folder = self.arms[name].folder
        return self.folder / folder if self.folder is not None and folder else None


def _record_failure(folder: Path | None, failure: WorkerFailure) -> None:
    """Record in the summary how the process ended, which a killed run cannot do itself."""
    if folder is None:
        return
    with suppress(StorageError):  # no summary yet, or disk full: the arm's row has the status
        summary = Summary.read(folder)
        if summary.status == "running" or failure.status == "oom":
            summary.set_end(failure.status, failure.reason)
            summary.write(folder)
