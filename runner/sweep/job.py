"""What a job's process gets beside its command line, and its end with its parent's."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

VARIABLE = "RUNNER_JOB"
GRACE_S = 60.0  # for a checkpoint, once the sweep's process is gone
PLUGINS = str(Path(__file__).resolve().parents[1] / "plugins")


@dataclass(frozen=True)
class JobContext:
    """What the launcher adds to what was typed: the folder to write to, and values to compare.

    `chosen`: somebody chose the sweep's folder; one that is continued may be anybody's.
    """

    overrides: list[str] = field(default_factory=list)
    chosen: bool = True


def parent_death_pipe(
    overrides: Sequence[str], chosen: bool = True
) -> tuple[dict[str, str], int, int]:
    """What the launcher starts a job with: variables, its stdin, and the pipe's other end.

    The same token is in both, so that a stale variable makes no job. The other end is to be held
    open as long as the job is to live.
    """
    token = secrets.token_hex(16)
    reads, writes = os.pipe()
    os.write(writes, token.encode())
    message = {"token": token, "overrides": list(overrides), "chosen": chosen}
    return {VARIABLE: json.dumps(message)}, reads, writes


def take_job_context() -> JobContext:
    """The launcher's context; an empty one where this process is no job.

    It comes through the environment, so that the recorded command can be typed, and is taken out
    of it, so that a runner that the user's code starts is none of this sweep. From then on the
    process ends, with all that it started, when its parent ends.
    """
    try:
        message = json.loads(os.environ.pop(VARIABLE, "null"))
        token, chosen = str(message["token"]), message["chosen"] is True
        overrides = [str(text) for text in message["overrides"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        return JobContext()
    if not token or _stdin(len(token)) != token.encode():
        return JobContext()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return JobContext(overrides, chosen)


def _stdin(count: int) -> bytes:
    """What a pipe there holds already; nothing where it is no pipe."""
    with suppress(OSError):
        if stat.S_ISFIFO(os.fstat(0).st_mode) and select.select([0], [], [], 0)[0]:
            return os.read(0, count)
    return b""


def _end_with_parent() -> None:
    with suppress(OSError):
        while os.read(0, 1):  # blocks until the other end is closed; nothing more is written
            pass
    os.kill(os.getpid(), signal.SIGTERM)  # leaves a checkpoint
    threading.Event().wait(GRACE_S)
    os.killpg(0, signal.SIGKILL)


def register_plugins_for_children() -> None:
    """Let processes that other launchers start import what unpickling Hydra's plugins needs.

    Their module path lacks the current folder, which `python -m` would put first.
    """
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    root = Path(PLUGINS).parents[1]
    ours = [PLUGINS, *([str(root)] if root == Path.cwd().resolve() else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, *ours]))
    os.environ["PYTHONSAFEPATH"] = "1"
