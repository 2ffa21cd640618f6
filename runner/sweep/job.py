"""What a job's process gets beside its command line, and its end with its parent's."""

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
GRACE_S = 60.0  # for a checkpoint, once the sweep's process is gone


@dataclass(frozen=True)
class JobContext:
    """What the launcher adds to what was typed: the folder to write to, and values to compare.

    `chosen`: the sweep's folder was chosen by the user; one that is continued may be anybody's.
    """

    overrides: list[str] = field(default_factory=list)
    chosen: bool = True


def parent_death_pipe(
    overrides: Sequence[str], chosen: bool = True
) -> tuple[dict[str, str], int, int]:
    """What the launcher starts a job with: a variable, its stdin, and the pipe's other end.

    The context is in the pipe, so that a stale variable makes no job. The other end is to be held
    open as long as the job is to live.
    """
    reads, writes = os.pipe()
    os.write(writes, json.dumps(asdict(JobContext(list(overrides), chosen))).encode())
    return {VARIABLE: "1"}, reads, writes


def take_job_context() -> JobContext:
    """The launcher's context; an empty one where this process is no job.

    It comes beside the command line, so that the recorded command can be typed; the variable is
    deleted, so that a runner that the user's code starts is none of this sweep. From then on the
    process ends, with all that it started, when its parent ends.
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
    """What a pipe there holds already; nothing where it is no pipe."""
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
