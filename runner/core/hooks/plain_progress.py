"""Progress of a run in a program or a notebook, where no logging is set up."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from runner.core.hooks.progress import ProgressDisplay
from runner.core.interfaces.run import Run
from runner.core.record.console import NOTEBOOK_ENV
from runner.core.record.text import escape_control_chars
from runner.core.schemas.monitoring import MonitoringConfig

WIDTH = 120  # of the line that is rewritten


class _Line(logging.Handler):
    """Prints progress lines: below each other, or in a notebook over the one before."""

    def __init__(self, rewrites: bool) -> None:
        super().__init__(logging.INFO)
        self.rewrites = rewrites

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line; a stream that has gone is no reason to end a run."""
        text = escape_control_chars(record.getMessage().partition("\n")[0])
        is_warning = record.levelno > logging.INFO
        line = f"\r{text[:WIDTH]:{WIDTH}}" if self.rewrites and not is_warning else f"{text}\n"
        stream = sys.stdout if self.rewrites else sys.stderr
        try:
            stream.write(f"\n{line}" if self.rewrites and is_warning else line)
            stream.flush()
        except (OSError, ValueError):
            self.rewrites = False


@contextmanager
def print_progress(run: Run) -> Iterator[None]:
    """Print the run's progress while entered."""
    logger, handler = logging.getLogger("runner"), _Line(NOTEBOOK_ENV in os.environ)
    level = logger.level
    if not any(isinstance(hook, ProgressDisplay) for hook in run.hooks):
        run.hooks.append(ProgressDisplay(MonitoringConfig()))
    logger.addHandler(handler)
    logger.setLevel(min(level or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        if handler.rewrites:
            sys.stdout.write("\n")
