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
import time
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Self

from runner import rooms
from runner.core.findings import Reason, Severity
from runner.core.masking import mask_secrets
from runner.core.process_wait import watch_parent
from runner.core.security.child_process import EXIT_TIMEOUT_S, ChildProcess
from runner.core.security.files.file_bytes import LINUX, FileBytes, map_bytes
from runner.core.security.files.formats import printable
from runner.core.security.files.policy import FileLimits

START_TIMEOUT_S = 120.0  # on a busy machine with a cold disk
WALL_TIME_FACTOR = 10.0  # limit of wall time as a multiple of CPU time
BYTES_PER_SECOND = 32 << 20  # per CPU second, in addition to limits.cpu_s
SMALL_FILE, SMALL_BYTES_PER_SECOND = 32 << 20, 1 << 20  # pickles are read slowly
MAX_ANSWER_BYTES = 1 << 20  # maximum bytes of an answer
MAX_CRASHES = 8  # crashes per scan, after which files are refused unexamined
MAX_DESCRIPTORS = 64
INHERITED_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "LD_LIBRARY_PATH")
SERVER_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from runner.scan import sandbox; sandbox.serve()"
)
TOKENIZER_FIX = "use the tokenizer of another source"
WAY_OUT = "get it as safetensors, or inspect it on an isolated machine"


class SandboxError(Exception):
    """The process died or has to be killed; with the reason to refuse the file."""

    def __init__(self, code: str, evidence: str) -> None:
        self.code, self.evidence = code, evidence
        super().__init__(evidence)


class Sandbox:
    """A context manager; the process starts with the first file and ends on exit."""

    def __init__(self) -> None:
        self.process: ChildProcess | None = None
        self.crashes = 0

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
        if self.crashes >= MAX_CRASHES:
            why = f"{self.crashes} files have ended the process that examines them"
            return _refusal_answer("sandbox.given_up", name, why)
        return self._request(data, name, limits, {"deep": deep})

    def try_tokenizer(self, data: FileBytes, name: str, texts: list[str]) -> list[Reason]:
        """Return the reason to refuse a tokenizer.json, if it fails on texts or takes too much."""
        reasons = self._request(data, name, FileLimits(), {"texts": texts})[1]
        return [replace(reason, way_out=TOKENIZER_FIX) for reason in reasons]

    def _request(
        self, data: FileBytes, name: str, limits: FileLimits, options: dict[str, Any]
    ) -> tuple[str, list[Reason]]:
        path = f"/proc/{os.getpid()}/fd/{data.descriptor}" if LINUX else data.path
        shown = mask_secrets(name)  # no secret enters the process; the extension counts there
        shown += "" if shown.endswith(ext := os.path.splitext(name)[1]) else ext
        request = {"path": path, "name": shown, "limits": asdict(limits), **options}
        try:
            if self.process is None:
                self._start()
            timeout_s = WALL_TIME_FACTOR * cpu_seconds(limits, data.size)
            return _read_answer(self._send_request(request, timeout_s))
        except SandboxError as error:
            self.close()
            self.crashes += 1
            return _refusal_answer(error.code, name, error.evidence)
        except BaseException:  # Ctrl-C: a late answer must not be read as that of the next file
            self.close()
            raise

    def close(self) -> None:
        """Kill the process and its children."""
        process, self.process = self.process, None
        if process is not None:
            process.end()
            for pipe in (process.handle.stdin, process.handle.stdout):
                with suppress(OSError):  # unsent data for a dead process
                    pipe.close()

    def _start(self) -> None:
        environment = {key: os.environ[key] for key in INHERITED_VARIABLES if key in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUTF8": "1"}
        environment["TOKENIZERS_PARALLELISM"] = "false"
        path = json.dumps([folder or os.getcwd() for folder in sys.path])
        self.process = ChildProcess(
            subprocess.Popen(  # noqa: S603  # ourselves
                [sys.executable, "-P", "-s", "-c", SERVER_CODE, path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        )
        self._receive_answer(self.process, START_TIMEOUT_S)

    def _send_request(self, request: dict[str, Any], seconds: float) -> Any:
        process = self.process
        if process is None:
            raise SandboxError("sandbox.died", "the process that examines it is gone")
        try:
            process.handle.stdin.write(json.dumps(request).encode() + b"\n")
            process.handle.stdin.flush()
        except OSError:
            raise _exit_failure(process) from None
        return self._receive_answer(process, seconds)

    def _receive_answer(self, process: ChildProcess, seconds: float) -> Any:
        """Read one line of JSON, for at most `seconds`."""
        pipe, deadline, text = process.handle.stdout, time.monotonic() + seconds, b""
        while not text.endswith(b"\n"):
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                problem = f"examining it took more than {seconds:.1f} s"
                raise SandboxError("sandbox.timeout", problem)
            chunk = os.read(pipe.fileno(), MAX_ANSWER_BYTES)
            if not chunk:
                raise _exit_failure(process)
            text += chunk
            if len(text) > MAX_ANSWER_BYTES:
                raise SandboxError("sandbox.answer", "the process that examines it sent too much")
        return json.loads(text)


def _exit_failure(process: ChildProcess) -> SandboxError:
    if process.wait(EXIT_TIMEOUT_S) == -signal.SIGXCPU:
        return SandboxError("sandbox.timeout", "examining it exceeded the CPU time limit")
    return SandboxError("sandbox.died", f"the process that examined it {process.describe_end()[1]}")


def cpu_seconds(limits: FileLimits, size: int) -> float:
    """Return the CPU time limit for a file of `size` bytes."""
    small_s = min(size, SMALL_FILE) / SMALL_BYTES_PER_SECOND
    return limits.cpu_s + small_s + size / BYTES_PER_SECOND


def _read_answer(answer: dict[str, Any]) -> tuple[str, list[Reason]]:
    reasons = [
        Reason(code, Severity(severity), *(printable(mask_secrets(text), 400) for text in texts))
        for code, severity, *texts in answer["reasons"]
    ]
    return answer["format"], reasons


def _refusal_answer(code: str, where: str, evidence: str) -> tuple[str, list[Reason]]:
    return "unknown", [Reason(code, Severity.REFUSAL, where, evidence, WAY_OUT)]


# -- in the sandboxed process ------------------------------------------------------------------


def serve() -> None:
    """Answer each line of standard input; end when it closes, as when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C of the terminal
    watch_parent(0)  # even during an examination
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep libraries' output out of the answers
    import torch

    from runner.core.security.files.parsing import Examination, examine

    torch.set_num_threads(1)
    _limit_process()
    gc.freeze()
    gc.disable()  # it would scan thousands of tensors repeatedly
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        limits, name = FileLimits(**request["limits"]), request["name"]
        descriptor = os.open(request["path"], os.O_RDONLY)
        size = os.fstat(descriptor).st_size
        _limit_time_and_memory(limits, size)
        data, path = map_bytes(descriptor, size), f"/dev/fd/{descriptor}"
        if "texts" in request:
            result = Examination("tokenizer", _encode(bytes(data), request["texts"]))
        else:
            result = examine(data, path, name, limits, deep=request["deep"])
        rows = [[r.code, int(r.severity), r.where, r.evidence, r.way_out] for r in result.reasons]
        print(json.dumps({"format": result.format, "reasons": rows}), file=answers, flush=True)
        result.content = None
        if isinstance(data, mmap.mmap):
            with suppress(BufferError):
                data.close()
        os.close(descriptor)
        del data, result
        gc.collect()


def _encode(tokenizer: bytes, texts: list[str]) -> list[Reason]:
    """Return the reason to refuse a tokenizer.json that fails on texts."""
    try:
        rooms.find("files", "encode_texts")(tokenizer, texts)
    except BaseException as error:  # a panic of the library is no Exception
        evidence = f"it fails on a text: {printable(error)}"
        return [Reason("tokenizer.failed", Severity.REFUSAL, "", evidence)]
    return []


def _limit_process() -> None:
    """Forbid writing files, new processes (not for root) and cores; limit descriptors."""
    for name, maximum in (("FSIZE", 0), ("CORE", 0), ("NOFILE", MAX_DESCRIPTORS), ("NPROC", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (maximum, maximum))


def _limit_time_and_memory(limits: FileLimits, size: int) -> None:
    """Limit CPU time and, on Linux, memory, on top of current use."""
    if LINUX:  # other systems do not enforce it
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        in_use = pages * os.sysconf("SC_PAGE_SIZE")
        _lower_limit(resource.RLIMIT_AS, in_use + 3 * size + limits.memory)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    used_s = usage.ru_utime + usage.ru_stime
    _lower_limit(resource.RLIMIT_CPU, int(used_s + cpu_seconds(limits, size)) + 1)


def _lower_limit(resource_id: int, value: int) -> None:
    hard = resource.getrlimit(resource_id)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(resource_id, (value, hard))
