"""What a job's process gets beside its command line, and its end with its parent's."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import stat
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

VARIABLE = "RUNNER_JOB"
PATIENCE_S = 60.0  # for a checkpoint, once the sweep's process is gone


@dataclass(frozen=True)
class JobContext:
    """What the launcher adds to what was typed: where to write, and what else there is to compare.

    `chosen`: somebody chose the sweep's folder; one that is gone on with may be anybody's.
    """

    overrides: list[str] = field(default_factory=list)
    chosen: bool = True


def parent_death_pipe(told: Sequence[str], chosen: bool = True) -> tuple[dict[str, str], int, int]:
    """What the launcher starts a job with: variables, its stdin, and the pipe's other end.

    The same token is in both, so that a variable that somebody left behind makes no job. The other
    end is to be held open as long as the job is to live.
    """
    token = secrets.token_hex(16)
    reads, writes = os.pipe()
    os.write(writes, token.encode())
    message = {"token": token, "told": list(told), "chosen": chosen}
    return {VARIABLE: json.dumps(message)}, reads, writes


def take_job_context() -> JobContext:
    """Those of the launcher; none where this process is no job.

    They come through the environment, so that the command in the record is one to type, and are
    taken out of it, so that a runner that the user's code starts is none of this sweep. From then
    on the process ends, with all that it started, when the one that started it is gone.
    """
    found = os.environ.pop(VARIABLE, None)
    try:
        message = json.loads(found or "null")
        token, told = message["token"], [str(text) for text in message["told"]]
        chosen = message["chosen"] is True
    except (ValueError, LookupError, TypeError, RecursionError):
        return JobContext()
    if not (isinstance(token, str) and token and _on_stdin(len(token)) == token.encode()):
        return JobContext()
    if hasattr(os, "killpg"):
        threading.Thread(target=_end_with_parent, daemon=True).start()
    return JobContext(told, chosen)


def _on_stdin(count: int) -> bytes:
    """What a pipe there holds already; nothing where it is no pipe."""
    try:
        if stat.S_ISFIFO(os.fstat(0).st_mode) and select.select([0], [], [], 0)[0]:
            return os.read(0, count)
    except OSError:
        pass
    return b""


def _end_with_parent() -> None:
    with suppress(OSError):
        while os.read(0, 1):  # waits: nothing more is written to the other end, only closed
            pass
    os.kill(os.getpid(), signal.SIGTERM)  # leaves a checkpoint
    threading.Event().wait(PATIENCE_S)
    os.killpg(0, signal.SIGKILL)


FOLDER = str(Path(__file__).resolve().parents[1] / "plugins")


def register_plugins() -> None:
    """Put our part of the namespace last on the module path, for this process.

    To be called before Hydra looks for plugins, which it does once.
    """
    if FOLDER not in sys.path:
        sys.path.append(FOLDER)


def register_plugins_for_children() -> None:
    """For processes that other launchers start, which read back the list of plugins.

    They look for them on a path without the current folder, which `python -m` would put first.
    """
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    root = Path(FOLDER).parents[1]
    ours = [FOLDER, *([str(root)] if root == Path.cwd().resolve() else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, *ours]))
    os.environ["PYTHONSAFEPATH"] = "1"
