"""Grace period of a step after a signal, and termination of a process that exceeds it."""

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

UNWIND = 0.75  # share of the grace period after which the step is interrupted
RECORD_S = 5.0  # after an interrupted step, and for closing the record


class GracePeriod:
    """Limits the step in which a signal arrived, from another thread than the main one.

    First the step is interrupted as by a second signal, which works while the main thread runs
    Python. A command with its main thread in a compiler or kernel, or waiting for a process, is
    then terminated without a new checkpoint, since weights may be half updated.
    """

    def __init__(self, run: Run, interrupts: Interrupts, number: int, hint: Callable[[], str]):
        """`hint` returns text on how to resume the run."""
        self.run, self.interrupts, self.number, self.hint = run, interrupts, number, hint
        self.children: list[psutil.Process] = []

    def watch(self, next_signal: Callable[[float], int | None]) -> None:
        """Wait until the step has ended; `next_signal(timeout)` returns 0 then, None on timeout."""
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
        """Record the child processes, recursively."""
        with suppress(psutil.Error, OSError):
            self.children += psutil.Process().children(recursive=True)

    def kill_children(self) -> None:
        """Kill child processes except Python's resource tracker: compilers outlive their parent."""
        self.note_children()
        for child in self.children:
            with suppress(psutil.Error, OSError):  # already ended
                if "resource_tracker" not in " ".join(child.cmdline()):
                    child.kill()

    def _leave(self) -> None:
        error = Interrupted(self.number)
        # in its own thread, with a timeout: the main one may hold locks that it needs
        recorder = threading.Thread(target=self._record, args=(error,), daemon=True)
        recorder.start()
        recorder.join(RECORD_S)
        self.kill_children()
        os._exit(error.exit_code)

    def _record(self, error: Interrupted) -> None:
        """Close the record of the run without reading state that the step may be changing."""
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
