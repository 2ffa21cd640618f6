"""The hook that watches memory, disk and GPU, and cleans, warns or stops the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import torch

from runner.core.device import memory, resources
from runner.core.device.leaks import LeakDetector, Trend
from runner.core.device.resources import GIB, MemoryLimit, Reading, SystemMonitor
from runner.core.interfaces.hook import Hook, Report, Verdict
from runner.core.interfaces.run import Run
from runner.core.record.history import Fault
from runner.core.record.text import resume_argument
from runner.core.schemas.stability import WatchConfig

log = logging.getLogger("runner")

MIN_GROWTH = 0.01  # least growth since the last cleaning, as a share of memory, for another one
MIB = 2**20
MIN_OWN_SHARE = 0.1  # least share of memory used by this process for a stop to help
REREAD_GROWTH = 1 / 8  # growth of the process for another reading, as a share of the memory left
KEY = "stability.watch"
SUBJECTS = {  # of which leaks are watched
    "process": "the process grows",
    "workers": "the data workers grow",
    "device": "the tensors on the device grow",
}


class Resources(Hook):
    """Cleans memory, warns, stops the run in time, and detects leaks.

    - Above device.clean_above (share of memory used by the process, or by tensors on the device):
      clean, in 50 ms. Logged once while it stays above; `memory_cleaned` in `faults`.
    - Above stop_above (share of the memory of machine, container or `ulimit -v`): save and end the
      run, as the kernel would kill it without a checkpoint.
    - A nearly full disk, swapping, and a hot GPU: each logged once.
    - A leak of the process, of its children such as the data workers, or on the device: logged with
      its growth per step; withdrawn if the growth stops, as that of a cache that is full.

    Costs 20 µs a report; the machine is read every monitoring.system_every_s seconds, and the
    memory sooner if the process grows.
    """

    monitors = True

    def __init__(
        self, clean_above: float | None, config: WatchConfig, system_monitor: SystemMonitor
    ) -> None:
        self.clean_above = clean_above
        self.config = config
        self.system_monitor = system_monitor
        self.cleaned_share: float | None = None  # after the last cleaning; None: below clean_above
        self.memory_limit: MemoryLimit | None = None
        self.process_bytes = 0  # when the limit was read
        self.next_reading = 0.0  # of the machine
        self.swap_before: int | None = None
        self.warned: set[str] = set()
        self.workers_clean_from: int | None = None  # the step, once they are asked to free memory
        self.leaks: dict[str, Fault] = {}  # by kind, as longer windows detect a leak again

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Record the swap at the start, and create the leak detectors."""
        if self.config.enabled:
            self.system_monitor.open(run.device)
            self.swap_before = resources.swap_bytes()
            has_workers = run.train.pool is not None or run.validation.pool is not None
            on_gpu = run.device.kind == "cuda"
            kinds = {"process": True, "workers": has_workers, "device": on_gpu}
            for kind in (k for k in kinds if kinds[k] and self.config.leaks):
                run.leaks[kind] = LeakDetector(least=round(self.config.leak_mb * MIB))
        yield

    def on_report(self, run: Run, report: Report) -> Verdict | None:
        """Clean, look for leaks, warn if a reading is due; return STOP if memory runs out."""
        self._clean(run, report.last)
        if not self.config.enabled:
            return None
        for kind, detector in run.leaks.items():
            self._watch_leaks(run, kind, detector, report.last)
        now = time.monotonic()
        if now >= self.next_reading:
            self.next_reading = now + self.system_monitor.every_s
            for warning, message in self._warnings(run, self.system_monitor.sample()):
                self._warn_once(run, warning, message, report.last)
            self.memory_limit = None
        return self._check_memory_limit(run, report.last)

    def _watch_leaks(self, run: Run, kind: str, detector: LeakDetector, step: int) -> None:
        trend: Trend | None = None
        size = _allocated_bytes(run, kind)
        if kind == "workers" and step >= (self.workers_clean_from or inf):
            trend, self.workers_clean_from = detector.add_after_cleaning(step, size), None
        if detector.add(step, size):
            if kind != "workers":
                memory.free_caches(run.device)  # so that only live memory is compared
                trend = detector.add_after_cleaning(step, _allocated_bytes(run, kind))
            elif self.workers_clean_from is None:
                run.validation.free_worker_memory()
                self.workers_clean_from = step + run.train.free_worker_memory()
        if trend is not None:
            self._report_leak(run, kind, trend, step)
        elif kind in self.leaks and not detector.leaking:
            run.history.withdraw(self.leaks.pop(kind))
            message = "step %d: no leak: since step %d memory does not grow (was: %s)"
            log.info(message, step, detector.plateau, SUBJECTS[kind])

    def _clean(self, run: Run, step: int) -> None:
        if self.clean_above is None:
            return
        share, before = memory.used_share(run.device), self.cleaned_share
        if share <= self.clean_above:
            self.cleaned_share = None
        elif before is None or share >= before + MIN_GROWTH:
            memory.free_caches(run.device)
            self.cleaned_share = memory.used_share(run.device)
            limit, left = f"device.clean_above={self.clean_above:g}", f"{self.cleaned_share:.0%}"
            message = f"{share:.0%} of the memory was in use ({limit}); {left} after cleaning"
            run.history.add(
                "memory_cleaned", message, step=step, category="memory", action="cleaned",
                say=before is None,
            )  # fmt: skip

    def _check_memory_limit(self, run: Run, step: int) -> Verdict | None:
        """Return STOP if memory runs out even after cleaning, and this process uses much of it."""
        above = self.config.stop_above
        if above is None or step >= run.total_steps:
            return None
        grown = memory.process_bytes() - self.process_bytes
        if self.memory_limit is not None and grown < REREAD_GROWTH * self.memory_limit.left:
            return None
        memory_limit = self._read_memory_limit()
        # a run with a halved micro-batch stays near its own limit, where nothing is killed
        is_halved = memory_limit.own and run.history.counts.get("out_of_memory")
        if memory_limit.used_share <= above or is_halved:
            return None
        memory.free_caches(run.device)
        memory_limit = self._read_memory_limit()
        if memory_limit.used_share <= above:
            return None
        own_bytes = self.process_bytes + memory.descendant_bytes()
        size = f"{memory_limit.name} ({memory_limit.limit / GIB:.1f} GiB)"
        message = f"{memory_limit.used_share:.0%} of {size} is in use"
        message += f", this run holds {own_bytes / GIB:.1f} GiB"
        if own_bytes < MIN_OWN_SHARE * memory_limit.limit and not memory_limit.own:
            action = "the run continues: other processes use most of it"
            self._warn_once(run, "memory_short", message, step, action)
            return None
        message += f" ({KEY}.stop_above={above:g})"
        way_out = " where there is more memory, or with a smaller training.batch_size"
        return stop_for(run, "memory_stop", message, way_out, step, "memory")

    def _read_memory_limit(self) -> MemoryLimit:
        self.memory_limit = resources.tightest_memory_limit()
        self.process_bytes = memory.process_bytes()
        return self.memory_limit

    def _report_leak(self, run: Run, kind: str, trend: Trend, step: int) -> None:
        final_size = trend.size + trend.slope * (run.total_steps - step)
        slope, low, high = (f"{x / 1e3:.1f}" for x in (trend.slope, trend.low, trend.high))
        steps = f"{low} to {high}, steps {trend.first} to {trend.last}"
        now, last = (f"{bytes_ / MIB:,.0f} MiB" for bytes_ in (trend.size, final_size))
        growth = f"leak: {SUBJECTS[kind]} by {slope} KB a step ({steps})"
        message = f"{growth}; {now} now, {last} at step {run.total_steps}"
        if kind in self.leaks:  # the same leak, measured again
            self.leaks[kind].message = message
            self.leaks[kind].last_step = step
            run.history.unwritten = True
            return
        action = "" if run.settings.get("debug.memory.enabled") else "debug=memory shows what grows"
        self.leaks[kind] = run.history.add(
            "leak", message, step=step, category="memory", action=action
        )

    def _warnings(self, run: Run, reading: Reading) -> Iterator[tuple[str, str]]:
        """Yield kind and text of a warning for low disk space, swapping, and a hot GPU."""
        config = self.config
        free, swap = reading.disk_free_bytes, reading.swap_bytes
        if free is not None and free < config.disk_min_mb * 1e6:
            text = f"{free / 1e6:,.0f} MB are free on the disk of {run.folder or 'this folder'}"
            yield "disk_low", f"{text} ({KEY}.disk_min_mb)"
        grown = 0 if swap is None or self.swap_before is None else swap - self.swap_before
        if grown > config.swap_mb * 1e6:
            text = f"{grown / 1e6:,.0f} MB more swap in use than at the start"
            yield "swapping", f"{text} ({KEY}.swap_mb)"
        celsius = reading.gpu.get("gpu_celsius", 0.0)
        if celsius > config.gpu_temperature:
            yield "gpu_hot", f"the GPU is at {celsius:g} °C ({KEY}.gpu_temperature)"

    def _warn_once(self, run: Run, kind: str, message: str, step: int, action: str = "") -> None:
        if kind not in self.warned:
            self.warned.add(kind)
            run.history.add(kind, message, step=step, category="resources", action=action)


def stop_for(run: Run, kind: str, message: str, way_out: str, step: int, category: str) -> Verdict:
    """Record that a limit ends the run, with how to resume it; return STOP."""
    resume_hint = f" with {resume_argument(run.folder)}" if run.folder is not None else ""
    ended_by = "memory" if category == "memory" else "limit"
    run.request_stop(ended_by, f"{message}; resume{resume_hint}{way_out}")
    action = "a checkpoint is saved and the run ends"
    run.history.add(kind, message, step=step, category=category, severity="error", action=action)
    return Verdict.STOP


def _allocated_bytes(run: Run, kind: str) -> int:
    if kind != "device":
        return memory.anonymous_bytes() if kind == "process" else memory.child_bytes()
    return torch.cuda.memory_allocated(run.device.torch)
