"""`security.limits`: save and end a run that reaches a limit."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from runner.device import numerics
from runner.errors import ConfigError
from runner.hooks.resources import stop_for
from runner.security import limits
from runner.security.config import LimitsConfig
from runner.security.limits import MB, Exceeded
from runner.training.hook import Hook, Step, Verdict
from runner.training.run import Run

log = logging.getLogger("runner")

KEY = "security.limits"
CHECK_S = 1.0  # between two checks of memory, time and the device
SCAN_S = 5.0  # between two counts of the folder without a new checkpoint


class Limits(Hook):
    """Saves and ends the run when a limit is reached (status `stopped`, exit code 0).

    Costs 0.1 µs a step, and 10 µs a second (0.1 ms per data worker). The folder's size is read
    every five seconds and after each checkpoint is written. The limit of the accelerator's memory
    is also set in its allocator, which raises out of memory beyond it.
    """

    def __init__(self, config: LimitsConfig) -> None:
        self.config = config
        self.before = 0  # bytes in the run's folder when the run began or was resumed
        self.next_check = self.next_scan = 0.0
        self.saved_step = -1  # of the last checkpoint that was counted

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Set the allocator's limit. Raises ConfigError if memory_mb is exceeded at the start."""
        config = self.config
        if config.disk_mb is not None and run.folder is not None:
            self.before = limits.folder_bytes(run.folder)
        exceeded = None if config.memory_mb is None else limits.over_memory(config.memory_mb)
        if exceeded is not None:
            problem = f"{exceeded.taken} before the first step"
            fix = "raise the limit; torch alone takes about 300 MB"
            raise ConfigError(f"{KEY}.{exceeded.key}", problem, fix)
        with ExitStack() as scope:
            if config.device_memory_mb is not None:
                _limit_allocator(run, config.device_memory_mb, scope)
            yield

    def on_step(self, run: Run, step: Step) -> Verdict | None:
        """Check the limits every CHECK_S seconds and after a checkpoint; STOP if one is reached."""
        now = time.monotonic()
        counted = self.config.disk_mb is None or self.saved_step == run.saved_step
        if (now < self.next_check and counted) or step.number >= run.total_steps:
            return None
        self.next_check = now + CHECK_S
        exceeded = next(filter(None, self._checks(run, now)), None)
        if exceeded is None:
            return None
        message = f"{exceeded.taken} ({KEY}.{exceeded.key})"
        way_out = f", and a higher limit or {exceeded.way_out}"
        kind = f"limit_{exceeded.key}"
        return stop_for(run, kind, message, way_out, step.number, "resources")

    def _checks(self, run: Run, now: float) -> Iterator[Exceeded | None]:
        config = self.config
        if config.hours is not None:
            yield limits.over_time(config.hours, now - run.started)
        if config.memory_mb is not None:
            yield limits.over_memory(config.memory_mb)
        if config.device_memory_mb is not None:
            yield limits.over_device(config.device_memory_mb, _device_bytes(run))
        if config.disk_mb is not None and run.folder is not None:
            if now >= self.next_scan or self.saved_step != run.saved_step:
                self.next_scan, self.saved_step = now + SCAN_S, run.saved_step
                run.checkpointer.wait()  # so that a file is not counted while it is written
                yield limits.over_disk(config.disk_mb, run.folder, self.before)


def _device_bytes(run: Run) -> int:
    if run.device.kind == "cuda":
        return torch.cuda.memory_reserved(run.device.torch)
    return torch.mps.driver_allocated_memory() if run.device.kind == "mps" else 0


def _limit_allocator(run: Run, limit_mb: float, scope: ExitStack) -> None:
    """Set the limit in torch's allocator, if it is below the current one, until `scope` closes."""
    where = run.device.torch
    if run.device.kind == "cuda":
        total = torch.cuda.get_device_properties(where).total_memory
        before = torch.cuda.get_per_process_memory_fraction(where)
    elif run.device.kind == "mps":
        total, before = torch.mps.recommended_max_memory(), run.device.memory_fraction or 1.0
    else:
        log.info("%s.device_memory_mb has no effect: the model is on the CPU", KEY)
        return
    share = limit_mb * MB / total
    if share < before:
        numerics.set_memory_fraction(share, where, scope)
