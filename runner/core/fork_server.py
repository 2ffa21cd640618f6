"""Python's fork server: new processes start with torch and the runner imported."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from typing import Any

from runner.core.errors import ProcessLost, StorageError
from runner.core.module_path import PACKAGE
from runner.core.process_wait import PolledClock, describe_state

START_S = 300.0  # default of `data.timeout_s`, for the server to import its modules
ANSWER_S = 60.0  # for a server that has started a process before
POLL_S = 0.1
SERVER_LOST = 255  # exit code that multiprocessing reports if the server was lost
PIPE_CLOSE_S = 1.0  # from the closing of a server's pipes to its exit
SOCKET_FOLDER_BYTES = 75  # of 107 for a socket's path; /pymp-12345678/listener-12345678 is added
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108  # in which a private one is made
_answered: list[int] = []  # pid of the server that has started a process


def available() -> bool:
    """Whether forking is supported: on other systems system libraries do not survive it."""
    return sys.platform == "linux" and _short_folder() is not None


def start(preload: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start the server with an environment, unless it runs; `preload` is imported before a fork.

    PYTHONSAFEPATH keeps the current folder, with any `socket.py`, off its module path.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
    _make_socket_folder()
    before, server_environment = dict(os.environ), {**environment, "PYTHONSAFEPATH": "1"}
    try:
        os.environ.clear()
        os.environ.update(server_environment)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def start_process(
    process: Any, start_s: float = START_S, cancelled: Callable[[], bool] = bool
) -> None:
    """Start a process by the server, within `start_s`, or ANSWER_S if it has started one before.

    Raises ProcessLost for a server that was killed, or gives no answer; `cancelled` ends the wait.
    """
    pid, errors = _server()._forkserver_pid, list[BaseException]()

    def start_in_thread() -> None:  # its read cannot be interrupted
        try:
            process.start()
        except BaseException as error:
            errors.append(error)

    if pid is not None and not is_running():
        raise ProcessLost(f"the fork server (pid {pid}) was killed")
    thread = threading.Thread(target=start_in_thread, name="fork", daemon=True)
    clock, limit, state = PolledClock(), ANSWER_S if pid in _answered else start_s, ""
    thread.start()
    try:
        while thread.is_alive() and clock.poll() < limit and not cancelled():
            thread.join(POLL_S)
    finally:
        if unanswered := thread.is_alive():
            state = describe_state(pid or 0)
            kill()
            thread.join()
    if unanswered and not cancelled():
        raise ProcessLost(f"the fork server gave no answer for {limit:g} s{state}: it was killed")
    if errors and isinstance(errors[0], OSError | EOFError) and has_ended(PIPE_CLOSE_S):
        raise ProcessLost(f"the fork server (pid {pid}) was killed")
    if errors and not unanswered:
        raise errors[0]
    _answered[:] = [_server()._forkserver_pid]


def kill() -> None:
    """Kill the server, even if it is stopped; `start` starts another one."""
    if is_running():
        os.kill(_server()._forkserver_pid, signal.SIGKILL)
        os.waitid(os.P_PID, _server()._forkserver_pid, os.WEXITED | os.WNOWAIT)


def has_ended(within_s: float) -> bool:
    """Whether the server has ended, or does so within a time."""
    clock = PolledClock()
    while (running := is_running()) and clock.poll() < within_s:
        time.sleep(POLL_S / 5)
    return not running


def server_pid() -> int | None:
    """Return the pid of the server that was started last; None before."""
    pid: int | None = _server()._forkserver_pid
    return pid


def stop() -> None:
    """Kill the server, if it runs. Its processes must have ended, or their exit codes are lost."""
    kill()
    _server()._stop()


def leave() -> None:
    """Close the pipes by which a child, and what it leaves, keep server and tracker alive."""
    tracker: Any = resource_tracker._resource_tracker
    for owner, name in ((_server(), "_forkserver_alive_fd"), (tracker, "_fd")):
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
        paths.append(os.path.dirname(PACKAGE))
    return os.pathsep.join(dict.fromkeys(paths))


def in_current_folder() -> bool:
    """Whether the runner's package is in the current folder."""
    return os.path.dirname(os.path.realpath(PACKAGE)) == os.path.realpath(os.getcwd())


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


def _short_folder() -> str | None:
    """Return the folder of temporary files, or another one whose path is short enough."""
    folders = (tempfile.gettempdir(), *SHORT_FOLDERS)
    short = (f for f in folders if len(os.fsencode(f)) <= SOCKET_FOLDER_BYTES)
    return next((folder for folder in short if os.access(folder, os.W_OK)), None)


def _make_socket_folder() -> None:
    """Make the folder of this process's sockets; multiprocessing removes it at the end."""
    before, folder = tempfile.tempdir, _short_folder()
    if folder is None:
        places = " and ".join(SHORT_FOLDERS)
        problem = f"{tempfile.gettempdir()} is too long for sockets, {places} cannot be written"
        fix = f"set a folder of at most {SOCKET_FOLDER_BYTES} bytes"
        raise StorageError(f"TMPDIR: {problem}; {fix}")
    try:
        tempfile.tempdir = folder
        util.get_temp_dir()
    finally:
        tempfile.tempdir = before


def _server() -> Any:
    return forkserver._forkserver  # one per process, without a public name


def can_fork() -> bool:
    """Whether this process may be forked: it has a single thread and no CUDA context."""
    torch = sys.modules.get("torch")
    uses_cuda = torch is not None and torch.cuda.is_initialized()
    return not uses_cuda and threading.active_count() == 1
