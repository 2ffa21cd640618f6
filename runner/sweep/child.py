"""The process of one job, from start to result."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from runner.device import cgroup
from runner.errors import StorageError
from runner.record.storage import for_owners
from runner.sweep.job import parent_death_pipe
from runner.sweep.state import WELL
from runner.training.signals import ENDS
from runner.training.summary import FILE as SUMMARY
from runner.training.summary import Summary

if TYPE_CHECKING:
    from runner.sweep.fork import ForkedProcess

    JobProcess = subprocess.Popen[bytes] | ForkedProcess

LOG = "console.log"
TAIL = 1 << 16  # bytes read from the end of the log
GRACE_S = 20.0  # for a checkpoint, before a job is killed
MEMORY = re.compile(r"out of memory|OutOfMemory|MemoryError|bad_alloc|can't allocate memory", re.I)
INTERRUPTED = {code for number in ENDS for code in (128 + number, -number)}  # exit codes
CLOCK = re.compile(r"^\d\d:\d\d:\d\d ")


StartProcess = Callable[[Sequence[str], Mapping[str, str], int, int], "JobProcess"]
"""(command, environment, stdin descriptor, output descriptor) → started process."""


@dataclass
class Child:
    """A job's process in its own session, so that its descendants end with it."""

    process: JobProcess
    folder: Path
    timeout_s: float | None
    death_pipe: int  # closing it ends the process
    earlier_summary: tuple[int, int] | None  # identity of the summary that an earlier try left
    log_start: int = 0  # size of the log before this try
    records: bool = False  # it writes a summary
    began: float = field(default_factory=time.monotonic)
    ooms: int = field(default_factory=lambda: cgroup.oom_kills() or 0)
    requested: str = ""  # status after being asked to end: timeout or interrupted
    why: str = ""
    deadline: float = float("inf")  # time at which it is killed

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        environment: dict[str, str],
        folder: Path,
        timeout_s: float | None,
        overrides: Sequence[str] = (),
        records: bool = False,
        chosen: bool = True,
        start_process: StartProcess | None = None,  # None: it is spawned
    ) -> Child:
        """Start a job with output to `console.log` in its folder. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        earlier, log_start = _identity(folder / SUMMARY), 0
        variables, reads, writes = parent_death_pipe(overrides, chosen)
        try:
            with open(folder / LOG, "ab", opener=for_owners) as sink:
                log_start = sink.tell()
                begin = start_process or _spawn
                process = begin(command, {**environment, **variables}, reads, sink.fileno())
        except OSError:
            os.close(writes)
            raise
        finally:
            os.close(reads)
        return cls(process, folder, timeout_s, writes, earlier, log_start, records)

    def has_ended(self) -> bool:
        """Whether it has ended; asks it to end after the timeout, and kills it at the deadline."""
        if self.process.poll() is not None:
            return True
        late = self.timeout_s is not None and self.seconds > self.timeout_s
        if late and not self.requested:
            self.ask(signal.SIGTERM, "timeout", f"not done within {self.timeout_s:g} s", GRACE_S)
        if time.monotonic() > self.deadline:
            self.kill()
        return False

    def ask(self, number: int, status: str, why: str, grace_s: float = float("inf")) -> None:
        """Send a signal, on which the job finishes its step and writes a checkpoint.

        The first reason is reported; the earliest deadline applies.
        """
        if not self.requested:
            self.requested, self.why = status, why
        self.deadline = min(self.deadline, time.monotonic() + grace_s)
        with suppress(ProcessLookupError, PermissionError):
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the process and its descendants."""
        for kill in (os.killpg, os.kill):  # it may not have its own session yet
            with suppress(ProcessLookupError, PermissionError):
                kill(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill what is left, and release its resources."""
        self.kill()
        self.process.wait()
        with suppress(OSError):
            os.close(self.death_pipe)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def last_line(self) -> str:
        """Return the last log line of this try, without the time of day."""
        try:
            with (self.folder / LOG).open("rb") as file:
                file.seek(max(self.log_start, os.fstat(file.fileno()).st_size - TAIL))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        lines = [line for line in text.splitlines() if line.strip()]
        return CLOCK.sub("", lines[-1]).strip() if lines else ""

    @property
    def left_a_record(self) -> bool:
        """Whether this try has written a summary."""
        return _identity(self.folder / SUMMARY) not in (None, self.earlier_summary)

    def ending(self) -> tuple[str, str]:
        """Return status and reason, from exit code, summary and log."""
        code, summary = self.process.returncode, self._summary()
        well = summary is not None and summary.status in WELL
        reason = "" if summary is None or summary.status == "running" else summary.reason
        if self.requested and code != 0:
            return self.requested, self.why + (f"; {reason}" if reason else "")
        if code == 0 and summary is not None and well:
            return summary.status, reason
        if code == 0:
            with suppress(StorageError):  # it had ended earlier, before the sweep could record it
                ended = Summary.read(self.folder)
                if ended.status in WELL:
                    return ended.status, ended.reason
            problem = "exited with code 0, but left no record of its end"
            return ("failed", problem) if self.records else ("done", "")
        if code in INTERRUPTED:
            return "interrupted", reason or "it was interrupted"
        if code < 0:
            return self._killed(-code)
        reason = "" if well else reason  # the error came after the run itself
        reason = reason or self._last_words(code)
        return ("oom" if MEMORY.search(reason) else "failed"), reason

    def _last_words(self, code: int) -> str:
        """Return the printed error; else describe the exit code and the last line."""
        line = self.last_line()
        if line.startswith("error"):
            return line
        why = "; its files could not be written" if code == StorageError.exit_code else ""
        output = f"printed last: {line}" if line else "printed nothing"
        return f"it exited with code {code}{why} and {output}"

    def _killed(self, number: int) -> tuple[str, str]:
        if number == signal.SIGKILL and (cgroup.oom_kills() or 0) > self.ooms:
            return "oom", "killed by the kernel: the container's memory was used up"
        hint = "; by the kernel, if the memory was used up" if number == signal.SIGKILL else ""
        return "killed", f"by signal {number} ({signal.Signals(number).name}){hint}"

    def _summary(self) -> Summary | None:
        with suppress(StorageError):
            return Summary.read(self.folder) if self.left_a_record else None
        return None


def _spawn(
    command: Sequence[str], environment: Mapping[str, str], stdin: int, output: int
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603  # our own interpreter, no shell
        command,
        stdin=stdin,
        stdout=output,
        stderr=output,
        start_new_session=True,
        env=environment,
    )


def _identity(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when the file is replaced; None if missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
