"""Pass a context to a job's process, and its report back; end the process with its parent."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from runner.core.masking import add_secret, known_secrets
from runner.core.process_wait import watch_parent
from runner.core.schemas.sweep import JOB_VARIABLE

ORPHAN_GRACE_S = 60.0  # for a checkpoint, after the sweep's process has ended
_report_ends: dict[int, int] = {}  # by the pid of a job, where it reports to


@dataclass(frozen=True)
class JobContext:
    """What the launcher adds to the command line.

    `folder_trusted`: the user named the folder. `secrets`: variables whose values are masked.
    """

    overrides: list[str] = field(default_factory=list)
    folder_trusted: bool = True
    secrets: list[str] = field(default_factory=list)


def parent_death_pipe(
    overrides: Sequence[str], folder_trusted: bool = True
) -> tuple[dict[str, str], int, int]:
    """Return an environment variable, a stdin and a write end, to start a job with.

    The context is in the pipe, so that a stale variable has no effect. The job lives as long as the
    write end is open, and reports through it (`has_reported_end`).
    """
    read_end, write_end = (end.detach() for end in socket.socketpair())
    context = JobContext(list(overrides), folder_trusted, sorted(set(known_secrets().values())))
    os.write(write_end, json.dumps(asdict(context)).encode())
    return {JOB_VARIABLE: "1"}, read_end, write_end


def take_job_context() -> JobContext:
    """Return the launcher's context; an empty one if this process is not a job.

    It is not on the command line, so that the recorded command can be repeated; the variable is
    deleted, so that runners of user code are no jobs. This process now ends with its parent.
    """
    if os.environ.pop(JOB_VARIABLE, None) is None:
        return JobContext()
    try:
        message = json.loads(_read_stdin())
        overrides, secrets = (list(map(str, message[key])) for key in ("overrides", "secrets"))
        context = JobContext(overrides, message["folder_trusted"] is True, secrets)
    except (ValueError, LookupError, TypeError, RecursionError):
        return JobContext()
    for name in context.secrets:
        add_secret(name, os.environ.get(name, ""))
    watch_parent(0, _end)
    _report_ends[os.getpid()] = os.dup(0)  # user code may close or replace stdin
    return context


def report_end() -> None:
    """Tell the sweep that this job has come to its end; user code may have ended it before."""
    if (descriptor := _report_ends.get(os.getpid())) is not None:  # None: no job, or a fork of one
        with suppress(OSError):
            os.write(descriptor, b"1")


def has_reported_end(write_end: int) -> bool:
    """Whether the job, whose process has ended, came to its end."""
    return bool(select.select([write_end], [], [], 0)[0] and os.read(write_end, 1))


def _read_stdin() -> bytes:
    """Read what a socket on stdin already holds; b"" if it is not a socket."""
    with suppress(OSError):
        if stat.S_ISSOCK(os.fstat(0).st_mode) and select.select([0], [], [], 0)[0]:
            return os.read(0, 1 << 16)
    return b""


def _end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)  # the job saves a checkpoint
    threading.Event().wait(ORPHAN_GRACE_S)
    os.killpg(0, signal.SIGKILL)
