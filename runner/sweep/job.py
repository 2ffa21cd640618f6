"""Context of a job's process, passed by a pipe, which also ends the job with its parent."""

from __future__ import annotations

import json
import os
import select
import signal
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

VARIABLE = "RUNNER_JOB"
GRACE_S = 60.0  # for a checkpoint, after the sweep's process is gone


@dataclass(frozen=True)
class JobContext:
    """Overrides that the launcher adds to the typed ones, such as the folder to write to.

    `chosen`: the user chose the sweep's folder; a continued one may be someone else's.
    """

    overrides: list[str] = field(default_factory=list)
    chosen: bool = True


def parent_death_pipe(
    overrides: Sequence[str], chosen: bool = True
) -> tuple[dict[str, str], int, int]:
    """Return a job's extra environment variable, its stdin, and the write end of that pipe.

    The context is in the pipe, so that a stale variable makes no job. Closing the write end ends
    the job.
    """
    reads, writes = os.pipe()
    os.write(writes, json.dumps(asdict(JobContext(list(overrides), chosen))).encode())
    return {VARIABLE: "1"}, reads, writes


def take_job_context() -> JobContext:
    """Return the launcher's context, or an empty one if this process is not a job.

    It is not on the command line, so that the recorded command can be typed; the variable is
    deleted, so that a runner started by the user's code is not a job of this sweep. From then on
    the process ends, with its child processes, when its parent ends.
    """
    if os.environ.pop(VARIABLE, None) is None:
        return JobContext()
    try:
        message = json.loads(_read_stdin())
        context = JobContext([str(o) for o in message["overrides"]], message["chosen"] is True)
    except (ValueError, LookupError, TypeError, RecursionError):
        return JobContext()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return context


def _read_stdin() -> bytes:
    """Return what a pipe at stdin holds already; empty if stdin is not a pipe."""
    with suppress(OSError):
        if stat.S_ISFIFO(os.fstat(0).st_mode) and select.select([0], [], [], 0)[0]:
            return os.read(0, 1 << 16)
    return b""


def _end_with_parent() -> None:
    with suppress(OSError):
        while os.read(0, 1):  # blocks until the other end is closed; nothing more is written
            pass
    os.kill(os.getpid(), signal.SIGTERM)  # leaves a checkpoint
    threading.Event().wait(GRACE_S)
    os.killpg(0, signal.SIGKILL)
