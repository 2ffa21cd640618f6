"""The limited process, from the side of the one who asks.

It is started when the first foreign file is met, a second or two, and looks at all that follow. It
gets the very bytes that were hashed, through a descriptor; what comes back is a format's name and
reasons, as text. No tensor comes back: once it has found nothing, this process loads the same
sealed bytes with the same code. The limits are on memory, time, files written and processes; it
is no jail for code, which is why nothing in a file is ever run there either.

On Linux all limits hold. macOS does not enforce the one on memory, and there is no limited process
on Windows, where foreign files are refused until they are pinned. The limit on processes does not
hold for root.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Self

import psutil

from runner.device.cgroup import oom_kills
from runner.security.gate.held import Held, Watched
from runner.security.gate.limited import HEADER, exactly
from runner.security.gate.policy import Policy
from runner.security.gate.refused import shown
from runner.security.trust import Reason, Severity

START_S = 120.0  # on a busy machine with a cold disk
ANSWER = 1 << 22  # bytes; what says more is not to be believed
REASONS = 10_000
MOST_ENDED = 8  # processes that one folder may bring down; the rest of it is not looked at
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "LD_LIBRARY_PATH", "SYSTEMROOT")
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from runner.security.gate import limited; limited.main(int(sys.argv[1]))"
)
WAY_OUT = "get it as safetensors, or look at it on a machine of its own"


class Ended(Exception):
    """The process is no more, or is to be ended; with the reason that the file is refused for."""

    def __init__(self, code: str, evidence: str) -> None:
        self.code, self.evidence = code, evidence
        super().__init__(evidence)


class Child:
    """A context manager; nothing of it is left behind, however that ends."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.line: socket.socket | None = None
        self.started = 0
        self.ended = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def examine(
        self, held: Held | Watched, name: str, policy: Policy, deep: bool = True
    ) -> tuple[str, list[Reason]]:
        """The format and what is wrong. A process that dies, hangs or runs out of memory is a
        refusal; the next file gets a new one.
        """
        if sys.platform == "win32":
            return _refused("child.platform", name, "there is no limited process on Windows")
        if self.ended >= MOST_ENDED:
            why = f"{self.ended} files have brought down the process that looks at them"
            return _refused("child.given_up", name, why)
        try:
            if self.process is None:
                self._start()
            return self._ask(held, name, policy, deep)
        except Ended as ended:
            self.close()
            self.ended += 1
            return _refused(ended.code, name, ended.evidence)
        except BaseException:  # Ctrl-C: what it would still say is not for the next file
            self.close()
            raise

    def close(self) -> None:
        """End it at once, with all that it started."""
        process, line, self.process, self.line = self.process, self.line, None, None
        if line is not None:
            line.close()
        if process is None:
            return
        started: list[psutil.Process] = []
        with suppress(psutil.Error):
            started = psutil.Process(process.pid).children(recursive=True)
        if process.poll() is None:  # its id is still its own
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for other in started:
            with suppress(psutil.Error):  # it knows a process by its start too
                other.kill()
        process.wait()

    def _start(self) -> None:
        mine, theirs = socket.socketpair()
        environment = {key: os.environ[key] for key in KEPT if key in os.environ}
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUTF8": "1"}
        path = json.dumps([place or os.getcwd() for place in sys.path])
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603  # ourselves
                [sys.executable, "-P", "-s", "-c", PROGRAM, str(theirs.fileno()), path],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env=environment, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        self.line = mine
        self.started += 1
        self._answer(START_S, oom_kills() or 0)

    def _ask(
        self, held: Held | Watched, name: str, policy: Policy, deep: bool
    ) -> tuple[str, list[Reason]]:
        before = oom_kills() or 0
        text = json.dumps({
            "name": name, "size": held.size, "deep": deep, "level": policy.level.value,
            "bounds": asdict(policy.bounds), "may_run": policy.allow_pickle,
        }).encode()  # fmt: skip
        try:
            line = self._line()
            bytes_of_it = held.handed()
            try:
                socket.send_fds(line, [len(text).to_bytes(HEADER, "big")], [bytes_of_it])
            finally:
                os.close(bytes_of_it)
            line.sendall(text)
        except OSError:
            raise self._died(before) from None
        return _read(self._answer(policy.bounds.seconds, before))

    def _line(self) -> socket.socket:
        if self.line is None:
            raise Ended("child.died", "the process that looks at it is gone")
        return self.line

    def _answer(self, seconds: float, before: int) -> Any:
        line, until = self._line(), time.monotonic() + seconds

        def read(count: int) -> bytes:
            line.settimeout(max(0.001, until - time.monotonic()))
            return exactly(line, count)

        try:
            count = int.from_bytes(read(HEADER), "big")
            if count > ANSWER:
                raise Ended("child.answer", f"the process that looked at it sent {count} bytes")
            text = read(count)
            line.settimeout(None)
            return json.loads(text)
        except TimeoutError:
            raise Ended("child.timeout", f"looking at it took more than {seconds:g} s") from None
        except (EOFError, OSError):
            raise self._died(before) from None
        except ValueError:
            raise Ended("child.answer", "the process that looked at it sent no JSON") from None

    def _died(self, before: int) -> Ended:
        """What became of a process that is gone without a word."""
        code = None
        if self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                code = self.process.wait(5)
        if code is None or code >= 0:
            return Ended("child.died", f"the process that looked at it ended with code {code}")
        number = signal.Signals(-code)
        if number is signal.SIGXCPU:
            return Ended("child.timeout", "looking at it took more CPU time than it may")
        if number is signal.SIGKILL and (oom_kills() or 0) > before:
            return Ended("child.memory", "looking at it took all the memory of this machine")
        return Ended("child.died", f"{number.name} ended the process that looked at it")


def _read(answer: Any) -> tuple[str, list[Reason]]:
    """What it said, held to its form: it looked at somebody else's bytes."""
    try:
        kind, rows = answer["format"], answer["reasons"]
        if type(kind) is not str or type(rows) is not list or len(rows) > REASONS:
            raise TypeError
        reasons = []
        for code, severity, *texts in rows:
            where, evidence, way_out = (shown(text) for text in texts)
            reasons.append(Reason(shown(code, 60), Severity(severity), where, evidence, way_out))
    except (LookupError, TypeError, ValueError):
        raise Ended("child.answer", "the process that looked at it answered oddly") from None
    return shown(kind, 60), reasons


def _refused(code: str, where: str, evidence: str) -> tuple[str, list[Reason]]:
    return "unknown", [Reason(code, Severity.REFUSAL, where, evidence, WAY_OUT)]
