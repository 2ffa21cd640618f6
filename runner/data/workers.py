"""Processes that fetch batches ahead of the loop.

Not torch's DataLoader: when a worker of that dies, it raises in the main process wherever that
happens to be, also in the middle of an update; an exception that cannot be pickled hangs it; and
leaving it waits 5 s for each busy worker. Here each worker has a pipe of its own, so that a killed
one holds no lock, and a batch is waited for together with the death of the process that owes it.
"""

from __future__ import annotations

import ctypes
import multiprocessing.util
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing  # teaches pipes to send tensors through shared memory

from runner.data.batch import Batch
from runner.errors import DataError, RunnerError
from runner.training.signals import ENDS

Key = tuple[int, int]
"""Which batch: epoch, and number in the epoch."""


@dataclass(frozen=True)
class _Failure:
    """What went wrong in a worker, as text: an exception may not survive a pipe."""

    message: str


class Workers:
    """`count` processes; batch after batch goes to the next one, so order is theirs by turns."""

    def __init__(
        self, fetch: Callable[[Key], Batch], count: int, ahead: int, timeout_s: float
    ) -> None:
        self.fetch, self.count, self.ahead, self.timeout_s = fetch, count, ahead, timeout_s
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        self.round = 0  # tells what was asked for before a restart from what was asked after
        self.at_exit: multiprocessing.util.Finalize | None = None
        self.asked = self.ready = 0  # batches the loop asked for; those that were fetched by then

    def batches(self, keys: Iterator[Key]) -> Iterator[Batch]:
        """The batches of these keys, in their order; each worker prepares up to `ahead`.

        Raises DataError for any failure in a worker. Another call drops batches still in flight.
        """
        if not self.processes:
            self._start()
        self.round += 1
        owed: deque[tuple[int, Key]] = deque()  # which worker, which batch
        worker = 0
        for key in keys:
            self._ask(worker, key)
            owed.append((worker, key))
            worker = (worker + 1) % self.count
            if len(owed) == self.count * self.ahead:
                yield self._receive(*owed.popleft())
        while owed:
            yield self._receive(*owed.popleft())

    def close(self) -> None:
        """Kill every worker. They hold nothing that a clean end would save."""
        if self.at_exit is not None:
            self.at_exit()
            self.at_exit = None
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []

    def _start(self) -> None:
        context = torch.multiprocessing.get_context()
        # before the interpreter's own clean-up, which sends SIGTERM and waits: workers ignore it
        self.at_exit = multiprocessing.util.Finalize(
            self, _kill, args=(self.processes, os.getpid()), exitpriority=100
        )
        # a signal between fork and the worker's first line would run our handler in the worker
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        try:
            for number in range(self.count):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(theirs, self.fetch, os.getpid()),
                    name=f"data worker {number}",
                    daemon=True,
                )
                self.processes.append(process)  # first, so that nothing is left if cut short
                self.pipes.append(ours)
                with warnings.catch_warnings():
                    # Python 3.12 warns of forking with threads; a worker uses none of theirs
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                theirs.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _ask(self, worker: int, key: Key) -> None:
        try:
            self.pipes[worker].send((self.round, key))
        except OSError:
            raise self._dead(worker, key) from None

    def _receive(self, worker: int, key: Key) -> Batch:
        pipe, process = self.pipes[worker], self.processes[worker]
        self.asked += 1
        self.ready += pipe.poll()
        while True:
            # the host waits here; a signal handler that raises is not held up
            ready = wait([pipe, process.sentinel], self.timeout_s)
            if not ready:
                raise DataError(
                    f"{process.name} has said nothing for {self.timeout_s:g} s while it fetched "
                    f"batch {key[1]} of epoch {key[0]}; raise data.timeout_s if that is too short"
                )
            try:
                if pipe not in ready:
                    raise EOFError
                asked_in, result = pipe.recv()
            except (EOFError, OSError):
                raise self._dead(worker, key) from None
            if asked_in != self.round:
                continue  # asked for before a restart
            if isinstance(result, _Failure):
                raise DataError(result.message)
            batch: Batch = result
            return batch

    def _dead(self, worker: int, key: Key) -> DataError:
        process = self.processes[worker]
        process.join(1.0)
        code = process.exitcode
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name} (as when memory is short)"
        return DataError(f"{process.name} {how} while it fetched batch {key[1]} of epoch {key[0]}")


def _kill(processes: list[Any], owner: int) -> None:
    if os.getpid() != owner:
        return
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join()
        process.close()


def _serve(pipe: Connection, fetch: Callable[[Key], Batch], parent: int) -> None:
    """Answer each key with a batch, until the other side is gone."""
    # signals may go to the whole process group; the main process decides what they mean
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
    _die_with_parent(parent)
    torch.set_num_threads(1)  # OpenMP's threads did not survive the fork, and cores have workers
    while True:
        try:
            asked_in, key = pipe.recv()
        except (EOFError, OSError):
            return
        result: Batch | _Failure
        try:
            result = fetch(key)
        except RunnerError as error:
            result = _Failure(str(error))
        except BaseException as error:  # StopIteration and SystemExit too: no batch may be lost
            result = _failure(error, key)
        try:
            pipe.send((asked_in, result))
        except OSError:
            return  # the parent is gone
        except Exception as error:
            pipe.send((asked_in, _failure(error, key)))


def _failure(error: BaseException, key: Key) -> _Failure:
    trace = "".join(traceback.format_exception(error))[-20_000:]
    hint = "; data.workers=0 needs none" if "shared memory" in str(error) else ""
    return _Failure(
        f"data: batch {key[1]} of epoch {key[0]}: {type(error).__name__}: {error}{hint}\n{trace}"
    )


def _die_with_parent(parent: int) -> None:
    """On Linux, be killed when the parent is, however that ends."""
    if sys.platform != "linux":
        return  # there the pipe's end tells, once the batch in hand is done
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        os._exit(1)
