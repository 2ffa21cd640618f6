"""Python's fork server: new processes start with torch and the runner imported."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import runner


def available() -> bool:
    """Whether forking is supported: on other systems system libraries do not survive it."""
    return sys.platform == "linux"


def start(preload: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start the server with an environment, unless it runs; `preload` is imported before a fork.

    PYTHONSAFEPATH keeps the current folder, with any `socket.py`, off its module path.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
    before, server_environment = dict(os.environ), {**environment, "PYTHONSAFEPATH": "1"}
    try:
        os.environ.clear()
        os.environ.update(server_environment)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def stop() -> None:
    """Kill the server, if it runs. Its processes must have ended, or their exit codes are lost."""
    if is_running():
        os.kill(_server()._forkserver_pid, signal.SIGKILL)
    _server()._stop()


def leave() -> None:
    """Close the pipes by which a child keeps the server and its resource tracker alive.

    Processes that user code leaves behind would inherit them.
    """
    for owner, name in (
        (_server(), "_forkserver_alive_fd"),
        (resource_tracker._resource_tracker, "_fd"),
    ):
        descriptor: int | None = getattr(owner, name)
        setattr(owner, name, None)
        if descriptor is not None:
            os.close(descriptor)


def child_pythonpath() -> str:
    """Return PYTHONPATH for child processes, without an implicit current folder."""
    folder = os.getcwd()
    explicit = {os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p}
    paths = [p for p in map(os.path.abspath, sys.path) if p != folder or folder in explicit]
    if not in_current_folder() or sys.flags.safe_path:
        paths.append(str(Path(runner.__file__).parents[1]))
    return os.pathsep.join(dict.fromkeys(paths))


def in_current_folder() -> bool:
    """Whether the runner's package is in the current folder."""
    return str(Path(runner.__file__).resolve().parents[1]) == os.path.realpath(os.getcwd())


def has_threads() -> bool:
    """Whether the server has threads and so can no longer be forked (Linux)."""
    return len(os.listdir(f"/proc/{_server()._forkserver_pid}/task")) > 1


def is_running() -> bool:
    """Whether the server that this process started is running."""
    pid = _server()._forkserver_pid
    if pid is None:
        return False
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return False


def _server() -> Any:
    return forkserver._forkserver  # one per process, without a public name


def can_fork() -> bool:
    """Whether this process may be forked: it has a single thread and no CUDA context."""
    torch = sys.modules.get("torch")
    uses_cuda = torch is not None and torch.cuda.is_initialized()
    return not uses_cuda and threading.active_count() == 1
