"""Python's fork server, for processes that start with torch and the runner imported."""

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
    """Return whether the system supports it; system libraries of others do not survive a fork."""
    return sys.platform == "linux"


def start(preload: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start it with an environment, unless it runs; it imports `preload` in advance.

    PYTHONSAFEPATH keeps the current folder, with possibly a foreign `socket.py`, off its path.
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
    """Kill it, if it runs. Its children must have ended: their exit codes would be lost."""
    if is_running():
        os.kill(_server()._forkserver_pid, signal.SIGKILL)
    _server()._stop()


def module_path() -> str:
    """Return PYTHONPATH for child processes, without the current folder unless it was listed."""
    here = os.getcwd()
    typed = {os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p}
    paths = [p for p in map(os.path.abspath, sys.path) if p != here or here in typed]
    if not in_current_folder() or sys.flags.safe_path:
        paths.append(str(Path(runner.__file__).parents[1]))
    return os.pathsep.join(dict.fromkeys(paths))


def in_current_folder() -> bool:
    """Return whether the runner's package is in the current folder."""
    return str(Path(runner.__file__).resolve().parents[1]) == os.path.realpath(os.getcwd())


def has_threads() -> bool:
    """Return whether this process's fork server has several threads: unfit to fork (Linux)."""
    return len(os.listdir(f"/proc/{_server()._forkserver_pid}/task")) > 1


def is_running() -> bool:
    """Return whether this process's fork server runs."""
    pid = _server()._forkserver_pid
    if pid is None:
        return False
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return False


def _server() -> Any:
    return forkserver._forkserver  # one per process, without a public name


def is_fit() -> bool:
    """Return whether this process may be forked: it has one thread and no CUDA context."""
    torch = sys.modules.get("torch")
    touched = torch is not None and torch.cuda.is_initialized()
    return not touched and threading.active_count() == 1
