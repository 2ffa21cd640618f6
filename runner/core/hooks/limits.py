"""`security.limits`: save and end a run that reaches a limit."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import torch

from runner.core.device import memory, numerics
from runner.core.errors import ConfigError
from runner.core.hooks.resources import stop_for
from runner.core.interfaces.hook import Hook, Step, Verdict
from runner.core.interfaces.run import Run
from runner.core.schemas.security import LimitsConfig

log = logging.getLogger("runner")

KEY = "security.limits"
MB = 1e6
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
        self.initial_bytes = 0  # bytes in the run's folder when the run began or was resumed
        self.next_check = self.next_scan = 0.0
        self.saved_step = -1  # of the last checkpoint that was counted

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Set the allocator's limit. Raises ConfigError if memory_mb is exceeded at the start."""
        config = self.config
        if config.disk_mb is not None and run.folder is not None:
            self.initial_bytes = folder_bytes(run.folder)
        if usage := _memory_usage(config.memory_mb):
            fix = "a higher limit; torch alone takes some 300 MB"
            raise ConfigError(f"{KEY}.memory_mb", f"{usage} before the first step", fix)
        with ExitStack() as scope:
            if config.device_memory_mb is not None:
                _limit_allocator(run, config.device_memory_mb, scope)
            yield

    def on_step(self, run: Run, step: Step) -> Verdict | None:
        """Check the limits every CHECK_S seconds and after a checkpoint; STOP if one is reached."""
        now = time.monotonic()
        checkpoint_counted = self.config.disk_mb is None or self.saved_step == run.saved_step
        if (now < self.next_check and checkpoint_counted) or step.number >= run.total_steps:
            return None
        self.next_check = now + CHECK_S
        for key, usage, way_out in self._exceeded(run, now):
            message, fix = f"{usage} ({KEY}.{key})", f", and a higher limit or {way_out}"
            return stop_for(run, f"limit_{key}", message, fix, step.number, "resources")
        return None

    def _exceeded(self, run: Run, now: float) -> Iterator[tuple[str, str, str]]:
        """Yield key, usage and way out of each limit that is reached."""
        config, hours, device = self.config, (now - run.started) / 3600, _device_bytes(run) / MB
        if config.hours is not None and hours >= config.hours:
            usage = f"{hours:.3g} hours have passed of {config.hours:.3g}"
            yield "hours", usage, "the same one typed again: limits are not restored"
        if usage := _memory_usage(config.memory_mb):
            yield "memory_mb", usage, "a smaller training.batch_size, fewer data.workers"
        if config.device_memory_mb is not None and device > config.device_memory_mb:
            usage = f"{device:,.0f} MB of the device's memory are held"
            usage += f", of {config.device_memory_mb:,.0f}"
            yield "device_memory_mb", usage, "a smaller training.batch_size"
        if usage := self._disk_usage(run, now):
            yield "disk_mb", usage, "a smaller checkpoint.keep, less to debug"

    def _disk_usage(self, run: Run, now: float) -> str:
        """Return the usage if two more checkpoints would exceed the limit, else "".

        One may be written before the next check, and one is the run's last.
        """
        limit, folder = self.config.disk_mb, run.folder
        due = now >= self.next_scan or self.saved_step != run.saved_step
        if limit is None or folder is None or not due:
            return ""
        self.next_scan, self.saved_step = now + SCAN_S, run.saved_step
        run.checkpointer.wait()  # a file being written is not counted
        grown_mb = (folder_bytes(folder) - self.initial_bytes) / MB
        saved = (folder_bytes(path) for path in folder.glob("checkpoints/step_*"))
        checkpoint_mb = max(saved, default=0) / MB
        if grown_mb + 2 * checkpoint_mb <= limit:
            return ""
        size = f"{grown_mb:,.1f} MB of {limit:,.1f}, and a checkpoint takes {checkpoint_mb:,.1f}"
        return f"the run's folder has grown by {size}"


def _memory_usage(limit_mb: float | None) -> str:
    """Return the usage above the limit, else ""; 4 µs, plus 0.1 ms per worker."""
    if limit_mb is None or (used_mb := memory_bytes() / MB) <= limit_mb:
        return ""
    return f"this process and its workers hold {used_mb:,.0f} MB of {limit_mb:,.0f}"


def _device_bytes(run: Run) -> int:
    if run.device.kind == "cuda":
        return torch.cuda.memory_reserved(run.device.torch)
    return torch.mps.driver_allocated_memory() if run.device.kind == "mps" else 0


def _limit_allocator(run: Run, limit_mb: float, scope: ExitStack) -> None:
    """Set the limit in torch's allocator, if it is below the current one, until `scope` closes."""
    device = run.device.torch
    if run.device.kind == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        before = torch.cuda.get_per_process_memory_fraction(device)
    elif run.device.kind == "mps":
        total, before = torch.mps.recommended_max_memory(), run.device.memory_fraction or 1.0
    else:
        log.info("%s.device_memory_mb has nothing to limit: the model is on the CPU", KEY)
        return
    fraction = limit_mb * MB / total
    if fraction < before:
        numerics.set_memory_fraction(fraction, device, scope)


def memory_bytes() -> int:
    """Return the resident bytes of this process and its workers; shared memory counts once."""
    own, workers = memory.process_bytes(), multiprocessing.active_children()
    processes = [os.getpid(), *(child.pid for child in workers)] if workers else []
    return max(own, sum(_pss_bytes(pid) for pid in processes if pid is not None))


def _pss_bytes(pid: int) -> int:
    """Return a process's proportional set size (PSS); 0 if it has ended."""
    try:
        # host sync: none, bytes, on Linux alone
        return int(getattr(psutil.Process(pid).memory_full_info(), "pss", 0))
    except psutil.Error:
        return 0


def folder_bytes(folder: Path) -> int:
    """Bytes on the disk of all files in a folder; a hard-linked one counts once. 8 µs a file."""
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it has just been removed or renamed
                status = os.lstat(os.path.join(parent, name))
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())
