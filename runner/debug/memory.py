"""The memory of a run by module, and the objects that grow in a leak."""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from runner.debug.config import DebugConfig
from runner.debug.memory_breakdown import (
    MIB,
    PARTS,
    Breakdown,
    SavedTensors,
    break_down,
    write_oom_report,
)
from runner.debug.tool import Tool
from runner.device import memory
from runner.device.leaks import describe_leaks
from runner.errors import OutOfMemory
from runner.record.history import Fault
from runner.training.hook import Report
from runner.training.run import Run

log = logging.getLogger("runner")

FILE = "debug/memory.json"
SNAPSHOT = "debug/memory_snapshot.pickle"
NOT_WATCHED = "leaks are not watched for (stability.watch.leaks)"
EVENTS = 100_000  # allocator events to keep
NAMED = 8  # growing kinds that are reported
FEW = 16  # minimum increase that counts as growth


class MemoryTool(Tool):
    """Breaks down a step's memory by module, and names growing objects after a leak.

    At a look, a step of a full batch runs uncompiled, and tensors saved for backward are counted by
    module. The next look follows at twice the step, or when the micro-batch changes. Numbers change
    only in the last bits, where the run's own steps are compiled.
    """

    name = "memory"
    eager = True

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config, config.memory.every)
        self.breakdown: Breakdown | None = None
        self.micro_batch = 0  # of the breakdown
        self.run: Run | None = None
        self.next_look = 0  # the first full batch from this step on is inspected
        self.objects: ObjectCounts | None = None  # at the first look
        self.leak = ""  # verdict at the end of the run
        self.grown: list[Growth] = []
        self.seen_faults: dict[str, int] = {}  # counts at the last check
        self.usual = 0.0  # seconds of a step

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Record the allocator's history; write the findings at the end."""
        self.run, self.seen_faults = run, dict(run.history.counts)
        self.next_look = min((run.progress.step // self.every + 1) * self.every, run.total_steps)
        snapshots = run.device.kind == "cuda" and self.config.memory.snapshot
        if snapshots:
            torch.cuda.memory._record_memory_history(max_entries=EVENTS, stacks="python")
        try:
            yield
        except OutOfMemory as error:
            self._dump_snapshot(run)
            write_oom_report(run, str(error), self.breakdown)
            raise
        finally:
            self._conclude(run)
            if snapshots:
                torch.cuda.memory._record_memory_history(enabled=None)

    def due(self, step: int) -> bool:
        """Whether the step is a full batch from `next_look` on, or the last without a breakdown."""
        if self.run is None or step < self.next_look or self.rests(step):
            return False
        train = self.run.train
        last = step == self.run.total_steps and self.breakdown is None
        return last or train.samples(step - 1) >= train.samples(0)

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Count the tensors that forward and backward hold."""
        known = [*run.model.parameters(), *run.model.buffers(), *run.update.average]
        saved = SavedTensors(run.model, known)
        start, micro_batch = time.perf_counter(), run.micro_batch
        with memory.peak(run.device) as peak, saved.counting():
            yield
        self.seconds += max(0.0, time.perf_counter() - start - self.usual)
        if run.micro_batch != micro_batch:  # out of memory and retried: two steps in one
            return
        with self.timed():
            breakdown = break_down(run, saved)
            breakdown.peak = peak.on_device - peak.on_device_before
            self._keep(run, breakdown)

    def _keep(self, run: Run, breakdown: Breakdown) -> None:
        self.objects = self.objects or count_objects()
        self.breakdown, self.micro_batch = breakdown, run.micro_batch
        self.next_look = max(2 * breakdown.step // self.every, 1) * self.every
        self.finding = _describe(run, breakdown)
        run.recorder.text("memory/account", breakdown.table(), breakdown.step)
        totals = {part: breakdown.total(part) / MIB for part in PARTS}
        run.recorder.show(breakdown.step, "memory/account", totals)
        self._dump_snapshot(run)
        self._write(run)

    def on_report(self, run: Run, report: Report) -> None:
        """Name growing objects if a leak was found since the last report."""
        self.usual = report.seconds / len(report.loss)
        if self.breakdown is not None and run.micro_batch != self.micro_batch:
            self.next_look = 0  # the breakdown is outdated
        if self._is_new(run, "leak"):
            with self.timed():
                self._name_leak(run, report.last)
        if self._is_new(run, "out_of_memory"):
            reason = "A step ran out of memory; its micro-batch was reduced and the run continues."
            with self.timed():
                write_oom_report(run, reason, self.breakdown)

    def _is_new(self, run: Run, kind: str) -> bool:
        """Whether the history counts more faults of that kind than at the last call."""
        before, now = self.seen_faults.get(kind, 0), run.history.counts.get(kind, 0)
        self.seen_faults[kind] = now
        return now > before

    # -- findings ------------------------------------------------------------------------------

    def _name_leak(self, run: Run, step: int) -> None:
        if self.objects is None:
            return
        gc.collect()
        self.grown = find_growth(self.objects, count_objects())
        text = "no Python object count grew: a library leaks, or the heap is fragmented"
        if self.grown:
            text = "growing objects: " + "; ".join(map(str, self.grown[:2]))
        fault = _last_leak(run)
        if fault is not None:
            fault.action = text
        log.warning("step %d: leak: %s", step, text)
        run.history.unwritten = True
        run.recorder.text("memory/grown", "\n".join(f"- {g}" for g in self.grown) or text, step)
        self._dump_snapshot(run)
        self._write(run)

    def _conclude(self, run: Run) -> None:
        self.leak = describe_leaks(run.leaks) if run.leaks else NOT_WATCHED
        fault = _last_leak(run)
        if fault is not None:
            rate = fault.message.partition(" (")[0]
            self.finding = self.leak = "; ".join([rate, *map(str, self.grown[:1])])
        else:
            self.finding = "; ".join(filter(None, [self.finding, self.leak]))
        self._write(run)

    def _dump_snapshot(self, run: Run) -> None:
        """Write the CUDA allocator's history, for pytorch.org/memory_viz."""
        if run.device.kind != "cuda" or not self.config.memory.snapshot or run.folder is None:
            return
        try:
            (run.folder / SNAPSHOT).parent.mkdir(exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(run.folder / SNAPSHOT))  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:
            log.warning("no snapshot of the allocator: %s", error)

    def _write(self, run: Run) -> None:
        record = {
            "account": None if self.breakdown is None else asdict(self.breakdown),
            "leak": self.leak,
            "grown": [asdict(growth) for growth in self.grown],
        }
        self.write_json(run.folder, FILE, record)


def _describe(run: Run, breakdown: Breakdown) -> str:
    totals = {part: breakdown.total(part) / MIB for part in PARTS}
    text = "MiB: " + ", ".join(f"{part} {size:.3g}" for part, size in totals.items() if size)
    most = max(breakdown.rows, key=lambda row: row.activations)
    if most.activations:
        text += f" (most in {most.name})"
    samples, full = run.train.samples(breakdown.step - 1), run.train.samples(0)
    if samples < full:
        text += f" of a partial batch, {samples} of {full} samples: no full one was measured"
    return text


def _last_leak(run: Run) -> Fault | None:
    return next((f for f in reversed(run.history.faults.values()) if f.kind == "leak"), None)


# -- growth -----------------------------------------------------------------------------------


ObjectCounts = tuple[Counter[str], Counter[str]]
"""Number of live objects by kind, as tracked by the garbage collector; bytes of tensors."""


@dataclass(frozen=True)
class Growth:
    """A kind of objects whose number has grown."""

    kind: str
    more: int
    bytes: int = 0  # of tensors

    def __str__(self) -> str:
        size = f", {self.bytes / MIB:,.1f} MiB" if self.bytes else ""
        return f"{self.more:,} more {self.kind}{size}"


def count_objects() -> ObjectCounts:
    """Count tensors by shape and dtype, other objects by class; 50 ms for 200,000."""
    number, size = Counter[str](), Counter[str]()
    for item in gc.get_objects():
        # a lazy parameter has no shape yet; the compiler's fake tensors hold no memory, and their
        # sizes may be symbols
        if not issubclass(type(item), Tensor):
            number[f"objects of type {type(item).__qualname__}"] += 1
        elif type(item) is not FakeTensor and not is_lazy(item):
            dtype = str(item.dtype).removeprefix("torch.")
            kind = f"tensors {list(item.shape)} {dtype} on {item.device}"
            number[kind] += 1
            size[kind] += item.numel() * item.element_size()
    return number, size


def find_growth(before: ObjectCounts, now: ObjectCounts) -> list[Growth]:
    """Return the kinds that grew most: tensors by bytes, then others by number."""
    more, size = (new - old for new, old in zip(now, before, strict=True))
    grown = [Growth(kind, count, size[kind]) for kind, count in more.items() if count >= FEW]
    return sorted(grown, key=lambda growth: (-growth.bytes, -growth.more))[:NAMED]
