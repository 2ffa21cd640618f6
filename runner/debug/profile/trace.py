"""What a profiler's trace says, in numbers: operators, modules, kernels and copies.

It is read from the file that Perfetto shows (Chrome's trace format, times in µs), so the tables
and the picture cannot differ.
"""

from __future__ import annotations

import math
import re
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from runner.debug.profile.kinds import GRAPHS, TENSOR_CORES, kind

MODULE = "module "  # before a module's name, in the ranges around its forward
OUTSIDE = "(outside the modules)"
BACKWARD = "autograd::engine::evaluate_function: "
CALIBRATION = "runner calibration"  # the range of operators that are no part of a step


@dataclass
class Operator:
    """One kind of operator, without those that it calls."""

    name: str
    shapes: str = ""
    calls: int = 0
    seconds: float = 0.0  # on the host
    device_seconds: float = 0.0  # of the kernels that it started
    allocated: int = 0  # bytes, where the trace has them


@dataclass
class Module:
    """One module of the model, without those inside it."""

    name: str
    calls: int = 0
    operators: int = 0  # called in it, both ways
    forward: float = 0.0  # seconds; on an accelerator those of its kernels
    backward: float = 0.0
    by_step: list[float] = field(default_factory=list)  # seconds of each step, both ways

    @property
    def seconds(self) -> float:
        """Both ways."""
        return self.forward + self.backward

    @property
    def typical(self) -> float:
        """Seconds of the median step: the scheduler's pauses lengthen single steps."""
        return median(self.by_step) if self.by_step else 0.0


@dataclass
class Copies:
    """Copies in one direction."""

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class Reading:
    """A window of some steps."""

    steps: int = 0
    seconds: float = 0.0  # wall time of the steps
    operators: list[Operator] = field(default_factory=list)  # the longest first
    modules: list[Module] = field(default_factory=list)
    copies: dict[str, Copies] = field(default_factory=dict)  # HtoD, DtoH, DtoD, _to_copy
    busy: float | None = None  # share of the time in which the device computed
    tensor_cores: float | None = None  # share of the kernels' time, by the kernels' names
    kernels: int = 0
    calibration_calls: int = 0  # of small operators, made after each step for comparison
    calibration_share: float = 0.0  # their CPU time, of that of the step

    @property
    def on_device(self) -> bool:
        """Whether there are kernels, so that time is theirs."""
        return self.kernels > 0

    def spent(self, operator: Operator) -> float:
        """What an operator takes: on an accelerator, its kernels' time."""
        return operator.device_seconds if self.on_device else operator.seconds

    @property
    def operator_seconds(self) -> float:
        """Of all of them."""
        return sum(self.spent(operator) for operator in self.operators)

    @property
    def calls(self) -> int:
        """Operators called."""
        return sum(operator.calls for operator in self.operators)

    @property
    def calling(self) -> float:
        """Share of a step's CPU time that calling so many operators takes, were they all small.

        A busy machine lengthens the step and the operators that it is compared with alike.
        """
        return self.calls / (self.calibration_calls or math.inf) * self.calibration_share

    @property
    def hot_spot(self) -> tuple[Module | None, float]:
        """The module that takes the most of the median step, and its share of the operators'."""
        whole = sum(module.typical for module in self.modules)
        inside = [module for module in self.modules if module.name != OUTSIDE]
        most = max(inside, key=lambda module: module.typical, default=None)
        return most, most.typical / whole if most is not None and whole else 0.0

    @property
    def kinds(self) -> dict[str, float]:
        """Shares of the operators' time by what they do, the largest first; others left out."""
        whole, sums = self.operator_seconds or 1.0, dict[str, float]()
        for operator in self.operators:
            if what := kind(operator.name):
                sums[what] = sums.get(what, 0.0) + self.spent(operator) / whole
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @property
    def products(self) -> float:
        """Share of the operators' time in matrix products, convolutions and attention."""
        return sum(share for what, share in self.kinds.items() if what != GRAPHS)


@dataclass(slots=True)
class _Node:
    """An event with those inside it."""

    name: str
    start: float
    end: float
    args: dict[str, Any]
    operator: bool
    module: str  # innermost around it, in the forward
    backward: int | None  # sequence number of the backward that it is in
    inner: float = 0.0  # time of operators directly inside


def read(trace: dict[str, Any], shapes: bool = False, most: int | None = None) -> Reading:
    """Everything of a trace; one pass over its events, a few microseconds each.

    Of a window that was cut short `most` is the number of steps that are whole.

    A module's backward is found through the sequence numbers that autograd gives a forward
    operator and its derivative.
    """
    threads: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    device: list[dict[str, Any]] = []
    steps: list[tuple[float, float]] = []
    for event in trace.get("traceEvents", ()):
        kind = event.get("cat")
        if kind in ("cpu_op", "user_annotation") and event.get("ph") == "X":
            if str(event["name"]).startswith("ProfilerStep#"):
                steps.append((event["ts"], event["dur"] / 1e6))
            else:
                threads.setdefault((event["pid"], event["tid"]), []).append(event)
        elif kind == "cpu_instant_event" and event.get("name") == "[memory]":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            device.append(event)
    steps = sorted(steps)[:most]
    reading = Reading(len(steps), sum(seconds for _, seconds in steps))
    _Sweep(reading, shapes, _by_operator(device), [start for start, _ in steps]).over(
        threads.values()
    )
    _device(reading, device)
    reading.operators.sort(key=reading.spent, reverse=True)
    reading.modules.sort(key=lambda module: -module.seconds)
    return reading


def _by_operator(device: Iterable[dict[str, Any]]) -> dict[Any, float]:
    """Seconds on the device by the id of the operator that asked for them."""
    sums: dict[Any, float] = {}
    for event in device:
        owner = event.get("args", {}).get("External id")
        sums[owner] = sums.get(owner, 0.0) + event["dur"] / 1e6
    return sums


class _Sweep:
    """Goes over the events of each thread in time, keeping those that are open."""

    def __init__(
        self, reading: Reading, shapes: bool, device: dict[Any, float], starts: list[float]
    ) -> None:
        self.reading, self.shapes, self.device, self.starts = reading, shapes, device, starts
        self.operators: dict[tuple[str, str], Operator] = {}
        self.modules: dict[str, Module] = {}
        self.owner: dict[int, str] = {}  # module by sequence number
        self.late: list[tuple[int, float, float]] = []  # of backwards: number, start, seconds

    def over(self, threads: Iterable[list[dict[str, Any]]]) -> None:
        """Fill the reading."""
        for events in threads:
            events.sort(key=lambda e: (e["ts"], -e.get("dur", 0.0)))
            self._thread(events)
        for number, start, seconds in self.late:
            self._spend(self.owner.get(number, OUTSIDE), start, seconds).backward += seconds
        self.reading.operators = list(self.operators.values())
        if len(self.modules) > (OUTSIDE in self.modules):
            self.reading.modules = list(self.modules.values())

    def _thread(self, events: list[dict[str, Any]]) -> None:
        stack: list[_Node] = []
        for event in events:
            start = event["ts"]
            while stack and stack[-1].end <= start:
                self._close(stack)
            if event.get("ph") == "i":
                self._allocation(stack, event["args"])
                continue
            stack.append(self._open(stack, event))
        while stack:
            self._close(stack)

    def _open(self, stack: list[_Node], event: dict[str, Any]) -> _Node:
        name, args = str(event["name"]), event.get("args", {})
        above = stack[-1] if stack else None
        module = above.module if above else OUTSIDE
        backward = above.backward if above else None
        operator = event["cat"] == "cpu_op"
        if name.startswith(MODULE) and not operator:
            module = name.removeprefix(MODULE)
            self._module(module).calls += 1
        elif name == CALIBRATION:
            module = CALIBRATION
        number = args.get("Sequence number")
        if operator and number is not None:
            if name.startswith(BACKWARD):
                backward = number
            elif backward is None:
                self.owner[number] = module
        return _Node(
            name, event["ts"], event["ts"] + event["dur"], args, operator, module, backward
        )

    def _close(self, stack: list[_Node]) -> None:
        node = stack.pop()
        if node.module == CALIBRATION:
            self.reading.calibration_calls += node.operator
            return
        took = node.end - node.start
        if not node.operator:  # a range: what is inside belongs to the operator around it
            if stack:
                stack[-1].inner += node.inner
            return
        if stack:
            stack[-1].inner += took
        own = max(0.0, took - node.inner) / 1e6
        operator = self._operator(node)
        operator.calls += 1
        operator.seconds += own
        on_device = self.device.get(node.args.get("External id"), 0.0)
        operator.device_seconds += on_device
        seconds = on_device if self.device else own
        if node.backward is not None:
            self.late.append((node.backward, node.start, seconds))
        else:
            self._spend(node.module, node.start, seconds).forward += seconds

    def _spend(self, name: str, start: float, seconds: float) -> Module:
        module, step = self._module(name), bisect(self.starts, start) - 1
        module.operators += 1
        if 0 <= step < len(module.by_step):
            module.by_step[step] += seconds
        return module

    def _allocation(self, stack: list[_Node], args: dict[str, Any]) -> None:
        size = int(args.get("Bytes", 0))
        inside = next((node for node in reversed(stack) if node.operator), None)
        if size > 0 and inside is not None:
            self._operator(inside).allocated += size

    def _operator(self, node: _Node) -> Operator:
        name = node.name.removeprefix(BACKWARD)
        sizes = ""
        if self.shapes:
            sizes = " ".join(_sizes(dims) for dims in node.args.get("Input Dims", ()) if dims)
        row = self.operators.get((name, sizes))
        if row is None:
            row = self.operators[name, sizes] = Operator(name, sizes)
        return row

    def _module(self, name: str) -> Module:
        row = self.modules.get(name)
        if row is None:
            row = self.modules[name] = Module(name, by_step=[0.0] * len(self.starts))
        return row


def _sizes(dims: Any) -> str:
    if isinstance(dims[0], list):  # a list of tensors: the first stands for all
        return f"{len(dims)}×{_sizes(dims[0])}" if dims[0] else f"{len(dims)}×scalar"
    return "×".join(str(size) for size in dims)


def _device(reading: Reading, events: list[dict[str, Any]]) -> None:
    """How busy the accelerator was, and what was copied."""
    for operator in reading.operators:
        if operator.name == "aten::_to_copy":
            copies = reading.copies.setdefault("_to_copy", Copies())
            copies.count += operator.calls
            copies.seconds += reading.spent(operator)
    kernels = [e for e in events if e["cat"] == "kernel"]
    reading.kernels = len(kernels)
    for event in events:
        way = (
            re.search(r"[HDP]to[HDP]", str(event["name"])) if event["cat"] == "gpu_memcpy" else None
        )
        if way is not None:
            copies = reading.copies.setdefault(way[0], Copies())
            copies.count += 1
            copies.bytes += int(event.get("args", {}).get("bytes", 0))
            copies.seconds += event["dur"] / 1e6
    if not events or not reading.seconds:
        return
    reading.busy = min(1.0, _union(events) / 1e6 / reading.seconds)
    whole = sum(e["dur"] for e in kernels)
    if whole:
        cores = sum(e["dur"] for e in kernels if TENSOR_CORES.search(str(e["name"])))
        reading.tensor_cores = cores / whole


def _union(events: list[dict[str, Any]]) -> float:
    """Microseconds in which at least one event was going on."""
    busy, until = 0.0, float("-inf")
    for start, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy
