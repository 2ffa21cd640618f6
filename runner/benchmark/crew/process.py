"""One arm's process, from the side of the one who started it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil

from runner.benchmark.blocks import ArmEnded
from runner.benchmark.crew import worker
from runner.benchmark.crew.answers import Over
from runner.benchmark.crew.worker import LOG, Order
from runner.device import cgroup, openmp
from runner.errors import UsageError
from runner.record.text import escape_control_chars

PATIENCE_S = 5.0  # for processes that were asked to end
LEAVING_S = 30.0  # for one that is done, to close its files
UNGUARDED = 77  # how one ends in which the script would have started further ones
TAIL = 4096  # bytes of its log that are looked at when it died without a word
MEMORY = ("std::bad_alloc", "DefaultCPUAllocator", "Cannot allocate memory", "MemoryError")


class Unguarded(UsageError):
    """The script starts itself again in each process."""


class ArmProcess:
    """Answers one question at a time; `end` leaves nothing of it behind, whenever that is."""

    def __init__(self, name: str, order: Order) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = order.folder
        self.said = False  # anything yet
        self.oom_kills = cgroup.oom_kills() or 0
        self.pipe, self.theirs = context.Pipe()
        self.listens, self.lifeline = context.Pipe(duplex=False)
        # not a daemon: those may have no children, and runs have data workers and compilers
        self.process = context.Process(
            target=worker.main,
            args=(order, self.theirs, self.listens),
            name=f"arm {name}",
            daemon=False,
        )

    def start(self, parcel: bytes) -> None:
        """Begin; `parcel` is what the caller has made for it. ArmEnded if it is gone at once."""
        leave_if_imported()
        try:
            with environment(), no_interrupt():
                self.process.start()
        finally:
            self.theirs.close()
            self.listens.close()
        try:
            self.pipe.send_bytes(parcel)
        except OSError:
            raise self._died() from None

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        if self.process.pid is None:
            raise ValueError("it was not started")
        return self.process.pid

    def ask(self, question: Any) -> None:
        """Say what it is to do next. ArmEnded where it is no more."""
        try:
            self.pipe.send(question)
        except OSError:
            raise self._died() from None

    def answer(
        self, timeout_s: float, meanwhile: tuple[float, Callable[[], None]] | None = None
    ) -> Any:
        """What it says to that, within so long; `meanwhile` is to be done after so many seconds.

        Raises ArmEnded, in which case the process is still to be ended.
        """
        until = time.monotonic() + timeout_s
        if meanwhile is not None:
            seconds, act = meanwhile
            if not self._heard(min(seconds, timeout_s)):
                act()
        if not self._heard(until - time.monotonic()):
            raise ArmEnded("timeout", f"it was not done within {timeout_s:g} s")
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None
        self.said = True
        if isinstance(answer, Over):
            raise ArmEnded(answer.status, f"{answer.reason}{self._where()}")
        return answer

    def leave(self) -> None:
        """It is done: let it close its files, and end what is left of it."""
        self.wait(LEAVING_S)
        self.end()

    def dismiss(self) -> None:
        """Ask one that waits to leave, and wait for nothing."""
        with suppress(OSError):
            self.pipe.send(None)

    def wait(self, seconds: float) -> None:
        """For it to leave."""
        self.process.join(max(0.0, seconds))

    def end(self) -> None:
        """End it at once, with all that it started."""
        if self.process.pid is None:
            return
        started: list[psutil.Process] = []
        with suppress(psutil.Error):
            started = psutil.Process(self.pid).children(recursive=True)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()  # it may have no group of its own yet
        for process in started:
            with suppress(psutil.Error):  # it knows a process by its start too
                process.kill()
        self.process.join()
        self.pipe.close()
        self.lifeline.close()

    def _heard(self, seconds: float) -> bool:
        """Whether it has said something, or died, within so long; costs no CPU."""
        return bool(wait([self.pipe, self.process.sentinel], max(0.0, seconds)))

    def _died(self) -> ArmEnded:
        """What became of a process that is gone without a word."""
        self.process.join(PATIENCE_S)
        code = self.process.exitcode
        tail = self._tail()
        starved = any(sign in tail for sign in MEMORY)
        if code is None:
            return ArmEnded("failed", f"it closed its pipe and lives on{self._where()}")
        if code < 0:
            name = signal.Signals(-code).name
            if code == -signal.SIGKILL and (cgroup.oom_kills() or 0) > self.oom_kills:
                return ArmEnded("oom", f"the system killed it when memory ran out ({name})")
            if starved:
                return ArmEnded("oom", f"memory ran out, and {name} ended it{self._where()}")
            return ArmEnded("killed", f"killed by {name}{self._where()}")
        script = getattr(sys.modules.get("__main__"), "__file__", None) or ""
        if code == UNGUARDED and not self.said:
            raise Unguarded(
                f'{Path(script).name} has to do this under `if __name__ == "__main__":`, for it is '
                "imported by the processes that are measured"
            )
        last = escape_control_chars(tail.strip().rpartition("\n")[2])[:300]
        told = f": {last}" if last else ""
        unread = not (self.said or last) and script.startswith("<")
        hint = "; Python reads what is piped in only once: put it into a file" if unread else ""
        status = "oom" if starved else "failed"
        return ArmEnded(status, f"it ended with exit code {code}{told}{hint}{self._where()}")

    def _where(self) -> str:
        log = self._log()
        return f"; see {log}" if log is not None and log.exists() else ""

    def _tail(self) -> str:
        log = self._log()
        if log is None:
            return ""
        try:
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - TAIL))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def _log(self) -> Path | None:
        return None if self.folder is None else self.folder / LOG


def leave_if_imported() -> None:
    """A script without a guard starts itself again in the process, which is to start none."""
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        sys.exit(UNGUARDED)


@contextmanager
def environment() -> Iterator[None]:
    """What the process finds: threads that wait as in any run, and no module from where it starts.

    Python would put the current folder first on the path before the parent's path is known.
    """
    more = {**openmp.patience(os.environ), "PYTHONSAFEPATH": "1"}
    before = {key: os.environ.get(key) for key in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


@contextmanager
def no_interrupt() -> Iterator[None]:
    """A Ctrl-C before the process has a session of its own is not for it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
