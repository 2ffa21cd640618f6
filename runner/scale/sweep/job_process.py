"""The process of one job, from start to result."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from runner.core.device.signals import END_SIGNALS
from runner.core.errors import ProcessLost, StorageError
from runner.core.process_wait import MEMORY_HINT
from runner.core.record.storage import make_folder, safe_opener
from runner.core.record.summary import FINISHED_STATUSES, SUMMARY_FILE, Summary
from runner.core.record.text import limit_length
from runner.core.security.child_process import ChildProcess
from runner.scale.sweep.fork import StartProcess, spawn_job
from runner.scale.sweep.job_context import has_reported_end, parent_death_pipe

CONSOLE_LOG = "console.log"
TAIL_BYTES = 1 << 16  # bytes read from the end of the log
KEPT_BYTES = 1 << 20  # bytes of the log's beginning, and of its end, that are kept
MAX_LOG_BYTES = 8 * KEPT_BYTES  # of the log of a running job
STOPPED_S = 5.0  # after which a stopped job is reported
GRACE_S = 20.0  # for a checkpoint, before a job is killed
OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|MemoryError|bad_alloc|can't allocate memory", re.I
)
INTERRUPTED_CODES = {code for number in END_SIGNALS for code in (128 + number, -number)}
TIME_PREFIX = re.compile(r"^\d\d:\d\d:\d\d ")


@dataclass
class JobProcess:
    """A job's process in its own session, its log and the record of its end."""

    process: ChildProcess
    folder: Path
    timeout_s: float | None
    death_pipe: int  # closing it ends the process
    earlier_summary: tuple[int, int] | None  # identity of the summary that an earlier try left
    log_start: int = 0  # size of the log before this try
    left_out: int = 0  # bytes of the log
    writes_summary: bool = False
    reported_end: bool = False  # else an exit code 0 is that of user code
    start_time: float = field(default_factory=time.monotonic)
    requested_status: str = ""  # status after being asked to end: timeout or interrupted
    requested_reason: str = ""
    deadline: float = float("inf")  # of the process's clock, at which it is killed

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        environment: dict[str, str],
        folder: Path,
        timeout_s: float | None,
        overrides: Sequence[str] = (),
        writes_summary: bool = False,
        folder_trusted: bool = True,
        start_process: StartProcess = spawn_job,
    ) -> JobProcess:
        """Start a job with output to `console.log` in its folder. Raises OSError, ProcessLost."""
        make_folder(folder)
        earlier_summary = _file_identity(folder / SUMMARY_FILE)
        variables, read_end, write_end = parent_death_pipe(overrides, folder_trusted)
        try:
            with open(folder / CONSOLE_LOG, "ab", opener=safe_opener) as log_file:
                log_start, environment = log_file.tell(), {**environment, **variables}
                process = start_process(command, environment, read_end, log_file.fileno())
        except (OSError, ProcessLost):
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return cls(
            process, folder, timeout_s, write_end, earlier_summary, log_start,
            writes_summary=writes_summary,
        )  # fmt: skip

    def has_ended(self) -> bool:
        """Whether it has ended; asks it to end after the timeout, and kills it at the deadline."""
        self._trim_log(MAX_LOG_BYTES)
        if self.process.poll() is not None:
            return True
        now = self.process.clock.seconds
        if self.timeout_s is not None and now > self.timeout_s and not self.requested_status:
            notice = f"; {self.stop_notice()}" if self.stop_notice() else ""
            reason = f"not done within {self.timeout_s:g} s{notice}"
            self.request_end(signal.SIGTERM, "timeout", reason, GRACE_S)
        if now > self.deadline:
            self.process.kill()
        return False

    def stop_notice(self) -> str:
        """Describe a process that has been stopped for STOPPED_S; "" for one that runs."""
        if (seconds := self.process.stopped_s) < STOPPED_S:
            return ""
        pid = self.process.pid
        return f"pid {pid} is stopped (state T) for {seconds:.0f} s; SIGCONT continues it"

    def request_end(
        self, number: int, status: str, reason: str, grace_s: float = float("inf")
    ) -> None:
        """Send a signal, on which the job finishes its step and writes a checkpoint.

        The first reason is reported; the earliest deadline applies.
        """
        if not self.requested_status:
            self.requested_status, self.requested_reason = status, reason
        self.deadline = min(self.deadline, self.process.clock.seconds + grace_s)
        self.process.send_signal(number)

    def close(self) -> None:
        """Kill what is left, and release its resources."""
        self.process.end()
        self._trim_log(2 * KEPT_BYTES)
        with suppress(OSError):
            self.reported_end = has_reported_end(self.death_pipe)
            os.close(self.death_pipe)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start_time

    def last_line(self) -> str:
        """Return the last log line of this try, without the time of day."""
        try:
            with (self.folder / CONSOLE_LOG).open("rb") as file:
                file.seek(max(self.log_start, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        lines = [line for line in text.splitlines() if line.strip()]
        return limit_length(TIME_PREFIX.sub("", lines[-1]).strip()) if lines else ""

    def _trim_log(self, max_bytes: int) -> None:
        """Leave out the middle of a log of more than `max_bytes`; the job goes on to append."""
        path = self.folder / CONSOLE_LOG
        with suppress(OSError):
            if (size := path.stat().st_size) <= max_bytes:
                return
            with open(path, "a+b", opener=safe_opener) as file:
                file.seek(size - KEPT_BYTES)
                tail = file.read()
                self.left_out += size - 2 * KEPT_BYTES
                note = f"\n… {self.left_out:,} bytes of output left out …\n".encode()
                file.truncate(KEPT_BYTES)
                file.write(note + tail)
            if self.log_start > KEPT_BYTES:
                shift = size - 2 * KEPT_BYTES - len(note)
                self.log_start = max(KEPT_BYTES + len(note), self.log_start - shift)

    @property
    def wrote_summary(self) -> bool:
        """Whether this try has written a summary."""
        return _file_identity(self.folder / SUMMARY_FILE) not in (None, self.earlier_summary)

    def end_status(self) -> tuple[str, str]:
        """Return status and reason, from exit code, summary, report and log, after `close`."""
        code, summary = self.process.exit_code or 0, None
        with suppress(StorageError):
            summary = Summary.read(self.folder) if self.wrote_summary else None
        succeeded = summary is not None and summary.status in FINISHED_STATUSES
        reason = "" if summary is None or summary.status == "running" else summary.reason
        lost = self.process.has_lost_server() and not self.requested_status
        # of a run that is done, a signal has only ended what its code left behind
        is_ended = code <= 0 or bool(self.requested_status) or code in INTERRUPTED_CODES
        if summary is not None and succeeded and (lost or is_ended):
            return summary.status, reason
        if lost:
            return "killed", "the sweep's fork server was killed, or did not report the job's end"
        if self.requested_status and code != 0:
            return self.requested_status, self.requested_reason + (f"; {reason}" if reason else "")
        if code == 0:
            with suppress(StorageError):  # it had ended earlier, before the sweep could record it
                ended = Summary.read(self.folder)
                if ended.status in FINISHED_STATUSES:
                    return ended.status, ended.reason
            if self.reported_end and not self.writes_summary:
                return "done", ""
            return "failed", "exited with code 0, but left no record of its end"
        if code in INTERRUPTED_CODES:
            return "interrupted", reason or "it was interrupted"
        if code < 0:
            status, reason = self.process.describe_end()
            hint = MEMORY_HINT if status == "killed" and code == -signal.SIGKILL else ""
            return status, reason + hint
        reason = "" if succeeded else reason  # the error came after the run itself
        reason = reason or self._describe_error(code)
        return ("oom" if OUT_OF_MEMORY.search(reason) else "failed"), reason

    def _describe_error(self, code: int) -> str:
        line = self.last_line()
        if line.startswith("error"):
            return line
        note = "; its files could not be written" if code == StorageError.exit_code else ""
        return f"it exited with code {code}{note}; printed last: {line or 'nothing'}"


def _file_identity(path: Path) -> tuple[int, int] | None:
    """Return a value that changes when the file is replaced; None if missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
