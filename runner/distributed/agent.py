"""Agent that starts the processes of a run on this machine and waits until all have ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from runner import fork_server
from runner.distributed.outcome import MachineReport, RankEnd, RankOutcome
from runner.training.signals import AHEAD, ENDS, Terminated, raised, unclaimed

PRELOAD = ["runner.distributed.preload"]  # imports torch once for all processes
POLL_S = 0.2
RECORD_S = 5.0  # for a process to exit after its grace period
SAVE_S = 30.0  # at least, for a final checkpoint
REPEAT_S = 6.0  # after which a signal is sent again, which ends a process's wait for data
ABORT_S = 1.0  # for a hung process to write its stacks
END_S = 5.0  # to exit, if another rank has timed out already or not all have started to train
LOST = 255  # exit code in multiprocessing of a process whose fork server was lost
GONE_S = 10.0  # for a killed process to disappear
CLOSE_S = 1.0  # from the end of a fork server's pipes to its exit

accept_signals = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, ENDS)
refuse_signals = partial(signal.pthread_sigmask, signal.SIG_BLOCK, ENDS)


class Agent:
    """Starts processes and waits until all have ended; kills those that hang."""

    def __init__(
        self,
        meeting: Path,
        timeout_s: float,
        grace_s: float,
        exchange: Callable[[bool], bool] = bool,
    ) -> None:
        """`meeting` is the folder of the outcomes; `grace_s` is the time to end after a signal.

        `exchange` is polled with whether a process of this machine has failed, and returns whether
        one has on any machine.
        """
        self.meeting, self.timeout_s, self.grace_s = meeting, timeout_s, grace_s
        self.exchange = exchange
        self.processes: dict[int, ForkServerProcess] = {}  # by rank
        self.received: int | None = None  # signal sent to this process
        self.killed: dict[int, float] = {}  # hung ranks, and when each was sent SIGABRT
        self.server_lost = False  # the fork server has ended, and its processes with it
        self._signalled = self._failed = 0.0  # times of first signal and failure; 0: none
        self._repeated = False
        self._ending: dict[int, float] = {}  # when each rank's final outcome was first seen

    def run(self, start: Callable[..., None], arguments: Mapping[int, tuple[Any, ...]]) -> None:
        """Run `start(*arguments[rank])` in one process per rank; returns when all have ended."""
        context = multiprocessing.get_context("forkserver")
        if raised:
            raise Terminated(raised[0])
        with self._signals():
            try:
                resource_tracker.ensure_running()  # first, since its start unblocks signals
                with _no_signals():  # nor in the fork server, and what it starts
                    fork_server.start(PRELOAD, os.environ)
                    for rank, own in arguments.items():
                        self.processes[rank] = context.Process(target=start, args=own)
                        self._start(self.processes[rank])
                while (alive := self._alive()) and not self.server_lost:
                    wait([process.sentinel for process in alive.values()], POLL_S)
                    self._end_hung()
                    self.server_lost = self._has_lost_server()
            finally:
                self._send(signal.SIGKILL)
        if self.server_lost:
            self._end_all()

    def codes(self) -> dict[int, int]:
        """Return exit codes by rank: negative for a signal, LOST if never started."""
        missing = LOST if self.server_lost else 0
        pairs = self.processes.items()
        return {rank: (p.exitcode or 0) if p.pid else missing for rank, p in pairs}

    def report(self, names: Mapping[int, str]) -> MachineReport:
        """Return how each process ended; `names` are the processes' names in messages, by rank."""
        codes, outcomes = self.codes(), self.outcomes()
        ends = [
            RankEnd(rank, name, codes[rank], rank in self.killed, outcomes.get(rank))
            for rank, name in names.items()
        ]
        failed = self.server_lost and any(codes.values())
        problem = "the fork server was killed, and the processes with it" if failed else ""
        return MachineReport(ends, self.received or 0, problem)

    def outcomes(self) -> dict[int, RankOutcome]:
        """Return the outcomes that processes have written so far, by rank."""
        read = {rank: RankOutcome.read(self.meeting, rank) for rank in self.processes}
        return {rank: outcome for rank, outcome in read.items() if outcome is not None}

    def _start(self, process: ForkServerProcess) -> None:
        try:
            if not self.server_lost:
                process.start()
        except (OSError, EOFError):
            if fork_server.is_running():
                raise
            self.server_lost = True

    def _has_lost_server(self) -> bool:
        """Whether the fork server has ended: its pipes close before it can be waited for."""
        unknown = any(p.exitcode == LOST for p in self.processes.values() if p.pid)
        until = time.monotonic() + (CLOSE_S if unknown else 0.0)
        while (running := fork_server.is_running()) and time.monotonic() < until:
            time.sleep(POLL_S / 10)
        return not running

    def _end_all(self) -> None:
        """Kill every process: without the fork server their ends are not reported."""
        pids = [process.pid for process in self.processes.values() if process.pid]
        left = [process for process in psutil.process_iter() if process.pid in pids]
        self._send(signal.SIGKILL, self.processes.values())
        psutil.wait_procs(left, GONE_S)

    def _alive(self) -> dict[int, ForkServerProcess]:
        return {rank: p for rank, p in self.processes.items() if p.pid and p.exitcode is None}

    def _end_hung(self) -> None:
        now = time.monotonic()
        failed = self.exchange(any(self.codes().values()))
        if failed and not self._failed:
            self._failed = now
        if not (self._failed or self._signalled):
            return
        outcomes = self.outcomes()
        for rank, process in self._alive().items():
            if rank not in self.killed and now > self._limit(rank, outcomes):
                self.killed[rank] = now
                self._send(signal.SIGABRT, [process])  # writes its stacks
            if rank in self.killed and now > self.killed[rank] + ABORT_S:
                self._send(signal.SIGKILL, [process])
        if self.received and not self._repeated and now > self._signalled + REPEAT_S:
            self._repeated = True
            self._send(self.received)

    def _limit(self, rank: int, outcomes: Mapping[int, RankOutcome]) -> float:
        """Return the time after which a process that has not ended counts as hung."""
        if rank in outcomes and outcomes[rank].kind != "running":  # it may be saving a checkpoint
            since = self._ending.setdefault(rank, time.monotonic())
            return since + max(self.timeout_s, SAVE_S)
        limits = [self._signalled + self.grace_s + RECORD_S] if self._signalled else []
        if self._failed:
            waited = any(outcome.kind == "hung" for outcome in outcomes.values())
            trained = len(outcomes) == len(self.processes)
            patience = self.timeout_s if trained and not waited else END_S
            limits.append(self._failed + patience)
        return min(limits)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Forward each terminating signal to the processes; a second one kills them."""
        numbers = {int(signal.SIGINT), *unclaimed()}
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = self.received is not None and not {number, self.received} & {*AHEAD}
        if self.received is None or number not in AHEAD:
            self.received = number
        self._signalled = self._signalled or time.monotonic()
        self._send(signal.SIGKILL if again else number)

    def _send(self, number: int, to: Iterable[ForkServerProcess] | None = None) -> None:
        for process in self._alive().values() if to is None else to:
            with suppress(ProcessLookupError):
                if process.pid:
                    os.kill(process.pid, number)


@contextmanager
def _no_signals() -> Iterator[None]:
    before = refuse_signals()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
