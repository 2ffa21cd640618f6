"""Processes that this one starts: their limits, signals and end. Torch-free.

`ChildProcess` is any process of multiprocessing or subprocess; `RequestProcess` also answers
requests through a pipe. By `run_masked` a process masks from its first line on what this one masks.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from traceback import format_exception
from types import TracebackType
from typing import Any

import psutil

from runner.core import fork_server, process_wait
from runner.core.device import cgroup
from runner.core.errors import ProcessLost, UsageError, WorkerFailure
from runner.core.masking import mask_secrets
from runner.core.process_wait import ENDED, STOPPED, PolledClock, describe_state, process_state
from runner.core.record.storage import make_folder, safe_opener
from runner.core.schemas.device import omp_env
from runner.core.security.secrets import adopt_masking_state, masking_state

POLL_S = 0.1
WAIT_SLICE_S = 1.0  # of a wait for an answer
KILL_S = 10.0  # for a process to die after SIGKILL
EXIT_TIMEOUT_S = 5.0  # for a process to exit after it was asked to
UNGUARDED_EXIT_CODE = 77  # exit code of a child that imported an unguarded script


class ChildProcess:
    """A process that this one starts; it has its own session or group, which ends with it.

    `handle` is that of multiprocessing or of subprocess. A forked process may lose its exit code:
    the fork server reports it, and is killed if it does not (`problem`).
    """

    def __init__(self, handle: Any, forked: bool = False) -> None:
        self.handle, self.forked = handle, forked
        self.clock = PolledClock()  # since the start, without the time in which this one is stopped
        self.problem = ""  # of the fork server
        self.oom_kills = cgroup.oom_kills() or 0
        self._server: int | None = fork_server.server_pid()
        self._since: dict[str, float] = {}  # its state → time of the clock since which it has it

    def start(
        self, start_s: float = fork_server.START_S, cancelled: Callable[[], bool] = bool
    ) -> None:
        """Start a process of multiprocessing; the fork server has `start_s` for its imports.

        Raises ProcessLost for the fork server, whose wait `cancelled` ends.
        """
        if self.forked:
            fork_server.start_process(self.handle, start_s, cancelled)
        else:
            self.handle.start()
        self.clock, self._server = PolledClock(), fork_server.server_pid()

    @property
    def pid(self) -> int:
        """Process id, which is also its group id; 0 before the start."""
        pid: int = self.handle.pid or 0
        return pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs, and before the start."""
        code: int | None
        if isinstance(self.handle, Popen):
            code = self.handle.poll()
        else:
            code = self.handle.exitcode if self.pid else None
        return code

    def poll(self) -> int | None:
        """Return the exit code; count the time in its state. Kills a silent fork server."""
        now, code = self.clock.poll(), self.exit_code
        state = process_state(self.pid) if code is None else ""
        self._since = {state: self._since.get(state, now)}
        if self.forked and state == ENDED and now - self._since[ENDED] > fork_server.ANSWER_S:
            server = describe_state(fork_server.server_pid() or 0)
            problem = f"the fork server{server} reported no exit for {fork_server.ANSWER_S:g} s"
            self.problem = f"{problem}: it was killed, and the processes with it"
            fork_server.kill()
        return code

    @property
    def stopped_s(self) -> float:
        """For how long the process has been stopped, when last polled."""
        return self.clock.seconds - self._since.get(STOPPED, self.clock.seconds)

    def has_lost_server(self) -> bool:
        """Whether its exit code is unknown, because the fork server has ended."""
        if not self.forked or self.exit_code != fork_server.SERVER_LOST:
            return False
        return fork_server.server_pid() != self._server or fork_server.has_ended(0.0)

    def wait(self, seconds: float = inf) -> int | None:
        """Wait for the process to exit, for at most `seconds`; return its exit code."""
        clock = PolledClock()
        while (code := self.poll()) is None and (left := seconds - clock.poll()) > 0:
            if isinstance(self.handle, Popen):
                with suppress(TimeoutExpired):
                    self.handle.wait(min(POLL_S, left))
            else:
                self.handle.join(min(POLL_S, left))
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it still exists."""
        if self.pid and (self.exit_code is None or self.has_lost_server()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and its group."""
        with suppress(ProcessLookupError, PermissionError):
            if self.pid:
                os.killpg(self.pid, signal.SIGKILL)
        self.send_signal(signal.SIGKILL)  # it may have no group of its own yet

    def end(self) -> None:
        """Kill the process and all its descendants, and wait for its end."""
        if not self.pid:
            return
        descendants: list[psutil.Process] = []
        with suppress(psutil.Error):
            if self.exit_code is None:  # else the process id may be that of another one
                descendants = psutil.Process(self.pid).children(recursive=True)
        self.kill()
        for process in descendants:
            with suppress(psutil.Error):  # psutil compares start times, so a reused id is safe
                process.kill()
        self.wait()
        if self.has_lost_server():  # the kernel reports its end to another process
            clock = PolledClock()
            while process_state(self.pid) not in ("", ENDED) and clock.poll() < KILL_S:
                time.sleep(POLL_S / 5)

    def describe_end(self) -> tuple[str, str]:
        """Return the status (failed, killed or oom) and reason of an end without an answer."""
        code = self.exit_code
        if code == -signal.SIGKILL and (cgroup.oom_kills() or 0) > self.oom_kills:
            return "oom", "was killed by the kernel: out of memory"
        status = "killed" if code is not None and code < 0 else "failed"
        return status, process_wait.describe_exit(code)


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
    log: Path | None
    start_method: str  # of the parent
    environment: dict[str, str]


class RequestProcess(ChildProcess):
    """The parent's side of a child that handles one request at a time.

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
        self.log = log
        self.has_answered = False  # at least one request
        self.pipe, self.child_pipe = context.Pipe()
        environment = {**os.environ, **omp_env(os.environ)}
        if sys.flags.safe_path:
            environment["PYTHONSAFEPATH"] = "1"
        child = ChildContext(self.child_pipe, log, multiprocessing.get_start_method(), environment)
        # not a daemon: daemons may have no children, but runs start data workers and compilers
        child_arguments = MaskingState(), _run_child, main, child, arguments
        handle = context.Process(target=run_masked, args=child_arguments, daemon=False)
        super().__init__(handle, forked)

    def start(
        self, start_s: float = fork_server.START_S, cancelled: Callable[[], bool] = bool
    ) -> None:
        """Start the process; the fork server has `start_s` for its imports."""
        exit_if_imported()
        try:
            with worker_environment(), block_interrupt():
                super().start(start_s, cancelled)
        except ProcessLost as lost:
            raise WorkerFailure("killed", str(lost)) from None
        finally:
            self.child_pipe.close()

    def ask(self, request: Any) -> None:
        """Send a request; bytes are sent as they are."""
        try:
            if isinstance(request, bytes):
                self.pipe.send_bytes(request)
            else:
                self.pipe.send(request)
        except OSError:
            raise self._exit_failure() from None

    def answer(self, timeout_s: float) -> Any:
        """Wait up to `timeout_s` for the answer. After WorkerFailure the caller calls `end`."""
        clock, waited = PolledClock(WAIT_SLICE_S), 0.0
        ends = [self.pipe, self.handle.sentinel]
        while not wait(ends, max(0.0, min(WAIT_SLICE_S, timeout_s - waited))):
            if (waited := clock.poll()) >= timeout_s:
                state = describe_state(self.pid) if process_state(self.pid) == STOPPED else ""
                raise WorkerFailure("timeout", f"it was not done within {timeout_s:.4g} s{state}")
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            raise self._exit_failure() from None
        self.has_answered = True
        if isinstance(answer, RequestFailure):
            raise WorkerFailure(answer.status, f"{answer.reason}{self._log_path_text()}")
        return answer

    def request_exit(self) -> None:
        """Tell an idle process to exit."""
        with suppress(OSError):
            self.pipe.send(None)

    def end(self) -> None:
        """Kill the process and all its descendants."""
        super().end()
        self.pipe.close()

    def _exit_failure(self) -> WorkerFailure:
        """Return how a process ended that sent no answer. Raises UnguardedScript."""
        code = self.wait(EXIT_TIMEOUT_S)
        if code == UNGUARDED_EXIT_CODE and not self.has_answered:
            script = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "the script")
            guard = 'if __name__ == "__main__":'
            raise UnguardedScript(f"{script.name} must do this under `{guard}`: workers import it")
        status, reason = self.describe_end()
        return WorkerFailure(status, f"it {reason}{self._log_path_text()}")

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
    detach(child.start_method)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C of the terminal
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a fork server of ranks blocks signals
    redirect_output(child.log)
    end_with_parent(process_wait.kill_group)
    os.environ.clear()  # the fork server's may be stale; PYTHONSAFEPATH was for the start only
    os.environ.update(child.environment)
    main(child, *arguments)
    sys.stdout.flush()
    sys.stderr.flush()


def detach(start_method: str | None = None) -> None:
    """Give a new process its own session, without the pipes of the fork server.

    Its own children start by `start_method`; None, the default, forks, with unnamed locks.
    """
    os.setsid()
    fork_server.leave()
    multiprocessing.set_start_method(start_method, force=True)


def end_with_parent(end: Callable[[], None]) -> None:
    """Call `end` in a thread of a new process when its parent ends."""
    if (parent := multiprocessing.parent_process()) is not None:
        process_wait.watch_parent(parent.sentinel, end)


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


class MaskingState:
    """What this process masks. Unpickled in a new process, it makes that one mask the same.

    It must be the process's first argument: others may run the user's code when unpickled. It is
    sent through the pipe that starts the process; a fork needs none.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _adopt, masking_state()


def _adopt(*state: Any) -> MaskingState:
    adopt_masking_state(*state)
    sys.excepthook = _print_masked  # of errors while the other arguments are unpickled
    return MaskingState()


def run_masked(_: MaskingState, main: Callable[..., object], *arguments: Any) -> None:
    """Call `main`; target of all processes that multiprocessing starts. It prints no secrets."""
    try:
        main(*arguments)
    except BaseException as error:
        if isinstance(error, SystemExit) and not isinstance(error.code, str):
            raise
        _print_masked(type(error), error, error.__traceback__)
        sys.exit(1)


def _print_masked(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    sys.stderr.write(mask_secrets("".join(format_exception(kind, error, trace))))
