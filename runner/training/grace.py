"""The time that a step has to end after a signal, and the end of a process that takes longer."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from runner.errors import Interrupted, StorageError
from runner.training.run import Run
from runner.training.signals import Interrupts, is_command
from runner.training.summary import Summary

log = logging.getLogger("runner")

UNWIND = 0.75  # share of the grace period after which the step is unwound, if it can be
RECORD_S = 5.0  # that a process may take which was unwound, or whose record is to be ended


class GracePeriod:
    """Limits the step during which a signal arrived, from a thread that is not the main one.

    At first the step is unwound as by a second signal, which takes effect where the main thread
    runs Python. A command whose main thread is within a compiler or a kernel, or waits for another
    process, is ended without it: the last checkpoint stands, since weights may be half updated.
    """

    def __init__(self, run: Run, interrupts: Interrupts, number: int, hint: Callable[[], str]):
        """`hint` says how to continue the run."""
        self.run, self.interrupts, self.number, self.hint = run, interrupts, number, hint
        self.children: list[psutil.Process] = []

    def watch(self, next_signal: Callable[[float], int | None]) -> None:
        """Until the step has ended, which `next_signal` reports as 0; it takes a timeout."""
        end = time.monotonic() + self.run.grace_s
        number = next_signal(self.run.grace_s * UNWIND)
        if number is None:
            self.interrupts.forced = True
            self.interrupts.received = self.interrupts.received or self.number
            signal.pthread_kill(threading.main_thread().ident or 0, self.number)
        elif self.interrupts.counts_again(number, self.number):
            end = min(end, time.monotonic() + RECORD_S)
        while number != 0 and (left := end - time.monotonic()) > 0:
            number = next_signal(left)
        if number != 0 and is_command():
            self._leave()

    def note_children(self) -> None:
        """Remember the processes that this one has started, and theirs."""
        with suppress(psutil.Error, OSError):
            self.children += psutil.Process().children(recursive=True)

    def kill_children(self) -> None:
        """Kill them, but for Python's own cleaner: a compiler outlives who waits for it."""
        self.note_children()
        for child in self.children:
            with suppress(psutil.Error, OSError):  # it has ended
                if "resource_tracker" not in " ".join(child.cmdline()):
                    child.kill()

    def _leave(self) -> None:
        error = Interrupted(self.number)
        # from a thread of its own: the main one may have locks that it needs
        recorder = threading.Thread(target=self._record, args=(error,), daemon=True)
        recorder.start()
        recorder.join(RECORD_S)
        self.kill_children()
        os._exit(error.exit_code)

    def _record(self, error: Interrupted) -> None:
        """End the record of the run, without reading what its step may be changing."""
        run = self.run
        if run.world is not None:
            run.world.leave(error)
        run.checkpointer.join()
        where = f"its step did not end within checkpoint.grace_s={run.grace_s:g}"
        reason = f"{error}{self.hint()}; {where}"
        if run.folder is not None and run.writes:
            with suppress(StorageError):
                summary = Summary.read(run.folder)
                summary.status, summary.reason = "interrupted", reason
                summary.steps, summary.checkpoint.last = run.progress.step, run.checkpointer.last
                summary.write(run.folder)
        log.error("%s", reason)
