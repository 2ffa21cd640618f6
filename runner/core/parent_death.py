"""Termination of a process with its parent."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # of prctl(2)


def die_with_parent(parent: int | None = None) -> None:
    """On Linux, make the kernel kill this process, even if stopped, when its parent ends.

    The parent is the thread that started it. `parent` is its pid, in case it has ended already.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def kill_group() -> None:
    """Kill this process and its group."""
    os.killpg(0, signal.SIGKILL)


def watch_parent(descriptor: int, end: Callable[[], None] = kill_group) -> None:
    """Call `end` in a thread when the parent's end of a pipe closes, as when the parent dies."""
    poll = select.poll()
    poll.register(descriptor, 0)  # a hang-up is always reported

    def wait() -> None:
        poll.poll()
        end()

    threading.Thread(target=wait, daemon=True).start()
