"""How much memory a run held over its steps, and at most in each of its phases."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from runner.device import memory, phases
from runner.device.device import Device

MOST = 1024  # points; more could not be seen
LEAST = 0.006  # of the height of a picture, that lines must be apart to be seen as two
MIB = 2**20
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
    others: list[Point] = field(default_factory=list)  # of the other phases, as they ended
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
            self.others = [*self.others[-MOST:], point]
        return point

    def _keep(self, point: Point) -> None:
        self.skipped += 1
        if self.points and self.skipped < self.stride:
            _join(self.points[-1], point)
            return
        self.skipped = 0
        self.points.append(point)
        if len(self.points) > MOST:
            for a, b in zip(self.points[::2], self.points[1::2], strict=False):
                _join(b, a)
            self.points = self.points[1::2]
            self.stride *= 2

    def lines(self) -> tuple[Lines, Lines]:
        """What to draw, in MiB by step: lines, and dots for validations.

        Of two that cannot be told apart in a picture there is one.
        """
        on_device = any(point.device_peak for point in self.points)
        shown = [("process, at most", "process_peak"), ("process", "process")]
        if on_device:
            shown = [("device, at most", "device_peak"), ("device", "device"), shown[1]]
        lines = {
            name: [(p.step, getattr(p, key) / MIB) for p in self.points] for name, key in shown
        }
        key = shown[0][1]
        for name in ("process", "device"):
            most = lines.get(f"{name}, at most")
            if most is not None and _same(most, lines[name]):
                del lines[f"{name}, at most"]
        return lines, {"validation": [(p.step, getattr(p, key) / MIB) for p in self.others]}

    def as_dict(self) -> dict[str, Any]:
        """In plain values."""
        return {"phases": self.phases, "timeline": [asdict(point) for point in self.points]}


def _same(peaks: list[tuple[int, float]], held: list[tuple[int, float]]) -> bool:
    """Whether lines are less than two pixels apart everywhere."""
    apart = max((peak - now for (_, peak), (_, now) in zip(peaks, held, strict=True)), default=0.0)
    return apart < LEAST * max((peak for _, peak in peaks), default=0.0)


def _join(kept: Point, other: Point) -> None:
    kept.process_peak = max(kept.process_peak, other.process_peak)
    kept.device_peak = max(kept.device_peak, other.device_peak)
