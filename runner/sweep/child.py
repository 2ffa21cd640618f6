"""One job's process, from its start to what became of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from runner.device import cgroup
from runner.errors import StorageError
from runner.record.storage import for_owners
from runner.sweep.job import parent_death_pipe
from runner.sweep.state import WELL
from runner.training.signals import ENDS
from runner.training.summary import FILE as SUMMARY
from runner.training.summary import Summary

LOG = "console.log"
TAIL = 1 << 16  # bytes of what it said, that are looked at
GRACE_S = 20.0  # to write a checkpoint, for a job that has to end
MEMORY = re.compile(r"out of memory|OutOfMemory|MemoryError|bad_alloc|can't allocate memory", re.I)
ASKED = {code for number in ENDS for code in (128 + number, -number)}  # how one ends that was
CLOCK = re.compile(r"^\d\d:\d\d:\d\d ")
PROGRESS = re.compile(r"step [\d,]+/[\d,]+ .* left$")  # as hooks/progress.py says it


@dataclass
class Child:
    """A process in a session of its own, so that all it starts ends with it."""

    process: subprocess.Popen[bytes]
    folder: Path
    timeout_s: float | None
    lifeline: int  # closed, it tells the process that we are gone
    before: tuple[int, int] | None  # the summary that was there before it
    logged: int = 0  # bytes in its log that tries before it left
    records: bool = False  # it is to leave a summary
    began: float = field(default_factory=time.monotonic)
    ooms: int | None = field(default_factory=cgroup.oom_kills)
    wanted: str = ""  # how it is to be called when it was made to end: timeout or interrupted
    why: str = ""
    until: float = float("inf")  # when patience with it ends

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        environment: dict[str, str],
        folder: Path,
        timeout_s: float | None,
        told: Sequence[str] = (),
        records: bool = False,
        chosen: bool = True,
    ) -> Child:
        """Start it; what it says goes to `console.log` in its folder. OSError if it cannot be."""
        folder.mkdir(parents=True, exist_ok=True)
        before, logged = _identity(folder / SUMMARY), 0
        variables, reads, writes = parent_death_pipe(told, chosen)
        try:
            with open(folder / LOG, "ab", opener=for_owners) as sink:
                logged = sink.tell()
                process = subprocess.Popen(  # noqa: S603  # our own interpreter, no shell
                    command,
                    stdin=reads,
                    stdout=sink,
                    stderr=sink,
                    start_new_session=True,
                    env={**environment, **variables},
                )
        except OSError:
            os.close(writes)
            raise
        finally:
            os.close(reads)
        return cls(process, folder, timeout_s, writes, before, logged, records)

    def has_ended(self) -> bool:
        """Whether it has; one that takes too long is made to."""
        if self.process.poll() is not None:
            return True
        now = time.monotonic()
        if not self.wanted and self.timeout_s is not None and now - self.began > self.timeout_s:
            self.ask(signal.SIGTERM, "timeout", f"not done within {self.timeout_s:g} s", GRACE_S)
        if now > self.until:
            self.kill()
        return False

    def ask(self, number: int, wanted: str, why: str, grace_s: float = float("inf")) -> None:
        """Ask it to end: it finishes its step and writes a checkpoint.

        The first reason for that is the one that is told, the shortest patience the one that holds.
        """
        if not self.wanted:
            self.wanted, self.why = wanted, why
        self.until = min(self.until, time.monotonic() + grace_s)
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End it at once, with all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Leave nothing of it behind."""
        self.kill()
        self.process.wait()
        with suppress(OSError):
            os.close(self.lifeline)

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.began

    def last_line(self) -> str:
        """What it said last."""
        lines = [line for line in self._said().splitlines() if line.strip()]
        return CLOCK.sub("", lines[-1]).strip() if lines else ""

    def at_work(self) -> str:
        """How far it has come: step of steps, loss and time left, as it says now and then itself.
        The last line of its log until it does.
        """
        said = [CLOCK.sub("", line) for line in self._said().splitlines() if CLOCK.match(line)]
        for line in reversed(said):
            if PROGRESS.match(line):
                step, loss, *_, left = line.split(" · ")
                return f"{step} · {loss} · {left}"
        if said:
            return said[-1].strip()
        return "at work" if self.left_a_record else "starting"  # it is to say nothing

    @property
    def left_a_record(self) -> bool:
        """Whether there is a summary of this try, not of one before it."""
        return _identity(self.folder / SUMMARY) not in (None, self.before)

    def ending(self) -> tuple[str, str]:
        """Status and reason, from its exit code, its summary, and what it said."""
        code, summary = self.process.returncode, self._summary()
        reason = "" if summary is None or summary.status == "running" else summary.reason
        if self.wanted and code != 0:
            return self.wanted, self.why + (f"; {reason}" if reason else "")
        if code == 0:
            if summary is not None and summary.status in WELL:
                return summary.status, reason
            if self.records:
                return "failed", "left no record of its end, although it ended with 0"
            return "done", ""
        if code in ASKED:
            return "interrupted", reason or "it was asked to end"
        if code == -signal.SIGKILL:
            return self._killed()
        if code < 0:
            return "killed", f"by signal {-code} ({_name(-code)})"
        if summary is not None and summary.status in WELL:  # by something after the run itself
            reason = ""
        reason = reason or self.last_line() or f"it ended with {code} and said nothing"
        return ("oom" if MEMORY.search(reason) else "failed"), reason

    def _killed(self) -> tuple[str, str]:
        now = cgroup.oom_kills()
        if now is not None and self.ooms is not None and now > self.ooms:
            return "oom", "killed by the kernel: the container's memory was used up"
        return "killed", "by signal 9 (SIGKILL); by the kernel, if the memory was used up"

    def _summary(self) -> Summary | None:
        if not self.left_a_record:
            return None
        try:
            return Summary.read(self.folder)
        except StorageError:
            return None

    def _said(self) -> str:
        try:
            with (self.folder / LOG).open("rb") as file:
                file.seek(max(self.logged, os.fstat(file.fileno()).st_size - TAIL))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""


def _identity(path: Path) -> tuple[int, int] | None:
    """What is another one as soon as the file is replaced."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
