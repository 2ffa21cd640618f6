"""A job of a sweep, seen from within: what it is told besides its command line, and its end."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import suppress

VARIABLE = "RUNNER_JOB"
PATIENCE_S = 60.0  # for a checkpoint, once the sweep's process is gone


def overrides() -> list[str]:
    """What the launcher adds to what was typed: where to write, and what else there is to compare.

    They come through the environment, so that the command in the record is one to type, and are
    taken out of it, so that a runner that the user's code starts is none of this sweep. From then
    on the process ends, with all that it started, when the one that started it is gone.
    """
    told = os.environ.pop(VARIABLE, None)
    if told is None:
        return []
    if hasattr(os, "killpg"):
        threading.Thread(target=_end_with_parent, daemon=True).start()
    return [str(text) for text in json.loads(told)]


def _end_with_parent() -> None:
    with suppress(OSError):
        while os.read(0, 1):  # waits: the other end is never written to, only closed
            pass
    os.kill(os.getpid(), signal.SIGTERM)  # leaves a checkpoint
    threading.Event().wait(PATIENCE_S)
    os.killpg(0, signal.SIGKILL)
