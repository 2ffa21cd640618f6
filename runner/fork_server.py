"""Python's fork server: new processes that have torch and the runner imported already."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver

__all__ = ["available", "is_fit", "start"]


def available() -> bool:
    """Whether processes can be forked here; elsewhere system libraries do not outlive it."""
    return sys.platform == "linux"


def start(preload: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start it with that environment, unless it runs; what it imports is ready at the first fork.

    It would put the current folder first on its module path, where anybody's `socket.py` may lie.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
    before, own = dict(os.environ), {**environment, "PYTHONSAFEPATH": "1"}
    try:
        os.environ.clear()
        os.environ.update(own)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def is_fit() -> bool:
    """Whether this process may be forked: a child has no other thread, and no context of a GPU."""
    torch = sys.modules.get("torch")
    touched = torch is not None and torch.cuda.is_initialized()
    return not touched and threading.active_count() == 1
