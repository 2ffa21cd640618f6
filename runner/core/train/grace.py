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

from runner.core.device.signals import InterruptHandler, is_command
from runner.core.errors import Interrupted, StorageError
from runner.core.interfaces.run import Run
from runner.core.record.summary import Summary

log = logging.getLogger("runner")

INTERRUPT_SHARE = 0.75  # share of the grace period after which the step is interrupted
RECORD_TIMEOUT_S = 5.0  # after an interrupted step, and for closing the record


class GracePeriod:
    """Limits the step in which a signal arrived, from another thread than the main one.

    First the step is interrupted as by a second signal, which works while the main thread runs
    Python. A command with its main thread in a compiler or kernel, or waiting for a process, is
    then terminated without a new checkpoint, since weights may be half updated.
    """

    def __init__(
        self, run: Run, interrupts: InterruptHandler, received: int, resume_hint: Callable[[], str]
    ) -> None:
        self.run, self.interrupts = run, interrupts
        self.signal_number, self.resume_hint = received, resume_hint
        self.children: list[psutil.Process] = []

    def wait_for_step(self, next_signal: Callable[[float], int | None]) -> None:
        """Wait until the step has ended; `next_signal(timeout)` returns 0 then, None on timeout."""
        deadline = time.monotonic() + self.run.grace_s
        number = next_signal(self.run.grace_s * INTERRUPT_SHARE)
        if number is None:
            self.interrupts.step_interrupted = True
            self.interrupts.received = self.interrupts.received or self.signal_number
            signal.pthread_kill(threading.main_thread().ident or 0, self.signal_number)
        elif self.interrupts.asks_to_interrupt(number, self.signal_number):
            deadline = min(deadline, time.monotonic() + RECORD_TIMEOUT_S)
        while number != 0 and (remaining := deadline - time.monotonic()) > 0:
            number = next_signal(remaining)
        if number != 0 and is_command():
            self._terminate()

    def record_children(self) -> None:
        """Record the child processes, recursively."""
        with suppress(psutil.Error, OSError):
            self.children += psutil.Process().children(recursive=True)

    def kill_children(self) -> None:
        """Kill child processes except Python's resource tracker: compilers outlive their parent."""
        self.record_children()
        for child in self.children:
            with suppress(psutil.Error, OSError):  # already ended
                if "resource_tracker" not in " ".join(child.cmdline()):
                    child.kill()

    def _terminate(self) -> None:
        error = Interrupted(self.signal_number)
        # in its own thread, with a timeout: the main one may hold locks that it needs
        recorder = threading.Thread(target=self._record, args=(error,), daemon=True)
        recorder.start()
        recorder.join(RECORD_TIMEOUT_S)
        self.kill_children()
        os._exit(error.exit_code)

    def _record(self, error: Interrupted) -> None:
        """Close the record of the run without reading state that the step may be changing."""
        run = self.run
        run.leave_others(error)
        run.checkpointer.join()
        problem = f"its step did not end within checkpoint.grace_s={run.grace_s:g}"
        reason = f"{error}{self.resume_hint()}; {problem}"
        if run.folder is not None and run.writes:
            with suppress(StorageError):
                summary = Summary.read(run.folder)
                summary.set_end("interrupted", reason)
                summary.steps, summary.checkpoint.last = run.progress.step, run.checkpointer.last
                summary.write(run.folder)
        log.error("%s", reason)
