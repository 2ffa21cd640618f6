"""A process that ends with its parent, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of prctl(2)


def die_with_parent(parent: int | None = None) -> None:
    """On Linux, have the kernel kill this process when its parent has ended, also a stopped one.

    The parent is the thread that started it. `parent` is its pid, if it may have ended before.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
