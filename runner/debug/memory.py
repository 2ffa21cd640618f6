"""Where the memory of a run is: over time, by module, as predicted, and what grows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
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
from runner.techniques.memory_prediction import Live, Prediction
from runner.training.hook import Evaluation, Report
from runner.training.run import Run

log = logging.getLogger("runner")

FILE = "debug/memory.json"
SNAPSHOT = "debug/memory_snapshot.pickle"
NOT_WATCHED = "leaks are not watched for (stability.watch.leaks)"
SHOW_S = 0.5  # between two points in TensorBoard
MOST = 1024  # points of the time line; more could not be seen
LEAST = 0.006  # of the height of a picture, that lines must be apart to be seen as two
Lines = dict[str, list[tuple[int, float]]]


@dataclass
class Point:
    """Bytes held when a stretch of steps had ended, and at most since the one before."""

    step: int
    process: int
    process_peak: int
    device: int = 0
    device_peak: int = 0
    reserved: int = 0  # by the device's caching allocator


@dataclass
class Timeline:
    """Points of a run, thinned when they become too many, and the peaks of its phases."""

    points: list[Point] = field(default_factory=list)
    phases: dict[str, int] = field(default_factory=dict)  # on the device, or of the process
    validations: list[Point] = field(default_factory=list)
    stride: int = 1
    skipped: int = 0

    def add(self, step: int, device: Device, phase: str) -> Point:
        """Read, and begin the next stretch; 40 µs on a CPU."""
        point = Point(step, memory.process_bytes(), memory.process_mark())
        if device.kind == "cuda":
            point.device = torch.cuda.memory_allocated(device.torch)
            point.device_peak = memory.device_mark(device)
            point.reserved = torch.cuda.memory_reserved(device.torch)
        elif device.kind == "mps":
            point.device = point.device_peak = memory.device_mark(device)
        peak = point.process_peak if device.kind == "cpu" else point.device_peak
        self.phases[phase] = max(self.phases.get(phase, 0), peak)
        phases.restart(device)
        if phase == "training":
            self._keep(point)
        else:
            self.validations = [*self.validations[-MOST:], point]
        return point

    def _keep(self, point: Point) -> None:
        self.skipped += 1
        if self.points and self.skipped < self.stride:
            _merge_peaks(self.points[-1], point)
            return
        self.skipped = 0
        self.points.append(point)
        if len(self.points) > MOST:
            for a, b in zip(self.points[::2], self.points[1::2], strict=False):
                _merge_peaks(b, a)
            self.points = self.points[1::2]
            self.stride *= 2

    def lines(self) -> tuple[Lines, Lines]:
        """What to draw, in MiB by step: lines, and dots for validations.

        Of two that cannot be told apart in a picture there is one.
        """
        shown = {"process, at most": "process_peak", "process": "process"}
        if any(point.device_peak for point in self.points):
            shown = {"device, at most": "device_peak", "device": "device", "process": "process"}
        lines = {
            name: [(p.step, getattr(p, key) / MIB) for p in self.points]
            for name, key in shown.items()
        }
        upper, lower, *_ = lines
        peaks, held = ([value for _, value in lines[name]] for name in (upper, lower))
        apart = max((a - b for a, b in zip(peaks, held, strict=True)), default=0.0)
        dots = [(p.step, getattr(p, shown[upper]) / MIB) for p in self.validations]
        if apart < LEAST * max(peaks, default=0.0):
            del lines[upper]
        return lines, {"validation": dots}


def _merge_peaks(kept: Point, other: Point) -> None:
    kept.process_peak = max(kept.process_peak, other.process_peak)
    kept.device_peak = max(kept.device_peak, other.device_peak)


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
        self.timeline = Timeline()
        self.breakdown: Breakdown | None = None
        self.predicted: Prediction | None = None
        self.micro_batch = 0  # of the breakdown
        self.next_look = self.every  # the first full batch from this step on is broken down
        self.samples: Callable[[int], int] = lambda step: 0  # in the batch of a step, from 0 on
        self.partial = ""  # what to say where all of the run's batches are partial
        self.first: ObjectCounts | None = None
        self.leak = ""  # the verdict, once the run has ended
        self.grown: list[Growth] = []
        self.seen_faults: dict[str, int] = {}  # counts when last looked
        self.shown = 0.0
        self.usual = 0.0  # seconds of a step
        self.snapshots = False

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Follow the allocator; write down at the end what there was."""
        self.seen_faults = dict(run.history.counts)
        self._schedule_first_look(run)
        phases.restart(run.device)
        self.snapshots = run.device.kind == "cuda" and self.config.memory.snapshot
        if self.snapshots:
            entries = self.config.memory.snapshot_entries
            torch.cuda.memory._record_memory_history(max_entries=entries, stacks="python")
        try:
            yield
        except OutOfMemory as error:
            self._dump_snapshot(run)
            write_report(run, str(error), self.breakdown)
            raise
        finally:
            if self.snapshots:
                torch.cuda.memory._record_memory_history(enabled=None)
            if self.timeline.points:
                self._conclude(run)

    def _schedule_first_look(self, run: Run) -> None:
        """Find the first look: a full batch from `every` on, else an earlier one, else any."""
        self.samples, begun, last = run.train.samples, run.progress.step, run.total_steps
        due = (begun // self.every + 1) * self.every
        later, earlier = range(due, last + 1), range(min(due, last), begun, -1)
        first = next((step for step in chain(later, earlier) if self._is_full(step)), None)
        if first is None:
            rows = f"{self.samples(last - 1)} of {self.samples(0)} samples"
            self.partial = f"of a partial batch, {rows}: the run has no full one"
        self.next_look = first or last

    def _is_full(self, step: int) -> bool:
        return self.samples(step - 1) >= self.samples(0)

    def due(self, step: int) -> bool:
        """A step of a full batch from `next_look` on."""
        if step < self.next_look or self.rests(step):
            return False
        return self._is_full(step) or bool(self.partial)

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Count what forward and backward hold."""
        known = [*run.model.parameters(), *run.model.buffers(), *run.update.average]
        saved, live = SavedTensors(run.model, known), Live()
        for parameter in run.update.parameters:
            parameter.grad = None  # as the step itself begins; else they were there already
        live.leave_out(iter(known))
        start, micro_batch = time.perf_counter(), run.micro_batch
        with phases.peak(run.device) as peak, ExitStack() as stack:
            stack.enter_context(saved.counting())
            if run.device.kind == "cpu":  # the heap does not tell what it holds and what is free
                stack.enter_context(live)
            yield
        self.seconds += max(0.0, time.perf_counter() - start - self.usual)
        if run.micro_batch != micro_batch:  # it did not fit and was tried again: two steps in one
            return
        with self.looking():
            try:
                breakdown = break_down(run, saved)
            except Exception as error:  # tensors of a kind that keep no storage, perhaps
                log.warning("no account of the memory: %s: %s", type(error).__name__, error)
                self.next_look = run.total_steps + 1
                return
            on_device = peak.on_device - peak.on_device_before
            breakdown.peak = live.peak if run.device.kind == "cpu" else on_device
            self._keep(run, breakdown)

    def _keep(self, run: Run, breakdown: Breakdown) -> None:
        if self.breakdown is None:
            self._predict(run)
            if self.config.memory.census:
                self.first = count_objects(collect=False)
        self.breakdown, self.micro_batch = breakdown, run.micro_batch
        self.next_look = max(2 * breakdown.step // self.every, 1) * self.every
        self._show_breakdown(run, breakdown)
        self._dump_snapshot(run)
        self._write(run)

    def _predict(self, run: Run) -> None:
        try:
            predicted = predict_step(run)
            self.predicted = predicted if predicted.saved >= 0 else None  # too far extrapolated
        except Exception as error:  # whatever a model raises that cannot be traced
            log.debug("no prediction of the memory: %s", error)

    def on_report(self, run: Run, report: Report) -> None:
        """A point of the time line; name what grows, where a leak was found since."""
        start = time.perf_counter()
        self.usual = report.seconds / len(report.loss)
        point = self.timeline.add(report.last, run.device, "training")
        if self.breakdown is not None and run.micro_batch != self.micro_batch:
            self.next_look = 0  # the breakdown is of other steps
        self._show_point(run, point)
        self.seconds += time.perf_counter() - start
        if self._is_new(run, "leak"):
            with self.looking():
                self._name_leak(run, report.last)
        if self._is_new(run, "out_of_memory"):
            reason = "A step did not fit; it was cut smaller and the run goes on."
            with self.looking():
                write_report(run, reason, self.breakdown)

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
        """The most that was held since the last report was, most likely, for this."""
        self.timeline.add(evaluation.step, run.device, "validation")

    # -- findings --------------------------------------------------------------------------------

    def _name_leak(self, run: Run, step: int) -> None:
        if self.first is None:
            return
        self.grown = find_growth(self.first, count_objects())
        largest = {growth.kind: str(growth) for growth in reversed(self.grown)}  # of each kind
        text = "no Python object became more: it is in a library, or the heap has holes"
        if self.grown:
            kinds = [kind for kind in ("tensors", "items", "objects") if kind in largest]
            text = "what grew: " + "; ".join(largest[kind] for kind in kinds)
        fault = _last_leak(run)
        if fault is not None:
            fault.action = text
        log.warning("step %d: leak: %s", step, text)
        run.history.unwritten = True
        rows = [(g.kind, g.what, f"{g.more:,}", _mib(g.bytes)) for g in self.grown]
        table = markdown.table(("", "what", "more", "MiB"), rows)
        run.recorder.text("memory/grown", f"{text}\n\n{table}", step)
        self._dump_snapshot(run)
        self._write(run)

    def _show_breakdown(self, run: Run, breakdown: Breakdown) -> None:
        text = markdown.table(*breakdown.table(self.config.memory.rows))
        rows = [
            (name, _mib(measured), "" if predicted is None else _mib(predicted))
            for name, measured, predicted in breakdown.compare(self.predicted)
        ]
        text += "\n\n" + markdown.table(("MiB", "measured", "predicted"), rows)
        run.recorder.text("memory/account", text, breakdown.step)
        totals = {part: breakdown.total(part) / MIB for part in PARTS}
        run.recorder.show(breakdown.step, "memory/account", totals)
        self.finding = "MiB: " + ", ".join(f"{k} {v:.3g}" for k, v in totals.items() if v)
        most = max(breakdown.rows, key=lambda row: row.activations)
        if most.activations:
            self.finding += f" (most in {most.name})"
        self.finding += f" {self.partial}" if self.partial else ""

    def _conclude(self, run: Run) -> None:
        start = time.perf_counter()
        self.leak = describe_leaks(run.leaks) if run.leaks else NOT_WATCHED
        if run.history.counts.get("leak"):
            fault = _last_leak(run)
            rate = "a leak" if fault is None else fault.message.partition(" (")[0]
            self.finding = self.leak = "; ".join([rate, *map(str, self.grown[:1])])
        else:
            self.finding = "; ".join(filter(None, [self.finding, self.leak]))
        self._draw(run)
        rows = [(name, _mib(peak)) for name, peak in self.timeline.phases.items()]
        text = markdown.table(("phase", "MiB at most"), rows)
        run.recorder.text("memory/phases", text, run.progress.step)
        self._write(run)
        self.seconds += time.perf_counter() - start

    def _draw(self, run: Run) -> None:
        if run.folder is None:
            return
        from runner.record import plots

        step = run.progress.step
        pictures = {"memory": plots.memory_timeline(*self.timeline.lines(), step, "MiB")}
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
        if not self.snapshots or run.folder is None:
            return
        try:
            (run.folder / SNAPSHOT).parent.mkdir(exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(run.folder / SNAPSHOT))  # type: ignore[no-untyped-call]
        except (OSError, RuntimeError) as error:
            log.warning("no snapshot of the allocator: %s", error)
            self.snapshots = False

    def _write(self, run: Run) -> None:
        record: dict[str, Any] = {
            "account": None if self.breakdown is None else asdict(self.breakdown),
            "predicted": None if self.predicted is None else asdict(self.predicted),
            "leak": self.leak,
            "grown": [asdict(growth) for growth in self.grown],
            "phases": self.timeline.phases,
            "timeline": [asdict(point) for point in self.timeline.points],
        }
        self.write_json(run.folder, FILE, record)


def _last_leak(run: Run) -> Fault | None:
    return next((f for f in reversed(run.history.faults.values()) if f.kind == "leak"), None)


def _mib(count: int) -> str:
    return f"{count / MIB:,.3f}" if count else ""
