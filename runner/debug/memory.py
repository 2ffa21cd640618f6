"""Where the memory of a run is: over time, by module, as predicted, and what grows."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch

from runner.debug.config import DebugConfig
from runner.debug.memory_breakdown import (
    MIB,
    PARTS,
    Breakdown,
    SavedTensors,
    break_down,
    predict_step,
)
from runner.debug.object_counts import Growth, ObjectCounts, count_objects, find_growth
from runner.debug.oom_report import write_report
from runner.debug.tool import Tool
from runner.device import memory, phases
from runner.device.device import Device
from runner.device.leaks import describe_leaks
from runner.errors import OutOfMemory
from runner.record import markdown
from runner.record.history import Fault
from runner.techniques.memory_prediction import Prediction
from runner.training.hook import Evaluation, Report
from runner.training.run import Run

log = logging.getLogger("runner")

FILE = "debug/memory.json"
SNAPSHOT = "debug/memory_snapshot.pickle"
NOT_WATCHED = "leaks are not watched for (stability.watch.leaks)"
ENTRIES = 100_000  # events of the allocator that are kept
SHOW_S = 0.5  # between two points in TensorBoard
MOST = 1024  # points of the time line; more could not be seen


@dataclass
class Point:
    """Bytes held when a stretch of steps had ended, and at most since the one before."""

    step: int
    process: int
    process_peak: int
    device: int = 0
    device_peak: int = 0
    reserved: int = 0  # by the device's caching allocator


class MemoryTool(Tool):
    """A time line, the breakdown of a step by module, and what grows where there is a leak.

    At a look a step of a full batch runs uncompiled, and what it keeps for its backward is counted
    by module. The next one is at twice as many steps, or when steps are cut otherwise. Nothing of
    it changes a number of the run, but for last bits where the run's own steps are compiled.
    """

    name = "memory"
    eager = True

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config, config.memory.every)
        self.points: list[Point] = []  # after stretches of training
        self.phases: dict[str, int] = {}  # peaks, on the device, or of the process
        self.breakdown: Breakdown | None = None
        self.predicted: Prediction | None = None
        self.micro_batch = 0  # of the breakdown
        self.run: Run | None = None
        self.next_look = 0  # the first full batch from this step on is broken down
        self.first: ObjectCounts | None = None
        self.leak = ""  # the verdict, once the run has ended
        self.grown: list[Growth] = []
        self.seen_faults: dict[str, int] = {}  # counts when last looked
        self.shown = 0.0
        self.usual = 0.0  # seconds of a step

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Follow the allocator; write down at the end what there was."""
        self.run, self.seen_faults = run, dict(run.history.counts)
        self.next_look = self._first_look(run)
        phases.restart(run.device)
        snapshots = run.device.kind == "cuda" and self.config.memory.snapshot
        if snapshots:
            torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python")
        try:
            yield
        except OutOfMemory as error:
            self._dump_snapshot(run)
            write_report(run, str(error), self.breakdown)
            raise
        finally:
            if self.points:
                self._conclude(run)
            if snapshots:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _first_look(self, run: Run) -> int:
        """A full batch from `every` on, else the latest one before, else the last step."""
        begun, last = run.progress.step, run.total_steps
        due = min((begun // self.every + 1) * self.every, last)
        steps = chain(range(due, last + 1), range(due - 1, begun, -1))
        return next((step for step in steps if self._is_full(run, step)), last)

    def due(self, step: int) -> bool:
        """A step of a full batch from `next_look` on; the last one, where there was none."""
        if self.run is None or step < self.next_look or self.rests(step):
            return False
        last = step == self.run.total_steps and self.breakdown is None
        return last or self._is_full(self.run, step)

    def _is_full(self, run: Run, step: int) -> bool:
        return run.train.samples(step - 1) >= run.train.samples(0)

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Count what forward and backward hold."""
        known = [*run.model.parameters(), *run.model.buffers(), *run.update.average]
        saved = SavedTensors(run.model, known)
        start, micro_batch = time.perf_counter(), run.micro_batch
        with phases.peak(run.device) as peak, saved.counting():
            yield
        self.seconds += max(0.0, time.perf_counter() - start - self.usual)
        if run.micro_batch != micro_batch:  # it did not fit and was tried again: two steps in one
            return
        with self.timed():
            breakdown = break_down(run, saved)
            breakdown.peak = peak.on_device - peak.on_device_before
            self._keep(run, breakdown)

    def _keep(self, run: Run, breakdown: Breakdown) -> None:
        if self.breakdown is None:
            try:
                predicted = predict_step(run)
                self.predicted = predicted if predicted.saved >= 0 else None
            except Exception as error:  # whatever a model raises that cannot be traced
                log.debug("no prediction of the memory: %s", error)
            self.first = count_objects()
        self.breakdown, self.micro_batch = breakdown, run.micro_batch
        self.next_look = max(2 * breakdown.step // self.every, 1) * self.every
        self._show_breakdown(run, breakdown)
        self._dump_snapshot(run)
        self._write(run)

    def on_report(self, run: Run, report: Report) -> None:
        """A point of the time line; name what grows, where a leak was found since."""
        start = time.perf_counter()
        self.usual = report.seconds / len(report.loss)
        point = self._measure(run.device, report.last, "training")
        self._add_point(point)
        if self.breakdown is not None and run.micro_batch != self.micro_batch:
            self.next_look = 0  # the breakdown is of other steps
        self._show_point(run, point)
        self.seconds += time.perf_counter() - start
        if self._is_new(run, "leak"):
            with self.timed():
                self._name_leak(run, report.last)
        if self._is_new(run, "out_of_memory"):
            reason = "A step did not fit; it was cut smaller and the run goes on."
            with self.timed():
                write_report(run, reason, self.breakdown)

    def _measure(self, device: Device, step: int, phase: str) -> Point:
        """Read, and begin the next stretch; 40 µs on a CPU."""
        point = Point(step, memory.process_bytes(), memory.process_mark())
        if device.kind == "cuda":
            point.device = torch.cuda.memory_allocated(device.torch)
            point.reserved = torch.cuda.memory_reserved(device.torch)
        point.device_peak = memory.device_mark(device)
        peak = point.process_peak if device.kind == "cpu" else point.device_peak
        self.phases[phase] = max(self.phases.get(phase, 0), peak)
        phases.restart(device)
        return point

    def _add_point(self, point: Point) -> None:
        """Keep it; of too many every second one stays, with the peak of both."""
        self.points.append(point)
        if len(self.points) > MOST:
            for kept, dropped in zip(self.points[1::2], self.points[::2], strict=False):
                kept.process_peak = max(kept.process_peak, dropped.process_peak)
                kept.device_peak = max(kept.device_peak, dropped.device_peak)
            self.points = self.points[1::2]

    def _is_new(self, run: Run, kind: str) -> bool:
        """Whether the history counts more faults of that kind than when last asked."""
        before, now = self.seen_faults.get(kind, 0), run.history.counts.get(kind, 0)
        self.seen_faults[kind] = now
        return now > before

    def _show_point(self, run: Run, point: Point) -> None:
        now = time.monotonic()
        if now - self.shown <= SHOW_S or self.rests(point.step):
            return
        self.shown = now
        values = {"process_mib": point.process / MIB, "peak_mib": point.process_peak / MIB}
        if run.device.kind != "cpu":
            values |= {
                "device_mib": point.device / MIB,
                "device_peak_mib": point.device_peak / MIB,
                "device_reserved_mib": point.reserved / MIB,
            }
        run.recorder.show(point.step, "memory", values)

    def on_validation(self, run: Run, evaluation: Evaluation) -> None:
        """The peak of the pass over the validation set."""
        start = time.perf_counter()
        self._measure(run.device, evaluation.step, "validation")
        self.seconds += time.perf_counter() - start

    # -- findings ------------------------------------------------------------------------------

    def _name_leak(self, run: Run, step: int) -> None:
        if self.first is None:
            return
        gc.collect()
        self.grown = find_growth(self.first, count_objects())
        largest = {growth.kind: str(growth) for growth in reversed(self.grown)}  # of each kind
        text = "no Python object became more: it is in a library, or the heap has holes"
        if largest:
            kinds = [kind for kind in ("tensors", "items") if kind in largest]
            text = "what grew: " + "; ".join(largest[kind] for kind in kinds)
        fault = _last_leak(run)
        if fault is not None:
            fault.action = text
        log.warning("step %d: leak: %s", step, text)
        run.history.unwritten = True
        run.recorder.text("memory/grown", "\n".join(f"- {g}" for g in self.grown) or text, step)
        self._dump_snapshot(run)
        self._write(run)

    def _show_breakdown(self, run: Run, breakdown: Breakdown) -> None:
        text = markdown.table(*breakdown.table(self.config.memory.rows))
        if self.predicted is not None:
            text += f"\n\nPredicted for the backward: {_mib(self.predicted.saved)} MiB.\n"
        run.recorder.text("memory/account", text, breakdown.step)
        totals = {part: breakdown.total(part) / MIB for part in PARTS}
        run.recorder.show(breakdown.step, "memory/account", totals)
        self.finding = "MiB: " + ", ".join(f"{k} {v:.3g}" for k, v in totals.items() if v)
        most = max(breakdown.rows, key=lambda row: row.activations)
        if most.activations:
            self.finding += f" (most in {most.name})"
        if not self._is_full(run, breakdown.step):
            samples = f"{run.train.samples(breakdown.step - 1)} of {run.train.samples(0)}"
            self.finding += f" of a partial batch, {samples} samples: no full one was looked at"

    def _conclude(self, run: Run) -> None:
        start = time.perf_counter()
        self.leak = describe_leaks(run.leaks) if run.leaks else NOT_WATCHED
        fault = _last_leak(run)
        if fault is not None:
            rate = fault.message.partition(" (")[0]
            self.finding = self.leak = "; ".join([rate, *map(str, self.grown[:1])])
        else:
            self.finding = "; ".join(filter(None, [self.finding, self.leak]))
        self._draw(run)
        rows = [(name, _mib(peak)) for name, peak in self.phases.items()]
        text = markdown.table(("phase", "MiB at most"), rows)
        run.recorder.text("memory/phases", text, run.progress.step)
        self._write(run)
        self.seconds += time.perf_counter() - start

    def _draw(self, run: Run) -> None:
        if run.folder is None:
            return
        from runner.record import plots

        step = run.progress.step
        shown = {"process, at most": "process_peak", "process": "process"}
        if run.device.kind != "cpu":
            shown = {"device, at most": "device_peak", "device": "device", "process": "process"}
        lines = {
            name: [(point.step, getattr(point, key) / MIB) for point in self.points]
            for name, key in shown.items()
        }
        pictures = {"memory": plots.memory_timeline(lines, {}, step, "MiB")}
        if self.breakdown is not None:
            rows = self.breakdown.largest(10)
            parts = {part: [getattr(row, part) / MIB for row in rows] for part in PARTS}
            names = [row.name for row in rows]
            pictures["memory_modules"] = plots.memory_modules(names, parts)
        for name, rgb in pictures.items():
            run.recorder.image(f"memory/{name.removeprefix('memory_')}", rgb, step)
            run.recorder.save_image(f"debug/plots/{name}.png", rgb)

    def _dump_snapshot(self, run: Run) -> None:
        """What the CUDA allocator did lately; its picture is on pytorch.org/memory_viz."""
        if run.device.kind != "cuda" or not self.config.memory.snapshot or run.folder is None:
            return
        try:
            (run.folder / SNAPSHOT).parent.mkdir(exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(run.folder / SNAPSHOT))  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:
            log.warning("no snapshot of the allocator: %s", error)

    def _write(self, run: Run) -> None:
        record: dict[str, Any] = {
            "account": None if self.breakdown is None else asdict(self.breakdown),
            "predicted": None if self.predicted is None else asdict(self.predicted),
            "leak": self.leak,
            "grown": [asdict(growth) for growth in self.grown],
            "phases": self.phases,
            "timeline": [asdict(point) for point in self.points],
        }
        self.write_json(run.folder, FILE, record)


def _last_leak(run: Run) -> Fault | None:
    return next((f for f in reversed(run.history.faults.values()) if f.kind == "leak"), None)


def _mib(count: int) -> str:
    return f"{count / MIB:,.3f}" if count else ""
