"""A profiler's trace in numbers: operators, modules, kernels and copies.

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

MODULE = "module "  # before a module's name, in the ranges around its forward
OUTSIDE = "(outside the modules)"
BACKWARD = "autograd::engine::evaluate_function: "
CALIBRATION = "runner calibration"  # the range of operators that are no part of a step
ATTENTION, CONVOLUTIONS, PRODUCTS = "attention", "convolutions", "matrix products"
GRAPHS = "compiled graphs"
KINDS = (  # the first that is found in a name counts
    (GRAPHS, re.compile(r"^(## Call CompiledFxGraph|Torch-Compiled Region|CompiledFunction)")),
    (ATTENTION, re.compile(r"attention|flash|fmha", re.IGNORECASE)),
    (CONVOLUTIONS, re.compile(r"conv(?!ert)", re.IGNORECASE)),
    (PRODUCTS, re.compile(r"mm$|bmm|matmul|gemm|linear|_int_mm|_scaled_mm|mkldnn", re.IGNORECASE)),
)
# marks in the names of kernels that run on tensor cores: cuBLAS, CUTLASS, cuDNN, flash attention;
# the profiler does not count the cores' cycles
TENSOR_CORES = re.compile(
    r"hmma|imma|gmma|tensorop|tensor\d+x\d+|xmma|s16816|s1688|s884|h16816|h1688|h884|nvjet"
    r"|flash_(fwd|bwd)|fmha|bf16gemm|mma_",
    re.IGNORECASE,
)


def operator_kind(name: str) -> str:
    """One of the kinds above; empty for all others."""
    return next((kind for kind, marks in KINDS if marks.search(name)), "")


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
class Trace:
    """The numbers of a window of some steps."""

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

    def spent(self, operator: Operator) -> float:
        """Seconds of an operator: on an accelerator those of its kernels."""
        return operator.device_seconds if self.kernels else operator.seconds

    @property
    def operator_seconds(self) -> float:
        """Seconds of all operators."""
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
            if kind := operator_kind(operator.name):
                sums[kind] = sums.get(kind, 0.0) + self.spent(operator) / whole
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def as_dict(self, most: int = 50) -> dict[str, Any]:
        """Plain values, for debug/profile.json; seconds are those of all its steps."""
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "operator_calls": self.calls,
            "operator_seconds": self.operator_seconds,
            "products": sum(share for kind, share in self.kinds.items() if kind != GRAPHS),
            "kinds": self.kinds,
            "calling": self.calling,
            "device_busy": self.busy,
            "tensor_cores": self.tensor_cores,
            "copies": {way: vars(copies) for way, copies in self.copies.items()},
            "operators": [vars(operator) for operator in self.operators[:most]],
            "modules": [vars(module) for module in self.modules[:most]],
        }


def read_trace(content: dict[str, Any], shapes: bool = False, most: int | None = None) -> Trace:
    """The numbers of a trace; one pass over its events, a few microseconds each.

    Of a window that was cut short `most` is the number of steps that are whole. A module's backward
    is found through the sequence numbers that autograd gives a forward operator and its derivative.
    """
    threads: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    device: list[dict[str, Any]] = []
    steps: list[tuple[float, float]] = []
    for event in content.get("traceEvents", ()):
        category = event.get("cat")
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            device.append(event)
        elif category == "user_annotation" and str(event["name"]).startswith("ProfilerStep#"):
            steps.append((event["ts"], event["dur"] / 1e6))
        elif category in ("cpu_op", "user_annotation") and event.get("ph") == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
        elif category == "cpu_instant_event" and event.get("name") == "[memory]":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    steps = sorted(steps)[:most]
    trace = Trace(len(steps), sum(seconds for _, seconds in steps))
    trace.kernels = sum(event["cat"] == "kernel" for event in device)
    reader = _Reader(trace, shapes, device, [start for start, _ in steps])
    reader.read(threads.values())
    _read_device(trace, device)
    trace.operators.sort(key=trace.spent, reverse=True)
    trace.modules.sort(key=lambda module: -module.seconds)
    return trace


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


class _Reader:
    """Goes over the events of each thread in time, keeping those that are open."""

    def __init__(
        self, trace: Trace, shapes: bool, device: Iterable[dict[str, Any]], starts: list[float]
    ) -> None:
        self.trace, self.shapes, self.starts = trace, shapes, starts
        self.device: dict[Any, float] = {}  # seconds by the id of the operator that asked for them
        for event in device:
            owner = event.get("args", {}).get("External id")
            self.device[owner] = self.device.get(owner, 0.0) + event["dur"] / 1e6
        self.operators: dict[tuple[str, str], Operator] = {}
        self.modules: dict[str, Module] = {}
        self.owner: dict[int, str] = {}  # module by sequence number
        self.backwards: list[tuple[int, float, float]] = []  # number, start, seconds

    def read(self, threads: Iterable[list[dict[str, Any]]]) -> None:
        """Fill the trace."""
        for events in threads:
            stack: list[_Node] = []
            for event in sorted(events, key=lambda e: (e["ts"], -e.get("dur", 0.0))):
                while stack and stack[-1].end <= event["ts"]:
                    self._close(stack)
                if event.get("ph") == "i":
                    self._allocation(stack, event["args"])
                else:
                    stack.append(self._open(stack, event))
            while stack:
                self._close(stack)
        for number, start, seconds in self.backwards:
            self._spend(self.owner.get(number, OUTSIDE), start, seconds).backward += seconds
        self.trace.operators = list(self.operators.values())
        if len(self.modules) > (OUTSIDE in self.modules):
            self.trace.modules = list(self.modules.values())

    def _open(self, stack: list[_Node], event: dict[str, Any]) -> _Node:
        name, args = str(event["name"]), event.get("args", {})
        module, backward = OUTSIDE, None
        if stack:
            module, backward = stack[-1].module, stack[-1].backward
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
        end = event["ts"] + event["dur"]
        return _Node(name, event["ts"], end, args, operator, module, backward)

    def _close(self, stack: list[_Node]) -> None:
        node = stack.pop()
        if node.module == CALIBRATION:
            self.trace.calibration_calls += node.operator
            return
        took = node.end - node.start
        if stack:  # what is inside a range belongs to the operator around it
            stack[-1].inner += took if node.operator else node.inner
        if not node.operator:
            return
        own = max(0.0, took - node.inner) / 1e6
        on_device = self.device.get(node.args.get("External id"), 0.0)
        operator = self._operator(node)
        operator.calls += 1
        operator.seconds += own
        operator.device_seconds += on_device
        seconds = on_device if self.device else own
        if node.backward is not None:
            self.backwards.append((node.backward, node.start, seconds))
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
        name, sizes = node.name.removeprefix(BACKWARD), ""
        if self.shapes:
            sizes = " ".join(_format_sizes(d) for d in node.args.get("Input Dims", ()) if d)
        return self.operators.setdefault((name, sizes), Operator(name, sizes))

    def _module(self, name: str) -> Module:
        return self.modules.setdefault(name, Module(name, by_step=[0.0] * len(self.starts)))


def _format_sizes(dims: Any) -> str:
    if isinstance(dims[0], list):  # a list of tensors: the first stands for all
        return f"{len(dims)}×{_format_sizes(dims[0])}" if dims[0] else f"{len(dims)}×scalar"
    return "×".join(str(size) for size in dims)


def _read_device(trace: Trace, events: list[dict[str, Any]]) -> None:
    """How busy the accelerator was, and what was copied."""
    for operator in trace.operators:
        if operator.name == "aten::_to_copy":
            copies = trace.copies.setdefault("_to_copy", Copies())
            copies.count += operator.calls
            copies.seconds += trace.spent(operator)
    for event in events:
        way = re.search(r"[HDP]to[HDP]", str(event["name"]))
        if way is not None and event["cat"] == "gpu_memcpy":
            copies = trace.copies.setdefault(way[0], Copies())
            copies.count += 1
            copies.bytes += int(event.get("args", {}).get("bytes", 0))
            copies.seconds += event["dur"] / 1e6
    if not events or not trace.seconds:
        return
    busy, until = 0.0, -math.inf
    for start, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        busy += max(0.0, end - max(start, until))  # kernels side by side count once
        until = max(until, end)
    trace.busy = min(1.0, busy / 1e6 / trace.seconds)
    kernels = [event for event in events if event["cat"] == "kernel"]
    if whole := sum(event["dur"] for event in kernels):
        cores = sum(e["dur"] for e in kernels if TENSOR_CORES.search(str(e["name"])))
        trace.tensor_cores = cores / whole
