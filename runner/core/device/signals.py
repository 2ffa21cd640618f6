"""Signals such as Ctrl-C and SIGTERM: finish the step, write a checkpoint, end the run.

A file `stop` in the run's folder, from any machine that shares it, does the same; the run's status
is then `stopped`, which is no failure.
"""

from __future__ import annotations

# getsignal of `signal` takes 10 µs to make an enum member
import _signal  # type: ignore[import-not-found]
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

from runner.core.errors import Interrupted, RunnerError
from runner.core.record.storage import remove_file, replace_text

if TYPE_CHECKING:
    from runner.core.interfaces.processes import StepLimit

log = logging.getLogger("runner")

SIGNAL_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")  # Windows has the first two
END_SIGNALS = [getattr(signal, name) for name in SIGNAL_NAMES if hasattr(signal, name)]
"""Signals that ask a process to end, including a lost terminal and the end of a job's time."""
DATA_WAIT_S = 5.0  # after the first signal, during which a distributed run still waits for data
ADVANCE_SIGNALS = END_SIGNALS[3:]
"""Signals by which SLURM announces the end of the process; another signal may follow."""


STOP_FILE = "stop"
MAX_REASON_CHARS = 500  # longer reasons are cut
PRUNED = "pruned"
"""The first word of a request by a hyperparameter search."""


class Terminated(KeyboardInterrupt):
    """Raised for a signal outside of training; unwinds like Ctrl-C."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__()
        self.number = number


def interruption_before_run(error: KeyboardInterrupt, where: str = "") -> Interrupted:
    """Return the error for a signal that arrived before a run was built."""
    number = error.number if isinstance(error, Terminated) else signal.SIGINT
    return Interrupted(number, where)


def request_stop(folder: Path, reason: str) -> None:
    """Ask the run in `folder` to end after its current step. Raises OSError."""
    replace_text(folder / STOP_FILE, reason)


def take_stop_request(folder: Path) -> str | None:
    """Return and delete a stop request's reason, None without a request. Costs 2 µs."""
    path = folder / STOP_FILE
    try:
        if not path.is_file():
            return None
        with path.open(encoding="utf-8", errors="replace") as file:
            reason = " ".join(file.read(MAX_REASON_CHARS).split())
        remove_file(path)
    except OSError:
        return None
    return reason or f"by the file {STOP_FILE} in its folder"


def is_command() -> bool:
    """Whether this process runs our command line, not a user's program."""
    return bool(_command_contexts)


def unclaimed_signals() -> list[int]:
    """Return END_SIGNALS, except Ctrl-C, that are neither ignored nor handled elsewhere."""
    ours = (signal.SIG_DFL, _terminate)
    return [number for number in END_SIGNALS[1:] if signal.getsignal(number) in ours]


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Make Ctrl-C and unclaimed signals raise Terminated, also one that a library has swallowed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = unclaimed_signals()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, _terminate) for number in numbers}
    _command_contexts.append(True)
    try:
        with prefer_signal_error():
            yield
    except RunnerError as error:
        if not isinstance(error, Interrupted):
            raise_received()
        raise
    finally:
        _command_contexts.pop()
        raised_signals.clear()
        for number, handler in before.items():
            signal.signal(number, handler)


def raise_received() -> None:
    """Raise Terminated if a signal was received within `raise_on_signals`."""
    if raised_signals:
        raise Terminated(raised_signals[0]) from None


@contextmanager
def prefer_signal_error() -> Iterator[None]:
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


_command_contexts: list[bool] = []  # not empty within `raise_on_signals`
raised_signals: list[int] = []
"""Signals for which Terminated was raised: some libraries swallow it during import."""


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raised_signals.append(number)
    raise Terminated(number)


def _is_user_handler(handler: object) -> bool:
    """Whether a handler is neither the system's, Python's nor ours."""
    if handler is None or isinstance(handler, signal.Handlers):
        return False
    ours = isinstance(getattr(handler, "__self__", None), InterruptHandler)
    return not ours and handler not in (signal.default_int_handler, _terminate)


def _describe_handler(handler: object) -> str:
    """Return the name of a signal handler, with its file and line if it has them."""
    if handler is None or isinstance(handler, int):
        return "code in C" if handler is None else signal.Handlers(handler).name
    function = getattr(handler, "__func__", handler)
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
    code = getattr(function, "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


class InterruptHandler:
    """Context that handles Ctrl-C, SIGTERM and the `unclaimed_signals`.

    The first signal is recorded, and the loop ends at the next step boundary. Between `begin_wait`
    and `end_wait` (a wait for data may not end) it raises KeyboardInterrupt, also if it arrived
    before. A second signal raises it at once, unless one of the two is in `ADVANCE_SIGNALS`.
    The first signal logs `notice` and calls `make_grace_period`; its result limits the step.
    """

    def __init__(
        self,
        notice: str = "",
        distributed: bool = False,
        make_grace_period: Callable[[InterruptHandler, int], StepLimit] | None = None,
    ) -> None:
        """With `distributed`, all processes of a run end at the same step.

        A signal repeated after DATA_WAIT_S then ends a wait for data.
        """
        self.distributed, self.received_at = distributed, 0.0
        self.received: int | None = None
        self.waiting = False
        self.wait_interrupted = False  # a wait was interrupted: the run is between two steps
        self.step_interrupted = False  # the step is being interrupted
        self.make_grace_period = make_grace_period
        self.grace: StepLimit | None = None  # since the first signal
        self.previous: dict[int, object] = {}
        self.replaced: set[int] = set()  # signals whose new handler was logged
        self.notice = _SignalWatcher(notice, self) if notice else None

    def __enter__(self) -> InterruptHandler:
        if threading.current_thread() is threading.main_thread():
            self.received = raised_signals[0] if raised_signals else None
            for number in {signal.SIGINT, signal.SIGTERM, *unclaimed_signals()}:
                self.previous[number] = signal.signal(number, self._on_signal)
            if self.notice is not None:
                self.notice.start(set(self.previous))
        return self

    def __exit__(self, *exc: object) -> None:
        self.end_grace()
        for number, handler in self.previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() returned
        self.previous.clear()
        if self.step_interrupted and self.grace is not None and is_command():
            self.grace.kill_children()  # the interpreter would wait for its compilers

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.step_interrupted or self.asks_to_interrupt(number, self.received):
            self.step_interrupted = True
            if self.grace is not None:
                self.grace.record_children()  # before a compiler that unwinds loses its own
            raise KeyboardInterrupt
        if self.received is None:
            self.received_at = time.monotonic()
        if self.received is None or number not in ADVANCE_SIGNALS:
            self.received = number
        deadline = self.received_at + DATA_WAIT_S
        if self.waiting and (not self.distributed or time.monotonic() > deadline):
            self._interrupt_wait()

    def warn_replaced(self) -> None:
        """Log a handler that other code has set in place of ours. Costs 1 µs."""
        for number in self.previous:
            handler = _signal.getsignal(number)
            if handler != self._on_signal and number not in self.replaced:
                self.replaced.add(number)
                log.warning(
                    "%s: other code has replaced the handler by %s: this signal no longer ends the "
                    "run after its step, with a checkpoint",
                    signal.Signals(number).name, _describe_handler(handler),
                )  # fmt: skip

    def warn_overridden(self) -> None:
        """Log handlers that the user's code has set before and that ours replace for now."""
        for number, handler in self.previous.items():
            if is_command() and _is_user_handler(handler):
                log.warning(
                    "%s: other code has set the handler %s, which is not called while the run "
                    "trains: the signal ends the run after its step, with a checkpoint",
                    signal.Signals(number).name, _describe_handler(handler),
                )  # fmt: skip

    def begin_wait(self) -> None:
        """Let the first signal raise KeyboardInterrupt; raise it now for one already received."""
        self.waiting = True  # set before the check, so that no signal is missed in between
        if self.received is not None and not self.distributed:
            self._interrupt_wait()

    def end_wait(self) -> None:
        """Let the first signal be recorded again."""
        self.waiting = False

    def asks_to_interrupt(self, number: int, first: int | None) -> bool:
        """Whether a signal after the first one asks to interrupt the step."""
        return not (first is None or self.distributed or {number, first} & {*ADVANCE_SIGNALS})

    def end_grace(self) -> None:
        """End the time limit: the step has ended, and a checkpoint after it is not limited."""
        if self.notice is not None:
            self.notice.stop()

    def _interrupt_wait(self) -> NoReturn:
        self.waiting, self.wait_interrupted = False, True
        raise KeyboardInterrupt

    def error(self, where: str = "") -> Interrupted:
        """Return the error that the run ends with; `where` names the step."""
        return Interrupted(self.received or signal.SIGINT, where)


class _SignalWatcher:
    """Thread that logs a line at the first signal and starts the grace period.

    A Python signal handler may interrupt a log line, and does not run during a compilation or a
    long kernel, while the file descriptor of `set_wakeup_fd` is written at once.
    """

    def __init__(self, text: str, interrupts: InterruptHandler) -> None:
        self.text, self.interrupts = text, interrupts
        self.previous_fd = self.read_fd = self.write_fd = -1
        self.thread: threading.Thread | None = None
        self.numbers: set[int] = set()

    def start(self, numbers: set[int]) -> None:
        self.numbers = numbers
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.write_fd, False)
        self.previous_fd = signal.set_wakeup_fd(self.write_fd, warn_on_full_buffer=False)
        self.thread = threading.Thread(target=self._run, name="interrupts", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        if self.thread is None:
            return
        signal.set_wakeup_fd(self.previous_fd, warn_on_full_buffer=False)
        os.write(self.write_fd, b"\0")  # closing would not end the read: forks share the pipe
        self.thread.join()
        os.close(self.write_fd)
        os.close(self.read_fd)
        self.thread = None

    def _run(self) -> None:
        if not (first := self._next()):
            return
        log.warning("%s: %s", Interrupted.named(first), self.text)
        if self.interrupts.make_grace_period is not None:
            self.interrupts.grace = self.interrupts.make_grace_period(self.interrupts, first)
            self.interrupts.grace.wait_for_step(self._next)

    def _next(self, timeout_s: float | None = None) -> int | None:
        """Return the next signal; 0 after `stop`, None after the timeout."""
        while select.select([self.read_fd], [], [], timeout_s)[0]:
            number = os.read(self.read_fd, 1)[0]
            if number in self.numbers or not number:
                return number
        return None
