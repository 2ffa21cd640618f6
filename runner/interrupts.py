"""Ctrl-C, SIGTERM, SIGHUP: the step in hand is finished, a checkpoint written, the run ends."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from runner.errors import Interrupted

HANGUP = getattr(signal, "SIGHUP", None)  # its terminal has gone; none on Windows
ENDS = [signal.SIGINT, signal.SIGTERM, *([] if HANGUP is None else [HANGUP])]
"""Signals that ask a process to end."""


class Interrupts:
    """While entered, owns the signals, but for a SIGHUP that `nohup` has made nothing of.

    The first one is remembered and the loop ends at the next step boundary; while the loop only
    waits for data (`waiting`), it cuts the wait short, since that can take for ever. The second one
    ends the process at once, as if nobody had caught the first.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.waiting = False
        self.cut_short = False  # the wait was, so the run is as it was before it
        self.previous: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in ENDS:
                if number == HANGUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self.previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() returned
        self.previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number
        if self.waiting:
            self.waiting, self.cut_short = False, True
            raise KeyboardInterrupt

    def error(self, where: str = "") -> Interrupted:
        """The error that the run ends with; `where` says how far it came."""
        return Interrupted(self.received or signal.SIGINT, where)
