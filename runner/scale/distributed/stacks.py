"""Write the stacks of a process to a file when it waits too long, crashes or is aborted."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from pathlib import Path

from runner.core.record.storage import make_folder, remove_file, safe_opener


class StackWriter:
    """Writes all threads' stacks to a file if `reset_timer` is not called for `timeout_s`.

    By a Python thread, which holds the interpreter lock: faulthandler's timer reads stacks of
    running threads, and has crashed slow processes. Crashes and SIGABRT use faulthandler.
    """

    def __init__(self, file: Path, timeout_s: float) -> None:
        make_folder(file.parent)
        self.timeout_s = timeout_s
        self._file = open(file, "a", opener=safe_opener)  # appended, after earlier attempts
        self._closed, self._last_reset = threading.Event(), time.monotonic()
        faulthandler.enable(self._file)
        self._thread = threading.Thread(target=self._write_when_late, name="stacks", daemon=True)
        self._thread.start()

    def reset_timer(self) -> None:
        """Restart the timer."""
        self._last_reset = time.monotonic()

    def close(self) -> None:
        """Stop the timer; an empty file is removed."""
        self._closed.set()
        self._thread.join()
        faulthandler.enable()
        is_empty = os.fstat(self._file.fileno()).st_size == 0
        self._file.close()
        if is_empty:  # it may have been removed with the run's folder
            remove_file(Path(self._file.name))

    def _write_when_late(self) -> None:
        reported_reset = 0.0
        while not self._closed.wait(self._last_reset + self.timeout_s - time.monotonic()):
            seconds = time.monotonic() - self._last_reset
            if seconds < self.timeout_s:
                continue
            if reported_reset != self._last_reset:
                reported_reset = self._last_reset
                self._file.write(f"nothing for {seconds:.1f} s\n{_format_stacks()}\n")
                self._file.flush()
            self._closed.wait(self.timeout_s)


def _format_stacks() -> str:
    """Format the stack of each other thread, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != own
    )
