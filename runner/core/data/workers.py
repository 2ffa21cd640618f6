"""Worker processes that prefetch batches.

torch's DataLoader is not used: a dead worker raises in the main process at any point, even during
an optimizer step; an exception that cannot be pickled hangs it; and shutdown waits 5 s for each
busy worker. Here each worker has its own socket, so a killed one holds no lock, and waiting for a
batch also watches for the death of its worker. A dead or hung worker is replaced: its batches are a
pure function of their keys.

A batch lies in anonymous shared memory, and the message carries its file descriptor. torch's queues
send a handle, with which the receiver fetches the descriptor from the sender while unpickling: a
stopped sender hangs it. The memory has no name, so none leaks, and `/dev/shm` is not used.
"""

from __future__ import annotations

import gc
import logging
import mmap
import multiprocessing.util
import os
import signal
import socket
import struct
import tempfile
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.core.device.memory import free_heap
from runner.core.device.signals import END_SIGNALS
from runner.core.errors import DataError, RunnerError, WorkerLost
from runner.core.masking import mask_secrets
from runner.core.process_wait import describe_exit, describe_state, die_with_parent
from runner.core.record.text import summarize_error
from runner.core.security.child_process import ChildProcess, MaskingState, run_masked
from runner.core.security.pickle_transfer import dumps_persistent, loads_persistent

log = logging.getLogger("runner")

REQUEST = struct.Struct("qqq")  # number of the pass, epoch, number of the batch
FREE_MEMORY = REQUEST.pack(-1, 0, 0)  # without a response
RESPONSE = struct.Struct("qqq")  # number of the pass, start of the pickle, bytes in all
ALIGNMENT = 64  # of each storage, as torch allocates
POPULATE = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
WAIT_SLICE_S = 1.0  # of a wait, so that time in suspension does not count as a worker's

Key = tuple[int, int]
"""A batch: (epoch, number in the epoch)."""


@dataclass(frozen=True)
class _Failure:
    """An error in a worker, as text: not every exception can be pickled."""

    message: str
    is_exit: bool = False  # SystemExit, which is a fault of the code and not of the data


class Workers:
    """Pool of `count` worker processes; batches are assigned round-robin, which keeps order."""

    def __init__(
        self,
        fetch: Callable[[Key], Any],
        count: int,
        ahead: int,
        timeout_s: float,
        most_restarts: int = 0,
        freeze_objects: bool = False,
    ) -> None:
        self.fetch, self.count, self.ahead, self.timeout_s = fetch, count, ahead, timeout_s
        # gc.freeze until `close`: GC must not write to shared pages
        self.freeze_objects = freeze_objects
        self.most_restarts, self.restarts = most_restarts, 0
        self.report_lost: Callable[[WorkerLost], None] = lambda error: log.warning("%s", error)
        self.processes: list[ChildProcess] = []
        self.sockets: list[socket.socket] = []
        self.pending: list[deque[Key]] = []  # by worker: batches requested and not yet received
        self.round = 0  # number of the pass; answers to requests of an earlier one are dropped
        self.at_exit: multiprocessing.util.Finalize | None = None
        # applied to each batch in a thread, to the next one while the loop uses the current one
        self.prepare: Callable[[Any], Any] | None = None
        self.executor: ThreadPoolExecutor | None = None
        self.next_prepared: Future[Any] | None = None
        self.requested = self.ready = 0  # batches requested by the loop; those that were ready

    def batches(self, keys: Iterator[Key]) -> Iterator[Any]:
        """Yield the batches of `keys` in order; each worker prefetches up to `ahead`.

        Raises DataError for an exception in a worker, RunnerError for SystemExit, and WorkerLost
        when more workers died or hung than may be replaced. A new call drops batches in flight.
        """
        if not self.processes:
            self._start_all()
        if self.prepare is not None and self.executor is None:
            self.executor = ThreadPoolExecutor(1, "data pinning")
        self.round += 1
        self.next_prepared = None
        for pending in self.pending:
            pending.clear()
        worker_order: deque[int] = deque()  # which workers owe the next batches
        worker = 0
        for key in keys:
            self.pending[worker].append(key)
            self._request(worker, key)
            worker_order.append(worker)
            worker = (worker + 1) % self.count
            in_flight = len(worker_order) + (self.next_prepared is not None)
            if in_flight == self.count * self.ahead:
                yield self._take(worker_order)
        while worker_order or self.next_prepared is not None:
            yield self._take(worker_order)

    def _take(self, worker_order: deque[int]) -> Any:
        """Return the next batch, and prepare the one after it if that has arrived."""
        if self.executor is None or self.prepare is None:
            return self._receive(worker_order.popleft())
        submit = partial(self.executor.submit, self.prepare)  # type: ignore[call-arg]
        current = self.next_prepared or self._prepare(worker_order.popleft(), submit)
        self.next_prepared = None
        if worker_order and wait([self.sockets[worker_order[0]]], 0):
            self.next_prepared = self._prepare(worker_order.popleft(), submit)
        return current.result()

    def _prepare(self, worker: int, submit: Callable[[Any], Future[Any]]) -> Future[Any]:
        """Receive a batch and prepare it in the thread; its error is raised when its turn comes."""
        try:
            return submit(self._receive(worker))
        except RunnerError as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def free_memory(self) -> int:
        """Ask workers to free memory after the batches they owe; return their number."""
        for worker in range(len(self.sockets)):
            self._send(worker, FREE_MEMORY)
        return self.count * self.ahead

    def close(self) -> None:
        """Kill every worker; they have no state to save."""
        if self.executor is not None:
            self.executor.shutdown()
            self.executor = self.next_prepared = None
        if self.at_exit is not None:
            self.at_exit()
            self.at_exit = None
        self.processes, self.sockets, self.pending = [], [], []

    def _start_all(self) -> None:
        if frozen := self.freeze_objects and not gc.get_freeze_count():
            gc.freeze()
        resources = (self.processes, self.sockets, frozen, os.getpid())
        # before the interpreter's own clean-up, which sends SIGTERM and waits: workers ignore it
        self.at_exit = multiprocessing.util.Finalize(self, _kill, args=resources, exitpriority=100)
        for number in range(self.count):
            self.pending.append(deque())
            self._start(number)

    def _start(self, number: int) -> None:
        context = multiprocessing.get_context()
        local_end, worker_end = socket.socketpair()
        local_end.settimeout(self.timeout_s)  # a blocked send means a hung worker
        work = (_serve, worker_end, self.fetch, os.getpid())
        handle: Any = context.Process(target=run_masked, args=(MaskingState(), *work), daemon=True)
        handle.name = f"data worker {number}"
        process = ChildProcess(handle)
        # before the start, so that `close` finds both if this is interrupted
        self.processes[number : number + 1] = [process]
        self.sockets[number : number + 1] = [local_end]
        # a signal between fork and the worker's first line would run our handler in the worker
        before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of forking with threads; a worker uses none of theirs
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
        finally:
            worker_end.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _request(self, worker: int, key: Key) -> None:
        self._send(worker, REQUEST.pack(self.round, *key))

    def _send(self, worker: int, request: bytes) -> None:
        """Send a request. A dead worker is noticed when a batch is received."""
        try:
            self.sockets[worker].sendall(request)
        except OSError as error:
            log.debug("data worker %d: no request sent: %s", worker, error)

    def _receive(self, worker: int) -> Any:
        """Return the next batch that `worker` owes, replacing the worker if it is lost."""
        self.requested += 1
        self.ready += bool(wait([self.sockets[worker]], 0))
        while True:
            try:
                request_round, result = self._read_response(worker)
            except WorkerLost as lost:
                self._replace(worker, lost)
                continue
            if request_round != self.round:
                continue  # requested in an earlier pass
            self.pending[worker].popleft()
            if isinstance(result, _Failure):
                raise (RunnerError if result.is_exit else DataError)(result.message)
            return result

    def _read_response(self, worker: int) -> tuple[int, Any]:
        connection, process = self.sockets[worker], self.processes[worker]
        waited = 0.0
        # the host waits here; signal handlers that raise interrupt it
        while not (
            ready := wait(
                [connection, process.handle.sentinel], min(WAIT_SLICE_S, self.timeout_s - waited)
            )
        ):
            waited += WAIT_SLICE_S
            if waited >= self.timeout_s:
                raise self._hang_error(worker)
        try:
            if connection not in ready:
                raise EOFError
            return receive_batch(connection)
        except (EOFError, OSError):
            raise self._death_error(worker) from None

    def _replace(self, worker: int, lost: WorkerLost) -> None:
        """Replace a lost worker, and request again the batches that it owed."""
        if self.restarts >= self.most_restarts:
            limit = f"data.worker_restarts={self.most_restarts}"
            raise WorkerLost(f"{lost}; {limit} is reached: raise it")
        self.restarts += 1
        self.report_lost(lost)
        self.processes[worker].end()
        self.processes[worker].handle.close()
        self.sockets[worker].close()
        self._start(worker)
        for key in self.pending[worker]:
            self._request(worker, key)

    def _death_error(self, worker: int) -> WorkerLost:
        process = self.processes[worker]
        code = process.wait(1.0)
        hint = " (possibly low memory)" if code == -signal.SIGKILL else ""
        cause = f"{process.handle.name} {describe_exit(code)}{hint}"
        return WorkerLost(f"{cause} while fetching {self._next_batch(worker)}")

    def _hang_error(self, worker: int) -> WorkerLost:
        process = self.processes[worker]
        symptom = f"did not respond for data.timeout_s={self.timeout_s:g} s while fetching"
        name = f"{process.handle.name}{describe_state(process.pid)}"
        return WorkerLost(f"{name} {symptom} {self._next_batch(worker)}")

    def _next_batch(self, worker: int) -> str:
        epoch, number = self.pending[worker][0]
        return f"batch {number} of epoch {epoch}"


def _kill(
    processes: list[ChildProcess], sockets: list[socket.socket], frozen: bool, owner: int
) -> None:
    if os.getpid() != owner:
        return
    if frozen:
        gc.unfreeze()
    started = [process for process in processes if process.pid]
    for process in started:
        process.kill()
    for process in started:
        process.wait()
        process.handle.close()
    for connection in sockets:
        connection.close()


def _serve(connection: socket.socket, fetch: Callable[[Key], Any], parent: int) -> None:
    """Answer each request with a batch, until the parent is gone."""
    # signals may go to the whole process group; the main process decides what they mean
    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
    die_with_parent(parent)  # on other systems the closed socket ends it, after this batch
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork; cores have workers
    while True:
        try:
            request = connection.recv(REQUEST.size, socket.MSG_WAITALL)
        except OSError:
            return
        if len(request) < REQUEST.size:
            return
        if request == FREE_MEMORY:
            free_heap()
            continue
        request_round, *numbers = REQUEST.unpack(request)
        key = (numbers[0], numbers[1])
        result: Any
        try:
            result = fetch(key)
        except RunnerError as error:
            result = _Failure(str(error))
        except BaseException as error:  # also StopIteration and SystemExit: no batch may be lost
            result = _failure(error, key)
        try:
            send_batch(connection, request_round, result)
        except (BrokenPipeError, ConnectionError):
            return  # the parent is gone
        except Exception as error:
            send_batch(connection, request_round, _failure(error, key))


def _failure(error: BaseException, key: Key) -> _Failure:
    trace = mask_secrets("".join(traceback.format_exception(error)))[-20_000:]
    hint = "; data.workers=0 avoids it" if "shared memory" in str(error) else ""
    text = f"data: batch {key[1]} of epoch {key[0]}: {summarize_error(error)}{hint}\n{trace}"
    return _Failure(text, isinstance(error, SystemExit))


class _View(NamedTuple):
    """Placeholder of a tensor in the pickle: a view into the shared memory."""

    start: int
    nbytes: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def send_batch(to: socket.socket, number: int, value: Any) -> None:
    """Copy a nest of tensors to shared memory and send it. Raises OSError and pickling errors."""
    storages: dict[int, tuple[int, Tensor]] = {}  # by address: offset in the memory, bytes
    end = 0

    def outline(part: Any) -> _View | None:
        nonlocal end
        if type(part) is not Tensor or not _is_dense(part):
            return None  # pickled as it is
        storage = part.untyped_storage()
        address = storage.data_ptr()
        if address not in storages:
            storages[address] = end, torch.empty(0, dtype=torch.uint8).set_(storage)
            end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        start, bytes_ = storages[address]
        offset, stride = int(part.storage_offset()), part.stride()
        return _View(start, bytes_.numel(), part.dtype, offset, tuple(part.shape), stride)

    pickled = dumps_persistent(value, outline)
    memory = _anonymous_file()
    try:
        for start, bytes_ in storages.values():
            _write(memory, bytes_.numpy(), start)
        _write(memory, pickled, end)
        header = RESPONSE.pack(number, end, end + len(pickled))
        socket.send_fds(to, [header], [memory])
    finally:
        os.close(memory)


def receive_batch(source: socket.socket) -> tuple[int, Any]:
    """Receive a message; return pass number and value. EOFError if the sender is gone."""
    header, descriptors, _, _ = socket.recv_fds(source, RESPONSE.size, 1)
    if len(header) < RESPONSE.size or not descriptors:
        raise EOFError
    number, start, end = RESPONSE.unpack(header)
    try:
        memory = mmap.mmap(descriptors[0], end, POPULATE)
    finally:
        os.close(descriptors[0])
    storages: dict[int, torch.UntypedStorage] = {}

    def fill(view: _View) -> Tensor:
        tensor = torch.empty(0, dtype=view.dtype)
        if not view.nbytes:
            return tensor.as_strided(view.size, view.stride)
        if view.start not in storages:
            raw = torch.frombuffer(memory, dtype=torch.uint8, count=view.nbytes, offset=view.start)
            storages[view.start] = raw.untyped_storage()
        return tensor.set_(storages[view.start], view.offset, view.size, view.stride)

    value = loads_persistent(memory[start:end], fill)
    # torch.load's list would keep the sparse tensors of every batch alive
    getattr(torch._utils, "_sparse_tensors_to_validate", []).clear()
    return number, value


def _is_dense(tensor: Tensor) -> bool:
    dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
    is_special = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return dense and not is_special


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("batch")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write(file: int, values: Any, offset: int) -> None:
    remaining = memoryview(values)
    while remaining:
        count = os.pwrite(file, remaining, offset)
        remaining, offset = remaining[count:], offset + count
