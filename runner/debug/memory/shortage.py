"""What would help a run that ran out of memory: `debug/out_of_memory.md`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from runner.debug.memory.account import Account
from runner.errors import OutOfMemory
from runner.hook import Hook
from runner.run import Run
from runner.storage import replace_text

log = logging.getLogger("runner")

FILE = "debug/out_of_memory.md"


class Shortage(Hook):
    """Writes that report when memory ends a run; until then it costs nothing."""

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Look at what ends it."""
        try:
            yield
        except OutOfMemory as error:
            write_report(run, str(error))
            raise


def write_report(run: Run, reason: str, account: Account | None = None) -> None:
    """Say what would save how much, ranked; whatever goes wrong here, the run's own error counts.

    Some tenths of a second: steps are traced without their data, each a little different.
    """
    if run.folder is None:
        return
    path = run.folder / FILE
    try:
        from runner.debug.memory.savings import report  # only now: most runs never need it

        text = report(run, reason, account)
        path.parent.mkdir(exist_ok=True)
        replace_text(path, text)
        run.recorder.text("memory/out_of_memory", text, run.progress.step)
        log.warning("what would save how much memory is in %s", path)
    except Exception as error:  # memory is short, and a model may be anything
        log.warning("no %s: %s: %s", FILE, type(error).__name__, error)
