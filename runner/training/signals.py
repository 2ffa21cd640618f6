"""Signals such as Ctrl-C and SIGTERM: finish the step, write a checkpoint, end the run.

A file `stop` in the run's folder, from any machine that shares it, does the same; the run's status
is then `stopped`, which is no failure.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from runner.errors import Interrupted, RunnerError

if TYPE_CHECKING:
    from runner.training.grace import GracePeriod

log = logging.getLogger("runner")

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")  # Windows has the first two
ENDS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
"""Signals that ask a process to end, including a lost terminal and the end of a job's time."""
PATIENCE_S = 5.0  # after which one of several processes no longer waits for data
AHEAD = ENDS[3:]
"""Signals by which SLURM announces the end of the process; another signal may follow."""


STOP_FILE = "stop"
REASON_LETTERS = 500  # read of a request
PRUNED = "pruned"
"""The first word of a request by a hyperparameter search."""


class Terminated(KeyboardInterrupt):
    """Raised for a signal other than Ctrl-C outside of training; unwinds like Ctrl-C."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.number = number


def interruption_before_run(error: KeyboardInterrupt, where: str = "") -> Interrupted:
    """Return the error for a signal that arrived before a run was built."""
    number = error.number if isinstance(error, Terminated) else signal.SIGINT
    return Interrupted(number, where)


def request_stop(folder: Path, reason: str) -> None:
    """Ask the run in `folder` to end after its current step. Raises OSError."""
    hidden = folder / f".{STOP_FILE}"
    hidden.write_text(reason, encoding="utf-8")
    os.replace(hidden, folder / STOP_FILE)


def take_stop_request(folder: Path) -> str | None:
    """Return and delete a stop request's reason, None without a request. Costs 2 µs."""
    path = folder / STOP_FILE
    try:
        if not path.is_file():
            return None
        with path.open(encoding="utf-8", errors="replace") as file:
            reason = " ".join(file.read(REASON_LETTERS).split())
        path.unlink()
    except OSError:
        return None
    return reason or f"by the file {STOP_FILE} in its folder"


def is_command() -> bool:
    """Whether this process runs our command line, not a user's program."""
    return bool(_command)


def unclaimed() -> list[int]:
    """Return the signals of ENDS, except Ctrl-C, that are neither ignored nor handled elsewhere."""
    ours = (signal.SIG_DFL, _terminate)
    return [number for number in ENDS[1:] if signal.getsignal(number) in ours]


@contextmanager
def signals_unwind() -> Iterator[None]:
    """Make unclaimed signals raise Terminated while entered, outside of `Interrupts`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _terminate) for number in unclaimed()}
    _command.append(True)
    try:
        with signals_first():
            yield
    finally:
        _command.pop()
        raised.clear()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_first() -> Iterator[None]:
    """Raise the signal's exception in place of an error that a library raised while unwinding."""
    try:
        yield
    except Exception as error:
        first: BaseException | None = error
        while first is not None and not isinstance(first, KeyboardInterrupt):
            first = None if isinstance(first, RunnerError) else first.__context__
        if first is None:
            raise
        raise first from None


_command: list[bool] = []  # not empty within `signals_unwind`
raised: list[int] = []
"""Signals for which Terminated was raised: some libraries swallow it during import."""


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raised.append(number)
    raise Terminated(number)


class Interrupts:
    """Context that handles Ctrl-C, SIGTERM and the `unclaimed` signals.

    The first signal is recorded, and the loop ends at the next step boundary. Between `begin_wait`
    and `end_wait` (a wait for data may not end) it raises KeyboardInterrupt, also if it arrived
    before. A second signal raises it at once, unless one of the two is in `AHEAD`. The first signal
    logs `notice` and calls `watch`, which returns the grace period that limits the step.
    """

    def __init__(
        self,
        notice: str = "",
        together: bool = False,
        watch: Callable[[Interrupts, int], GracePeriod] | None = None,
    ) -> None:
        """With `together`, all processes of a run end at the same step.

        A signal repeated after PATIENCE_S then ends a wait for data.
        """
        self.together, self.since = together, 0.0
        self.received: int | None = None
        self.waiting = False
        self.cut_short = False  # a wait was interrupted: the run is between two steps
        self.forced = False  # the step is being interrupted
        self.watch = watch
        self.grace: GracePeriod | None = None  # since the first signal
        self.previous: dict[int, object] = {}
        self.notice = _Notice(notice, self) if notice else None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self.received = raised[0] if raised else None
            for number in {signal.SIGINT, signal.SIGTERM, *unclaimed()}:
                self.previous[number] = signal.signal(number, self._on_signal)
            if self.notice is not None:
                self.notice.start(set(self.previous))
        return self

    def __exit__(self, *exc: object) -> None:
        self.end_grace()
        for number, handler in self.previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() returned
        self.previous.clear()
        if self.forced and self.grace is not None and is_command():
            self.grace.kill_children()  # the interpreter would wait for its compilers

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.forced or self.counts_again(number, self.received):
            self.forced = True
            if self.grace is not None:
                self.grace.note_children()  # before a compiler that unwinds loses its own children
            raise KeyboardInterrupt
        if self.received is None:
            self.since = time.monotonic()
        if self.received is None or number not in AHEAD:
            self.received = number
        if self.waiting and (not self.together or time.monotonic() > self.since + PATIENCE_S):
            self._cut_short()

    def begin_wait(self) -> None:
        """Let the first signal raise KeyboardInterrupt; raise it now for one already received."""
        self.waiting = True  # set before the check, so that no signal is missed in between
        if self.received is not None and not self.together:
            self._cut_short()

    def end_wait(self) -> None:
        """Let the first signal be recorded again."""
        self.waiting = False

    def counts_again(self, number: int, first: int | None) -> bool:
        """Whether a signal after the first one asks to interrupt the step."""
        return not (first is None or self.together or {number, first} & {*AHEAD})

    def end_grace(self) -> None:
        """End the time limit: the step has ended, and a checkpoint after it is not limited."""
        if self.notice is not None:
            self.notice.stop()

    def _cut_short(self) -> NoReturn:
        self.waiting, self.cut_short = False, True
        raise KeyboardInterrupt

    def error(self, where: str = "") -> Interrupted:
        """Return the error that the run ends with; `where` names the step."""
        return Interrupted(self.received or signal.SIGINT, where)


class _Notice:
    """Thread that logs a line at the first signal and starts the grace period.

    A Python signal handler may interrupt a log line, and does not run during a compilation or a
    long kernel, while the file descriptor of `set_wakeup_fd` is written at once.
    """

    def __init__(self, text: str, interrupts: Interrupts) -> None:
        self.text, self.interrupts = text, interrupts
        self.before = self.reads = self.writes = -1
        self.thread: threading.Thread | None = None
        self.numbers: set[int] = set()

    def start(self, numbers: set[int]) -> None:
        self.numbers = numbers
        self.reads, self.writes = os.pipe()
        os.set_blocking(self.writes, False)
        self.before = signal.set_wakeup_fd(self.writes, warn_on_full_buffer=False)
        self.thread = threading.Thread(target=self._watch, name="interrupts", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        if self.thread is None:
            return
        signal.set_wakeup_fd(self.before, warn_on_full_buffer=False)
        os.write(self.writes, b"\0")  # closing would not end the read: forks share the pipe
        self.thread.join()
        os.close(self.writes)
        os.close(self.reads)
        self.thread = None

    def _watch(self) -> None:
        if not (first := self._next()):
            return
        log.warning("%s: %s", Interrupted.named(first), self.text)
        if self.interrupts.watch is not None:
            self.interrupts.grace = self.interrupts.watch(self.interrupts, first)
            self.interrupts.grace.watch(self._next)

    def _next(self, timeout_s: float | None = None) -> int | None:
        """Return the next signal; 0 once the watch is over, None after the timeout."""
        while select.select([self.reads], [], [], timeout_s)[0]:
            number = os.read(self.reads, 1)[0]
            if number in self.numbers or not number:
                return number
        return None
