"""A child process that answers requests through a pipe and reports how it ended. Torch-free."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from runner.core import fork_server
from runner.core.device import cgroup
from runner.core.errors import ProcessLost, UsageError, WorkerFailure
from runner.core.parent_death import watch_parent
from runner.core.process_wait import STOPPED, PolledClock, describe_state, process_state
from runner.core.record.storage import make_folder, safe_opener
from runner.core.schemas.device import omp_env
from runner.core.security.masked_process import MaskingState, run_masked

WAIT_SLICE_S = 1.0  # of a wait for an answer
EXIT_TIMEOUT_S = 5.0  # for a process to exit after it was asked to
UNGUARDED_EXIT_CODE = 77  # exit code of a child that imported an unguarded script


class UnguardedScript(UsageError):
    """The script lacks a `__main__` guard, so each worker would run it again."""


@dataclass(frozen=True)
class RequestFailure:
    """Answer of a child whose request failed."""

    status: str  # failed | oom
    reason: str


@dataclass(frozen=True)
class ChildContext:
    """What the child receives from its parent."""

    pipe: Connection
    parent_death_pipe: Connection  # closed when the parent ends
    log: Path | None
    start_method: str  # of the parent
    environment: dict[str, str]


class ChildProcess:
    """The parent's side of a child process. It handles one request at a time.

    `main(child, *arguments)` runs in the child, with a `ChildContext`. The child and its
    descendants end with the parent. `forked` uses the fork server, which must be running; else the
    child is spawned. `ask` and `answer` raise WorkerFailure if the process has ended.
    """

    def __init__(
        self,
        main: Callable[..., None],
        arguments: tuple[Any, ...],
        log: Path | None,
        forked: bool = False,
    ) -> None:
        context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
        self.log, self.forked = log, forked
        self.has_answered = False  # at least one request
        self.oom_kills = cgroup.oom_kills() or 0
        self.pipe, child_pipe = context.Pipe()
        death_pipe, self.parent_death_pipe = context.Pipe(duplex=False)
        self.child_ends = child_pipe, death_pipe
        environment = {**os.environ, **omp_env(os.environ)}
        if sys.flags.safe_path:
            environment["PYTHONSAFEPATH"] = "1"
        method = multiprocessing.get_start_method()
        child = ChildContext(child_pipe, death_pipe, log, method, environment)
        # not a daemon: daemons may have no children, but runs start data workers and compilers
        child_arguments = MaskingState(), _run_child, main, child, arguments
        self.process = context.Process(target=run_masked, args=child_arguments, daemon=False)

    def start(self, start_s: float = fork_server.START_S) -> None:
        """Start the process; the fork server has `start_s` for its imports."""
        exit_if_imported()
        try:
            with worker_environment(), block_interrupt():
                if self.forked:
                    fork_server.start_process(self.process, start_s)
                else:
                    self.process.start()
        except ProcessLost as lost:
            raise WorkerFailure("killed", str(lost)) from None
        finally:
            for end in self.child_ends:
                end.close()

    @property
    def pid(self) -> int:
        """Process id, which is also its group id; 0 before the start."""
        return self.process.pid or 0

    def ask(self, request: Any) -> None:
        """Send a request; bytes are sent as they are."""
        try:
            if isinstance(request, bytes):
                self.pipe.send_bytes(request)
            else:
                self.pipe.send(request)
        except OSError:
            raise self._describe_exit() from None

    def answer(self, timeout_s: float) -> Any:
        """Wait up to `timeout_s` for the answer.

        Raises WorkerFailure; the caller still has to call `end`.
        """
        clock, waited = PolledClock(WAIT_SLICE_S), 0.0
        ends = [self.pipe, self.process.sentinel]
        while not wait(ends, max(0.0, min(WAIT_SLICE_S, timeout_s - waited))):
            if (waited := clock.poll()) >= timeout_s:
                state = describe_state(self.pid) if process_state(self.pid) == STOPPED else ""
                raise WorkerFailure("timeout", f"it was not done within {timeout_s:.4g} s{state}")
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            raise self._describe_exit() from None
        self.has_answered = True
        if isinstance(answer, RequestFailure):
            raise WorkerFailure(answer.status, f"{answer.reason}{self._log_path_text()}")
        return answer

    def request_exit(self) -> None:
        """Tell an idle process to exit."""
        with suppress(OSError):
            self.pipe.send(None)

    def wait(self, seconds: float) -> None:
        """Wait for the process to exit, for at most `seconds`."""
        self.process.join(max(0.0, seconds))

    def end(self) -> None:
        """Kill the process and all its descendants."""
        if not self.pid:
            return
        children: list[psutil.Process] = []
        with suppress(psutil.Error):
            children = psutil.Process(self.pid).children(recursive=True)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()  # it may have no group of its own yet
        for process in children:
            with suppress(psutil.Error):  # psutil compares start times, so a reused id is safe
                process.kill()
        if self.forked and fork_server.is_running():
            self.process.join(EXIT_TIMEOUT_S)
            if self.process.exitcode is None:  # the fork server does not report its end
                fork_server.kill()
        self.process.join()
        self.pipe.close()
        self.parent_death_pipe.close()

    def _describe_exit(self) -> WorkerFailure:
        """Return how a process ended that sent no answer. Raises UnguardedScript."""
        self.process.join(EXIT_TIMEOUT_S)
        code, hint = self.process.exitcode, self._log_path_text()
        if code == UNGUARDED_EXIT_CODE and not self.has_answered:
            script = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "the script")
            raise UnguardedScript(
                f'{script.name} must do this under `if __name__ == "__main__":`, because '
                "the measured processes import it"
            )
        if code is None or code >= 0:
            return WorkerFailure("failed", f"it ended with exit code {code}{hint}")
        if code == -signal.SIGKILL and (cgroup.oom_kills() or 0) > self.oom_kills:
            return WorkerFailure("oom", f"killed by the system: out of memory{hint}")
        return WorkerFailure("killed", f"killed by {signal.Signals(-code).name}{hint}")

    def _log_path_text(self) -> str:
        return f"; see {self.log}" if self.log is not None and self.log.exists() else ""


def exit_if_imported() -> None:
    """Exit if this is a worker in which an unguarded script starts workers again."""
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        os._exit(UNGUARDED_EXIT_CODE)  # the fork server would map an exception to another code


@contextmanager
def worker_environment() -> Iterator[None]:
    """Set passive OpenMP threads, and exclude the current folder from sys.path.

    Python would otherwise put the folder first before the parent's path is known.
    """
    before = dict(os.environ)
    os.environ.update({**omp_env(os.environ), "PYTHONSAFEPATH": "1"})
    try:
        yield
    finally:
        for key in os.environ.keys() - before.keys():
            del os.environ[key]
        os.environ.update(before)


@contextmanager
def block_interrupt() -> Iterator[None]:
    """Block SIGINT until the new process has its own session."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- in the child ----------------------------------------------------------------------------------


def _run_child(main: Callable[..., None], child: ChildContext, arguments: tuple[Any, ...]) -> None:
    """Start a session with its own log that ends with the parent, then call `main`."""
    os.setsid()
    fork_server.leave()
    # Restore the parent's start method: forked workers have unnamed locks, which a process that
    # is killed cannot leave behind.
    multiprocessing.set_start_method(child.start_method, force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C of the terminal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    redirect_output(child.log)
    watch_parent(child.parent_death_pipe.fileno())
    os.environ.clear()  # the fork server's may be stale; PYTHONSAFEPATH was for the start only
    os.environ.update(child.environment)
    main(child, *arguments)
    sys.stdout.flush()
    sys.stderr.flush()


def redirect_output(log: Path | None) -> None:
    """Redirect stdout and stderr, including those of native code and crashes, to the log."""
    try:
        if log is not None:
            make_folder(log.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        file = os.open(os.devnull, flags) if log is None else safe_opener(log, flags)
    except OSError:
        file = os.open(os.devnull, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    faulthandler.enable()
