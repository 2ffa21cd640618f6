"""The captures of a run. Light: what writes one is imported when a step is bad."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from runner.data.batch import Batch
    from runner.debug.config import CaptureConfig
    from runner.training.run import Run

log = logging.getLogger("runner")


class Captures:
    """The first few bad steps of one run, within a bound on disk.

    Healthy steps cost nothing, and nothing of them is copied: the batch of a step and its dropout
    are functions of the seed and its number, a skipped step left weights, buffers and optimizer as
    they were, and from any checkpoint the steps after it can be made again. So the state that a
    step began with can still be had when the host learns, some steps late, that it was bad.
    """

    def __init__(
        self,
        config: CaptureConfig,
        folder: Path,
        settings: Mapping[str, Any],  # the whole config, as `runner.config.plain` makes it
        given: Sequence[str] = (),  # components that the caller of `build` made
    ) -> None:
        self.config, self.folder = config, folder
        self.settings, self.given = settings, list(given)
        self.random_state = random_state()  # shows whether python's or numpy's is drawn from
        self.full = self.warned = self.announced = False
        self.newest: tuple[int, Path] | None = None  # until it is logged

    def take(
        self, run: Run, step: int, kind: str, message: str, batch: Batch | None = None
    ) -> str | None:
        """Capture that step, before anything is done about it; its folder, relative to the run's.

        `batch` is its batch where that is at hand; else it is fetched again. None where
        debug.capture allows no more, or where it could not be written, which is logged
        once and ends no run. The host waits for the device.
        """
        if self.full:
            return None
        from runner.captures.writer import take_capture

        try:
            return take_capture(self, run, step, kind, message, batch)
        except Exception as error:  # of the disk, the data or a broken device: the run continues
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self.warn(f"step {step} could not be kept for job=replay: {reason}")
            return None

    def log_capture(self) -> None:
        """Log the capture that `take` wrote, once; after the line about the step itself."""
        if self.newest is not None:
            text = "step %d is kept; to look into it: job=replay replay.path=%s"
            log.info(text, *self.newest, extra={"live": self.announced})  # the first is on screen
            self.announced = True
        self.newest = None

    def warn(self, message: str) -> None:
        """Warn the first time only."""
        log.log(logging.DEBUG if self.warned else logging.WARNING, message)
        self.warned = True


def random_state() -> dict[str, Any]:
    """The state of the global generators."""
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
