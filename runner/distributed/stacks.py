"""Stack dumps of a process that waits for too long, crashes or is aborted as hung."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from pathlib import Path


class StackWriter:
    """Watchdog that writes all threads' stacks to a file after `patience_s` without `alive()`.

    A Python thread does this under the GIL: faulthandler's timer reads stacks of running threads,
    and has crashed a process that was only slow. Crashes and SIGABRT go through faulthandler, as no
    other Python code runs then.
    """

    def __init__(self, file: Path, patience_s: float) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.patience_s = patience_s
        self._file = open(file, "a")  # keeps the stacks of earlier attempts
        self._closed, self._alive = threading.Event(), time.monotonic()
        faulthandler.enable(self._file)
        self._thread = threading.Thread(target=self._watch, name="stacks", daemon=True)
        self._thread.start()

    def alive(self) -> None:
        """Restart the timer."""
        self._alive = time.monotonic()

    def close(self) -> None:
        """Stop the watchdog; an empty file is removed."""
        self._closed.set()
        self._thread.join()
        faulthandler.enable()
        self._file.close()
        if os.path.getsize(self._file.name) == 0:
            os.unlink(self._file.name)

    def _watch(self) -> None:
        written = 0.0
        while not self._closed.wait(self._alive + self.patience_s - time.monotonic()):
            seconds = time.monotonic() - self._alive
            if seconds < self.patience_s:
                continue
            if written != self._alive:
                written = self._alive
                self._file.write(f"nothing for {seconds:.1f} s\n{_stacks()}\n")
                self._file.flush()
            self._closed.wait(self.patience_s)


def _stacks() -> str:
    """Return the stack of each thread but this one, the innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != own
    )
