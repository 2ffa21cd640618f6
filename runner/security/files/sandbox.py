"""A sandboxed process that examines foreign files within limits on memory and time.

One process serves all files of a scan: it receives a path to bytes that the parent holds open and
answers with format and reasons as text. It returns no tensors: the parent loads the same sealed
bytes if they pass. Limited are memory (Linux), CPU, wall time, new files and processes (except
for root). It is no jail, so nothing in a file is executed there either.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Self

from runner.findings import Reason, Severity
from runner.security.files.file_bytes import LINUX, FileBytes, map_bytes
from runner.security.files.formats import printable
from runner.security.files.policy import FileLimits

START_S = 120.0  # on a busy machine with a cold disk
WALL = 10.0  # limit of wall time as a multiple of CPU time
BYTES_PER_SECOND = 32 << 20  # per CPU second, in addition to limits.cpu_s
ANSWER = 1 << 20  # maximum bytes of an answer
REASONS = 1_000
MOST_DEATHS = 8  # crashes per scan, after which files are refused unexamined
DESCRIPTORS = 64
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "LD_LIBRARY_PATH")
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from runner.security.files import sandbox; sandbox.serve()"
)
WAY_OUT = "get it as safetensors, or inspect it on an isolated machine"


class Died(Exception):
    """The process died or has to be killed; with the reason to refuse the file."""

    def __init__(self, code: str, evidence: str) -> None:
        self.code, self.evidence = code, evidence
        super().__init__(evidence)


class Sandbox:
    """A context manager; the process starts with the first file and ends on exit."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.deaths = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def examine(
        self, data: FileBytes, name: str, limits: FileLimits, deep: bool = True
    ) -> tuple[str, list[Reason]]:
        """Return format and reasons. If the process dies, hangs or runs out of memory, the file is
        refused, and the next file gets a new process.
        """
        if self.deaths >= MOST_DEATHS:
            why = f"{self.deaths} files have ended the process that examines them"
            return _refused("sandbox.given_up", name, why)
        place = f"/proc/{os.getpid()}/fd/{data.descriptor}" if LINUX else data.place
        question = {"place": place, "name": name, "deep": deep, "limits": asdict(limits)}
        try:
            if self.process is None:
                self._start()
            return _read_answer(self._ask(question, WALL * cpu_seconds(limits, data.size)))
        except Died as died:
            self.close()
            self.deaths += 1
            return _refused(died.code, name, died.evidence)
        except BaseException:  # Ctrl-C: a late answer must not be read as that of the next file
            self.close()
            raise

    def close(self) -> None:
        """Kill the process and its children."""
        process, self.process = self.process, None
        if process is not None:
            if process.poll() is None:  # its id has not been reused
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # unsent data for a dead process
                    pipe.close()  # type: ignore[union-attr]
            process.wait()

    def _start(self) -> None:
        environment = {key: os.environ[key] for key in INHERITED if key in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUTF8": "1"}
        path = json.dumps([place or os.getcwd() for place in sys.path])
        self.process = subprocess.Popen(  # noqa: S603  # ourselves
            [sys.executable, "-P", "-s", "-c", PROGRAM, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        self._receive(self.process, START_S)

    def _ask(self, question: dict[str, Any], seconds: float) -> Any:
        process = self.process
        if process is None or process.stdin is None:
            raise Died("sandbox.died", "the process that examines it is gone")
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            raise _explain_death(process) from None
        return self._receive(process, seconds)

    def _receive(self, process: subprocess.Popen[bytes], seconds: float) -> Any:
        """Read one line of JSON, for at most `seconds`."""
        pipe, until, text = process.stdout, time.monotonic() + seconds, b""
        assert pipe is not None  # noqa: S101  # as it was started
        while not text.endswith(b"\n"):
            if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                raise Died("sandbox.timeout", f"examining it took more than {seconds:.1f} s")
            part = os.read(pipe.fileno(), ANSWER)
            if not part:
                raise _explain_death(process)
            text += part
            if len(text) > ANSWER:
                raise Died("sandbox.answer", "the process that examines it sent too much")
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise Died("sandbox.answer", "the process that examines it sent no JSON") from None


def _explain_death(process: subprocess.Popen[bytes]) -> Died:
    code = None
    with suppress(subprocess.TimeoutExpired):
        code = process.wait(5)
    if code is None or code >= 0:
        return Died("sandbox.died", f"the process that examined it ended with code {code}")
    number = signal.Signals(-code)
    if number is signal.SIGXCPU:
        return Died("sandbox.timeout", "examining it exceeded the CPU time limit")
    return Died("sandbox.died", f"{number.name} ended the process that examined it")


def cpu_seconds(limits: FileLimits, size: int) -> float:
    """Return the CPU time limit for a file of `size` bytes."""
    return limits.cpu_s + size / BYTES_PER_SECOND


def _read_answer(answer: Any) -> tuple[str, list[Reason]]:
    """Validate an answer, since the sender has parsed foreign bytes."""
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


def serve() -> None:
    """Answer each line of standard input; end when it closes, as when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C of the terminal
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep libraries' output out of the answers
    import torch

    from runner.security.files.loading import examine

    torch.set_num_threads(1)
    _limit_once()
    gc.freeze()
    gc.disable()  # it would scan thousands of tensors repeatedly
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        limits, name = FileLimits(**question["limits"]), question["name"]
        descriptor = os.open(question["place"], os.O_RDONLY)
        size = os.fstat(descriptor).st_size
        _limit_file(limits, size)
        data, place = map_bytes(descriptor, size), f"/dev/fd/{descriptor}"
        examined = examine(data, place, name, limits, deep=question["deep"])
        rows = [[r.code, int(r.severity), r.where, r.evidence, r.way_out] for r in examined.reasons]
        print(json.dumps({"format": examined.format, "reasons": rows}), file=answers, flush=True)
        examined.content = None
        if isinstance(data, mmap.mmap):
            with suppress(BufferError):
                data.close()
        os.close(descriptor)
        del data, examined
        gc.collect()


def _limit_once() -> None:
    """Forbid writing files, new processes (not for root) and cores; limit descriptors."""
    for name, most in (("FSIZE", 0), ("CORE", 0), ("NOFILE", DESCRIPTORS), ("NPROC", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def _limit_file(limits: FileLimits, size: int) -> None:
    """Limit CPU time and, on Linux, memory, on top of current use."""
    if LINUX:  # other systems do not enforce it
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        in_use = pages * os.sysconf("SC_PAGE_SIZE")
        _lower(resource.RLIMIT_AS, in_use + 3 * size + limits.memory)
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = used.ru_utime + used.ru_stime
    _lower(resource.RLIMIT_CPU, int(spent + cpu_seconds(limits, size)) + 1)


def _lower(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(what, (value, hard))


def _end_with_parent() -> None:
    """Kill the process group when standard input closes, even during an examination."""
    poll = select.poll()
    poll.register(0, 0)  # a hang-up is always reported
    poll.poll()
    os.killpg(0, signal.SIGKILL)
