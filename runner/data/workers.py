"""Processes that fetch batches ahead of the loop.

Not torch's DataLoader: when a worker of that dies, it raises in the main process wherever that
happens to be, also in the middle of an update; an exception that cannot be pickled hangs it; and
leaving it waits 5 s for each busy worker. Here each worker has a socket of its own, so that a
killed one holds no lock, and a batch is waited for together with the death of the process that owes
it. A worker that died or hangs is replaced: its batches are a pure function of their keys.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing.util
import os
import signal
import socket
import struct
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from runner.data import shared_batch
from runner.errors import DataError, RunnerError, WorkerLost
from runner.parent_death import die_with_parent
from runner.training.signals import ENDS

log = logging.getLogger("runner")

REQUEST = struct.Struct("qqq")  # number of the pass, epoch, number of the batch
SLICE_S = 1.0  # of a wait: a machine that was suspended does not make a worker late
STACK_S = 1.0  # until a worker that hangs has written its stack
ASKS_STACK = getattr(signal, "SIGUSR2", None)
STATES = {
    "T": ", stopped by a signal",
    "D": ", waiting for a device or a mount that does not answer",
}
"""What /proc/PID/stat says of processes that stand still."""

Key = tuple[int, int]
"""Which batch: epoch, and number in the epoch."""


@dataclass(frozen=True)
class _Failure:
    """What went wrong in a worker, as text: an exception may not survive a pipe."""

    message: str


class Workers:
    """`count` processes; batch after batch goes to the next one, so order is theirs by turns."""

    def __init__(
        self,
        fetch: Callable[[Key], Any],
        count: int,
        ahead: int,
        timeout_s: float,
        most_restarts: int = 0,
        share: bool = False,
    ) -> None:
        self.fetch, self.count, self.ahead, self.timeout_s = fetch, count, ahead, timeout_s
        self.share = share  # until `close` no collection writes to what workers share with us
        self.most_restarts, self.restarts = most_restarts, 0
        self.report_lost: Callable[[WorkerLost], None] = lambda error: log.warning("%s", error)
        self.processes: list[Any] = []
        self.sockets: list[socket.socket] = []
        self.owed: list[deque[Key]] = []  # by worker: batches it was asked for
        self.round = 0  # tells what was asked for before a restart from what was asked after
        self.at_exit: multiprocessing.util.Finalize | None = None
        self.asked = self.ready = 0  # batches the loop asked for; those that were fetched by then
        self.stack = -1  # a file without a name, in which a worker that hangs writes where

    def batches(self, keys: Iterator[Key]) -> Iterator[Any]:
        """The batches of these keys, in their order; each worker prepares up to `ahead`.

        Raises DataError for an exception in a worker, and WorkerLost when more of them died or hung
        than are replaced. Another call drops batches still in flight.
        """
        if not self.processes:
            self._start_all()
        self.round += 1
        for owed in self.owed:
            owed.clear()
        turns: deque[int] = deque()  # which workers owe the next batches
        worker = 0
        for key in keys:
            self.owed[worker].append(key)
            self._ask(worker, key)
            turns.append(worker)
            worker = (worker + 1) % self.count
            if len(turns) == self.count * self.ahead:
                yield self._receive(turns.popleft())
        while turns:
            yield self._receive(turns.popleft())

    def close(self) -> None:
        """Kill every worker. They hold nothing that a clean end would save."""
        if self.at_exit is not None:
            self.at_exit()
            self.at_exit = None
        self.processes, self.sockets, self.owed, self.stack = [], [], [], -1

    def _start_all(self) -> None:
        if hasattr(os, "memfd_create"):
            self.stack = os.memfd_create("stack")
        if frozen := self.share and not gc.get_freeze_count():
            gc.freeze()
        resources = (self.processes, self.sockets, self.stack, frozen, os.getpid())
        # before the interpreter's own clean-up, which sends SIGTERM and waits: workers ignore it
        self.at_exit = multiprocessing.util.Finalize(self, _kill, args=resources, exitpriority=100)
        for number in range(self.count):
            self.owed.append(deque())
            self._start(number)

    def _start(self, number: int) -> None:
        context = multiprocessing.get_context()
        ours, theirs = socket.socketpair()
        ours.settimeout(self.timeout_s)  # a worker that reads nothing is one that hangs
        arguments = (theirs, self.fetch, os.getpid(), self.stack)
        process: Any = context.Process(target=_serve, args=arguments, daemon=True)
        process.name = f"data worker {number}"
        # before it starts, so that nothing is left if this is cut short
        self.processes[number : number + 1] = [process]
        self.sockets[number : number + 1] = [ours]
        # a signal between fork and the worker's first line would run our handler in the worker
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of forking with threads; a worker uses none of theirs
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _ask(self, worker: int, key: Key) -> None:
        """Ask for that batch. A worker that is gone is noticed when the batch is waited for."""
        try:
            self.sockets[worker].sendall(REQUEST.pack(self.round, *key))
        except OSError as error:
            log.debug("data worker %d was not asked: %s", worker, error)

    def _receive(self, worker: int) -> Any:
        """The next batch that the worker owes, from it or from those that replace it."""
        self.asked += 1
        self.ready += bool(wait([self.sockets[worker]], 0))
        while True:
            try:
                asked_in, result = self._answer(worker)
            except WorkerLost as lost:
                self._replace(worker, lost)
                continue
            if asked_in != self.round:
                continue  # asked for before a restart
            self.owed[worker].popleft()
            if isinstance(result, _Failure):
                raise DataError(result.message)
            return result

    def _answer(self, worker: int) -> tuple[int, Any]:
        end, process = self.sockets[worker], self.processes[worker]
        waited = 0.0
        # the host waits here; a signal handler that raises is not held up
        while not (ready := wait([end, process.sentinel], min(SLICE_S, self.timeout_s - waited))):
            waited += SLICE_S
            if waited >= self.timeout_s:
                raise self._hung(worker)
        try:
            if end not in ready:
                raise EOFError
            return shared_batch.receive(end)
        except (EOFError, OSError):
            raise self._dead(worker) from None

    def _replace(self, worker: int, lost: WorkerLost) -> None:
        """Start another process in its place, which owes what that one did."""
        if self.restarts >= self.most_restarts:
            problem, _, stack = str(lost).partition("\n")
            problem += f"; data.worker_restarts={self.most_restarts} allows no more: raise it"
            raise WorkerLost(problem + ("\n" + stack if stack else ""))
        self.restarts += 1
        self.report_lost(lost)
        self.processes[worker].kill()
        self.processes[worker].join()
        self.processes[worker].close()
        self.sockets[worker].close()
        self._start(worker)
        for key in self.owed[worker]:
            self._ask(worker, key)

    def _dead(self, worker: int) -> WorkerLost:
        process = self.processes[worker]
        process.join(1.0)
        code = process.exitcode
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name} (as when memory is short)"
        return WorkerLost(f"{process.name} {how} while it fetched {self._next_batch(worker)}")

    def _hung(self, worker: int) -> WorkerLost:
        process = self.processes[worker]
        state, stack = _state(process.pid), self._python_stack(process.pid)
        where = stack.splitlines()[1].strip() if stack.count("\n") > 1 else ""
        return WorkerLost(
            f"{process.name} has said nothing for data.timeout_s={self.timeout_s:g} s while it "
            f"fetched {self._next_batch(worker)}{STATES.get(state, '')}"
            + (f" (at {where})\n{stack}" if where else "")
        )

    def _next_batch(self, worker: int) -> str:
        epoch, number = self.owed[worker][0]
        return f"batch {number} of epoch {epoch}"

    def _python_stack(self, pid: int) -> str:
        """Where a worker is, as it writes it itself; "" where it does not within STACK_S."""
        if self.stack < 0 or ASKS_STACK is None:
            return ""
        os.ftruncate(self.stack, 0)
        os.lseek(self.stack, 0, os.SEEK_SET)  # which they share
        os.kill(pid, ASKS_STACK)
        os.kill(pid, signal.SIGCONT)  # one that was stopped takes the signal first
        until, before = time.monotonic() + STACK_S, -1
        while time.monotonic() < until and (size := os.fstat(self.stack).st_size) != before:
            before = size or before
            time.sleep(0.05)
        return os.pread(self.stack, 20_000, 0).decode("utf-8", "replace").strip()


def _state(pid: int) -> str:
    """The letter that Linux has for what a process does; "" elsewhere."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


def _kill(
    processes: list[Any], sockets: list[socket.socket], stack: int, frozen: bool, owner: int
) -> None:
    if os.getpid() != owner:
        return
    if frozen:
        gc.unfreeze()
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join()
        process.close()
    for end in sockets:
        end.close()
    if stack >= 0:
        os.close(stack)


def _serve(end: socket.socket, fetch: Callable[[Key], Any], parent: int, stack: int = -1) -> None:
    """Answer each key with a batch, until the other side is gone."""
    # signals may go to the whole process group; the main process decides what they mean
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)
    if stack >= 0 and ASKS_STACK is not None:
        faulthandler.register(ASKS_STACK, file=stack)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
    die_with_parent(parent)  # elsewhere the pipe's end tells, after this batch
    torch.set_num_threads(1)  # OpenMP's threads did not survive the fork, and cores have workers
    while True:
        try:
            request = end.recv(REQUEST.size, socket.MSG_WAITALL)
        except OSError:
            return
        if len(request) < REQUEST.size:
            return
        asked_in, *numbers = REQUEST.unpack(request)
        key = (numbers[0], numbers[1])
        result: Any
        try:
            result = fetch(key)
        except RunnerError as error:
            result = _Failure(str(error))
        except BaseException as error:  # StopIteration and SystemExit too: no batch may be lost
            result = _failure(error, key)
        try:
            shared_batch.send(end, asked_in, result)
        except (BrokenPipeError, ConnectionError):
            return  # the parent is gone
        except Exception as error:
            shared_batch.send(end, asked_in, _failure(error, key))


def _failure(error: BaseException, key: Key) -> _Failure:
    trace = "".join(traceback.format_exception(error))[-20_000:]
    hint = "; data.workers=0 needs none" if "shared memory" in str(error) else ""
    return _Failure(
        f"data: batch {key[1]} of epoch {key[0]}: {type(error).__name__}: {error}{hint}\n{trace}"
    )
