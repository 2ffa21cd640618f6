"""Start the processes of a run on this machine, monitor them, and end all of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any

from runner.core import fork_server
from runner.core.device.signals import (
    ADVANCE_SIGNALS,
    END_SIGNALS,
    Terminated,
    raise_received,
    unclaimed_signals,
)
from runner.core.errors import ProcessLost
from runner.core.process_wait import STOPPED, PolledClock, describe_state, process_state
from runner.core.security.child_process import ChildProcess, MaskingState, run_masked
from runner.scale.distributed.outcome import LOST_KINDS, RankEnd, RankOutcome, RunVerdict, judge

PRELOAD = ["runner.scale.distributed.preload"]  # imports torch once for all processes
POLL_S = 0.2
RECORD_S = 5.0  # for a process to end after its grace period
SAVE_S = 30.0  # minimum time for a final checkpoint
SIGNAL_REPEAT_S = 6.0  # after which a signal is repeated; then a process no longer waits for data
ABORT_S = 1.0  # for a hung process to write its stacks
END_S = 5.0  # after others have waited a full timeout, or if not all processes trained
EARLY_END_S = 0.5  # to end after a signal before training: a library may have swallowed it

unblock_signals = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, END_SIGNALS)
block_signals = partial(signal.pthread_sigmask, signal.SIG_BLOCK, END_SIGNALS)


class Agent:
    """Starts processes and waits for all of them; a hung process cannot delay the end."""

    def __init__(
        self,
        outcome_folder: Path,
        timeout_s: float,
        grace_s: float,
        uses_nccl: bool = False,
        start_s: float = fork_server.START_S,
        trains: Callable[[], bool] = lambda: True,
    ) -> None:
        """`outcome_folder` is the folder in which processes write their outcomes.

        A process has `grace_s` to end after a signal; before training (`trains`) it saves nothing.
        With `uses_nccl`, processes that remain may wait for their device forever, and have nothing
        to save. The fork server has `start_s` for its imports.
        """
        self.uses_nccl, self.start_s, self.trains = uses_nccl, start_s, trains
        self.outcome_folder, self.timeout_s, self.grace_s = outcome_folder, timeout_s, grace_s
        self.processes: dict[int, ChildProcess] = {}  # by rank
        self.received_signal: int | None = None  # the signal that this process received
        self.aborted_at: dict[int, float] = {}  # rank → time at which it was aborted as hung
        self.server_lost = False  # the fork server has ended; its children die with it
        self.problem = ""  # of the fork server or of stopped processes
        self._clock = PolledClock()
        # of the first signal; of the first failure
        self._signal_time: float | None = None
        self._failure_time: float | None = None
        self._signal_repeated = False
        self._ending_since: dict[int, float] = {}  # rank → time at which its outcome was seen

    def run(self, start: Callable[..., None], arguments: Mapping[int, tuple[Any, ...]]) -> None:
        """Run `start(*arguments[rank])` in a process per rank; return when all have ended."""
        context = multiprocessing.get_context("forkserver")
        raise_received()
        with self._forward_signals():
            try:
                resource_tracker.ensure_running()  # starting it unblocks signals
                with _signals_blocked():  # nor in the fork server, and what it starts
                    fork_server.start(PRELOAD, os.environ)
                for rank, args in arguments.items():
                    args = (MaskingState(), start, *args)
                    handle = context.Process(target=run_masked, args=args)
                    self.processes[rank] = ChildProcess(handle, forked=True)
                    self._start_process(self.processes[rank])
                    if self.received_signal is not None:  # no process has begun to train
                        raise Terminated(self.received_signal)
                self._clock = PolledClock()  # not polled until here
                while (alive := self._alive_processes()) and not self.server_lost:
                    wait([process.handle.sentinel for process in alive.values()], POLL_S)
                    self._clock.poll()
                    self._end_stopped(alive)
                    self._abort_hung()
                    self.server_lost = self._server_has_ended()
            finally:
                for process in self._alive_processes().values():
                    process.kill()
        if self.server_lost:
            for process in self.processes.values():
                process.end()

    @property
    def stopped_s(self) -> float:
        """For how long this process was stopped, if long enough for others to give up their waits.

        Collectives of torch count the time of the clock.
        """
        gap_s = self._clock.longest_gap_s
        return gap_s if gap_s > self.timeout_s / 2 else 0.0

    def verdict(self, names: Mapping[int, str]) -> RunVerdict:
        """Return how the run ends; `names` of the processes by rank are used in messages."""
        outcomes, pairs = self.outcomes(), self.processes.items()
        not_started = fork_server.SERVER_LOST if self.server_lost else 0
        codes = {rank: (p.exit_code or 0) if p.pid else not_started for rank, p in pairs}
        if self.server_lost:  # a process that was done had only its exit code to report
            codes |= {rank: 0 for rank, outcome in outcomes.items() if outcome.kind == "done"}
        aborted = self.aborted_at
        ends = [RankEnd(r, x, codes[r], r in aborted, outcomes.get(r)) for r, x in names.items()]
        killed = self.server_lost and any(end.code for end in ends)
        problem = "the fork server was killed, and the processes with it" if killed else ""
        return judge(ends, self.received_signal or 0, self.problem or problem)

    def outcomes(self) -> dict[int, RankOutcome]:
        """Return the outcomes that processes have written so far, by rank."""
        outcomes = {rank: RankOutcome.read(self.outcome_folder, rank) for rank in self.processes}
        return {rank: outcome for rank, outcome in outcomes.items() if outcome is not None}

    def _start_process(self, process: ChildProcess) -> None:
        try:
            if not self.server_lost:
                process.start(self.start_s, lambda: self.received_signal is not None)
        except ProcessLost as lost:
            self.server_lost, self.problem = True, str(lost)

    def _server_has_ended(self) -> bool:
        """Whether the fork server has ended; its pipes close shortly before its exit."""
        lost = [p for p in self.processes.values() if p.exit_code == fork_server.SERVER_LOST]
        return fork_server.has_ended(fork_server.PIPE_CLOSE_S if lost else 0.0)

    def _end_stopped(self, alive: Mapping[int, ChildProcess]) -> None:
        """Kill processes all stopped for `timeout_s`; one that runs notices the others."""
        for process in alive.values():
            process.poll()
            self.problem = self.problem or process.problem
        if self.problem or self._failure_time is not None:  # `_abort_hung` ends the others
            return
        if any(p.stopped_s <= self.timeout_s for p in alive.values()):
            return
        names = ", ".join(f"{rank}{describe_state(p.pid)}" for rank, p in alive.items())
        limit = f"distributed.timeout_s={self.timeout_s:g} s"
        self.problem = f"all processes were stopped for {limit}: {names}"
        for process in alive.values():
            process.kill()
        if process_state(fork_server.server_pid() or 0) == STOPPED:
            fork_server.kill()

    def _alive_processes(self) -> dict[int, ChildProcess]:
        return {rank: p for rank, p in self.processes.items() if p.pid and p.exit_code is None}

    def _abort_hung(self) -> None:
        now = self._clock.seconds
        if self._failure_time is None and any(end.failed for end in self._ends()):
            self._failure_time = now
        if self._failure_time is None and self._signal_time is None:
            return
        if self._signal_time is not None and now > self._signal_time + EARLY_END_S:
            if not self.trains():
                self._send_signal(signal.SIGKILL)
        outcomes = self.outcomes()
        for rank, process in self._alive_processes().items():
            if rank not in self.aborted_at and now > self._hang_deadline(rank, outcomes):
                self.aborted_at[rank] = now
                process.send_signal(signal.SIGABRT)  # it writes its stacks
            if now > self.aborted_at.get(rank, now) + ABORT_S:
                process.kill()
        overdue = now > (self._signal_time or 0.0) + SIGNAL_REPEAT_S
        if self.received_signal and not self._signal_repeated and overdue:
            self._signal_repeated = True
            self._send_signal(self.received_signal)

    def _hang_deadline(self, rank: int, outcomes: Mapping[int, RankOutcome]) -> float:
        """Return the time at which a process that has not ended counts as hung."""
        stalls = self.uses_nccl and rank in outcomes and outcomes[rank].kind in LOST_KINDS
        if rank in outcomes and outcomes[rank].kind != "running" and not stalls:
            # it may be saving a checkpoint
            since = self._ending_since.setdefault(rank, self._clock.seconds)
            return since + max(self.timeout_s, SAVE_S)
        limits = []
        if self._signal_time is not None:
            limits.append(self._signal_time + self.grace_s + RECORD_S)
        if self._failure_time is not None:
            another_hung = any(outcome.kind == "hung" for outcome in outcomes.values())
            all_trained = len(outcomes) == len(self.processes)
            wait_s = self.timeout_s if all_trained and not another_hung else END_S
            if self.uses_nccl:  # after an error of its own a process reports it, and may save
                wait_s = min(wait_s, END_S if self._has_silent_failure(outcomes) else SAVE_S)
            limits.append(self._failure_time + wait_s)
        return min(limits)

    def _has_silent_failure(self, outcomes: Mapping[int, RankOutcome]) -> bool:
        """Whether a process was killed, or noticed that another one was."""
        silent, failed = ("running", *LOST_KINDS), (end.rank for end in self._ends() if end.failed)
        return any(rank not in outcomes or outcomes[rank].kind in silent for rank in failed)

    def _ends(self) -> list[RankEnd]:
        """Return how the processes that have ended so far did so."""
        codes = {rank: p.exit_code for rank, p in self.processes.items() if p.pid}
        folder, ended = self.outcome_folder, {r: x for r, x in codes.items() if x is not None}
        return [RankEnd(r, "", x, outcome=RankOutcome.read(folder, r)) for r, x in ended.items()]

    @contextmanager
    def _forward_signals(self) -> Iterator[None]:
        """Forward signals that end a run; a second one kills all processes."""
        numbers = {int(signal.SIGINT), *unclaimed_signals()}
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first = self.received_signal
        is_repeat = first is not None and not {number, first} & {*ADVANCE_SIGNALS}
        if first is None or number not in ADVANCE_SIGNALS:
            self.received_signal = number
        self._signal_time = self._clock.seconds if self._signal_time is None else self._signal_time
        self._send_signal(signal.SIGKILL if is_repeat else number)

    def _send_signal(self, number: int) -> None:
        for process in self._alive_processes().values():
            process.send_signal(number)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    before = block_signals()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
