"""The captures of a run; the writer is imported when a step is bad."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.core.errors import error_text
from runner.core.preserved_state import random_state

if TYPE_CHECKING:
    from runner.core.interfaces.batch import Batch
    from runner.core.interfaces.run import Run
    from runner.core.schemas.debug import CaptureConfig

log = logging.getLogger("runner")


class CaptureRecorder:
    """Captures the first few bad steps of a run, within a limit of disk space.

    Healthy steps cost nothing and are not copied: batch and dropout of a step follow from the seed
    and its number, a skipped step leaves weights, buffers and optimizer unchanged, and steps after
    a checkpoint can be repeated. So the state at the start of a step can be reproduced when the
    host learns, some steps later, that it was bad.
    """

    def __init__(
        self,
        config: CaptureConfig,
        folder: Path,
        settings: Mapping[str, Any],  # the config, from `WrittenConfig.plain`
        user_parts: Sequence[str] = (),  # components made by the caller of `build`
    ) -> None:
        self.config, self.folder = config, folder
        self.settings, self.user_parts = settings, list(user_parts)
        self.random_state = random_state()  # to detect draws from python's or numpy's generator
        self.limit_reached = self.warned = self.announced = False
        self.unlogged: tuple[int, Path] | None = None  # step and folder of a capture not yet logged

    def take(
        self, run: Run, step: int, kind: str, message: str, batch: Batch | None = None
    ) -> str | None:
        """Capture a step before its remedy; return the folder, relative to the run's, or None.

        Without `batch` it is fetched again. None beyond debug.capture's limit, or if writing fails,
        which is logged once. Syncs the host.
        """
        if self.limit_reached:
            return None
        from runner.core.captures.writer import take_capture

        try:
            return take_capture(self, run, step, kind, message, batch)
        except Exception as error:  # such as a full disk or broken device: the run continues
            reason = getattr(error, "strerror", None) or error_text(error)
            self.warn(f"step {step} not captured for job=replay: {reason}")
            return None

    def log_capture(self) -> None:
        """Log the capture that `take` wrote, once; call it after logging the step itself."""
        if self.unlogged is not None:
            text = "step %d captured; to inspect it: job=replay replay.path=%s"
            log.info(text, *self.unlogged, extra={"live": self.announced})  # the first is on screen
            self.announced = True
        self.unlogged = None

    def warn(self, message: str) -> None:
        """Log a warning the first time, at debug level afterwards."""
        log.log(logging.DEBUG if self.warned else logging.WARNING, message)
        self.warned = True
