"""Python's fork server: new processes that have torch and the runner imported already."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import runner


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


def stop() -> None:
    """End it, if it runs. What it has started must have ended: nothing would say how it does."""
    if is_running():
        os.kill(_server()._forkserver_pid, signal.SIGKILL)
    _server()._stop()


def module_path() -> str:
    """PYTHONPATH for processes like this one, without a current folder that was not named."""
    here = os.getcwd()
    typed = {os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p}
    paths = [p for p in map(os.path.abspath, sys.path) if p != here or here in typed]
    if not in_current_folder() or sys.flags.safe_path:
        paths.append(str(Path(runner.__file__).parents[1]))
    return os.pathsep.join(dict.fromkeys(paths))


def in_current_folder() -> bool:
    """Whether the runner's own package lies there."""
    return str(Path(runner.__file__).resolve().parents[1]) == os.path.realpath(os.getcwd())


def has_threads() -> bool:
    """Whether the one that this process has started is no longer fit to be forked (Linux)."""
    return len(os.listdir(f"/proc/{_server()._forkserver_pid}/task")) > 1


def is_running() -> bool:
    """Whether the one that this process has started has not ended."""
    pid = _server()._forkserver_pid
    if pid is None:
        return False
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return False


def _server() -> Any:
    return forkserver._forkserver  # a process has one, and no public name for it


def is_fit() -> bool:
    """Whether this process may be forked: a child has no other thread, and no context of a GPU."""
    torch = sys.modules.get("torch")
    touched = torch is not None and torch.cuda.is_initialized()
    return not touched and threading.active_count() == 1
