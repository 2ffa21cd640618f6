"""The sandboxed process: it examines the bytes of foreign files within limits on memory and time.

One process serves all files of a scan: it gets a descriptor of the bytes, and answers with a
format's name and reasons, as text. No tensor comes back: the parent loads the same sealed bytes
once nothing was found. Limits are on memory (Linux), CPU, wall time, new files and processes (but
for root); it is no jail, which is why nothing in a file is ever run there either. There is none on
Windows, where foreign files are refused until they are pinned.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Self

from runner.security.files.file_bytes import FileBytes, map_bytes
from runner.security.files.formats import printable
from runner.security.files.policy import FileLimits
from runner.security.trust import Reason, Severity

START_S = 120.0  # on a busy machine with a cold disk
WALL = 10.0  # wall time to CPU time that a file may take
BYTES_PER_SECOND = 32 << 20  # of CPU, besides limits.cpu_s
HEADER = 8  # bytes of a message's length, before it
ANSWER = 1 << 22  # bytes of an answer
REASONS = 10_000
MOST_DEATHS = 8  # files of one scan that may end the process; the rest is refused unexamined
DESCRIPTORS = 64
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "LD_LIBRARY_PATH")
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from runner.security.files import sandbox; sandbox.serve(int(sys.argv[1]))"
)
WAY_OUT = "get it as safetensors, or look at it on a machine of its own"


class Died(Exception):
    """The process is gone, or must be ended; with the reason that the file is refused for."""

    def __init__(self, code: str, evidence: str) -> None:
        self.code, self.evidence = code, evidence
        super().__init__(evidence)


class Sandbox:
    """A context manager; the process is started by the first file, and ended on exit."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.line: socket.socket | None = None
        self.deaths = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def examine(
        self, data: FileBytes, name: str, limits: FileLimits, deep: bool = True
    ) -> tuple[str, list[Reason]]:
        """Format and reasons. A process that dies, hangs or runs out of memory is a refusal; the
        next file gets a new one.
        """
        if sys.platform == "win32":
            return _refused("sandbox.platform", name, "there is no sandbox on Windows; pin it")
        if self.deaths >= MOST_DEATHS:
            why = f"{self.deaths} files have ended the process that examines them"
            return _refused("sandbox.given_up", name, why)
        try:
            if self.process is None:
                self._start()
            return self._ask(data, name, limits, deep)
        except Died as died:
            self.close()
            self.deaths += 1
            return _refused(died.code, name, died.evidence)
        except BaseException:  # Ctrl-C: its answer must not be read as that for the next file
            self.close()
            raise

    def close(self) -> None:
        """End it at once, with all that it started."""
        process, line, self.process, self.line = self.process, self.line, None, None
        if line is not None:
            line.close()
        if process is not None:
            if process.poll() is None:  # its id is still its own
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _start(self) -> None:
        mine, theirs = socket.socketpair()
        environment = {key: os.environ[key] for key in INHERITED if key in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUTF8": "1"}
        path = json.dumps([place or os.getcwd() for place in sys.path])
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603  # ourselves
                [sys.executable, "-P", "-s", "-c", PROGRAM, str(theirs.fileno()), path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.line = mine
        self._receive(START_S)

    def _ask(
        self, data: FileBytes, name: str, limits: FileLimits, deep: bool
    ) -> tuple[str, list[Reason]]:
        question = {"name": name, "size": data.size, "deep": deep, "limits": asdict(limits)}
        text = json.dumps(question).encode()
        line = self._open_line()
        try:
            socket.send_fds(line, [len(text).to_bytes(HEADER, "big")], [data.descriptor])
            line.sendall(text)
        except OSError:
            raise self._explain_death() from None
        return _read_answer(self._receive(WALL * cpu_seconds(limits, data.size)))

    def _open_line(self) -> socket.socket:
        if self.line is None:
            raise Died("sandbox.died", "the process that examines it is gone")
        return self.line

    def _receive(self, seconds: float) -> Any:
        line, until = self._open_line(), time.monotonic() + seconds

        def read(count: int) -> bytes:
            line.settimeout(max(0.001, until - time.monotonic()))
            return receive_exactly(line, count)

        try:
            count = int.from_bytes(read(HEADER), "big")
            if count > ANSWER:
                raise ValueError
            text = read(count)
            line.settimeout(None)
            return json.loads(text)
        except TimeoutError:
            raise Died("sandbox.timeout", f"examining it took more than {seconds:.1f} s") from None
        except (EOFError, OSError):
            raise self._explain_death() from None
        except ValueError:
            raise Died("sandbox.answer", "the process that examines it sent no JSON") from None

    def _explain_death(self) -> Died:
        code = None
        if self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = self.process.wait(5)
        if code is None or code >= 0:
            return Died("sandbox.died", f"the process that examined it ended with code {code}")
        number = signal.Signals(-code)
        if number is signal.SIGXCPU:
            return Died("sandbox.timeout", "examining it took more CPU time than it may")
        return Died("sandbox.died", f"{number.name} ended the process that examined it")


def cpu_seconds(limits: FileLimits, size: int) -> float:
    """CPU time that examining a file of so many bytes may take."""
    return limits.cpu_s + size / BYTES_PER_SECOND


def _read_answer(answer: Any) -> tuple[str, list[Reason]]:
    """What it said, held to its form: it has parsed foreign bytes."""
    try:
        kind, rows = answer["format"], answer["reasons"]
        if type(kind) is not str or type(rows) is not list or len(rows) > REASONS:
            raise TypeError
        reasons = []
        for code, severity, *texts in rows:
            where, evidence, way_out = (printable(text, 400) for text in texts)
            reason = Reason(printable(code, 60), Severity(severity), where, evidence, way_out)
            reasons.append(reason)
    except (LookupError, TypeError, ValueError):
        raise Died("sandbox.answer", "the process that examined it gave no valid answer") from None
    return printable(kind, 60), reasons


def _refused(code: str, where: str, evidence: str) -> tuple[str, list[Reason]]:
    return "unknown", [Reason(code, Severity.REFUSAL, where, evidence, WAY_OUT)]


# -- in the sandboxed process ------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Examine what comes through the socket until it is closed; a descriptor with each request."""
    line = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the parent decides
    threading.Thread(target=_end_with_parent, args=(descriptor,), daemon=True).start()
    import torch

    from runner.security.files.loading import examine

    torch.set_num_threads(1)
    _limit_once()
    gc.freeze()
    gc.disable()  # it would visit thousands of tensors again and again
    send(line, {"ready": True})
    while True:
        header, descriptors, _, _ = socket.recv_fds(line, HEADER, 1)
        if not header:
            return
        question = json.loads(receive_exactly(line, int.from_bytes(header, "big")))
        limits, size = FileLimits(**question["limits"]), question["size"]
        _limit_file(limits, size)
        data, place = map_bytes(descriptors[0], size), f"/dev/fd/{descriptors[0]}"
        found = examine(data, place, question["name"], limits, deep=question["deep"])
        found.content = None
        rows = [[r.code, int(r.severity), r.where, r.evidence, r.way_out] for r in found.reasons]
        send(line, {"format": found.format, "reasons": rows})
        if isinstance(data, mmap.mmap):
            with suppress(BufferError):
                data.close()
        os.close(descriptors[0])
        del data, found
        gc.collect()


def send(line: socket.socket, message: Any) -> None:
    """One message, its length before it."""
    text = json.dumps(message).encode()
    line.sendall(len(text).to_bytes(HEADER, "big") + text)


def receive_exactly(line: socket.socket, count: int) -> bytes:
    """So many bytes. Raises EOFError where the other end has closed before."""
    received = bytearray()
    while len(received) < count:
        part = line.recv(min(count - len(received), 1 << 20))
        if not part:
            raise EOFError
        received += part
    return bytes(received)


def _limit_once() -> None:
    """No file written, no process begun (the kernel excepts root), few descriptors, no core."""
    import resource  # there is none on Windows

    for name, most in (("FSIZE", 0), ("CORE", 0), ("NOFILE", DESCRIPTORS), ("NPROC", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def _limit_file(limits: FileLimits, size: int) -> None:
    """CPU time and, on Linux, memory, in addition to what is used so far."""
    import resource

    if sys.platform == "linux":  # elsewhere it is not enforced
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        in_use = pages * os.sysconf("SC_PAGE_SIZE")
        _lower(resource.RLIMIT_AS, in_use + 3 * size + limits.memory)
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = used.ru_utime + used.ru_stime
    _lower(resource.RLIMIT_CPU, int(spent + cpu_seconds(limits, size)) + 1)


def _lower(what: int, value: int) -> None:
    import resource

    hard = resource.getrlimit(what)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(what, (value, hard))


def _end_with_parent(descriptor: int) -> None:
    """Wait for the other end to close; costs no CPU."""
    poll = select.poll()
    poll.register(descriptor, 0)  # a hang-up is always reported
    poll.poll()
    os.killpg(0, signal.SIGKILL)
