"""Time by operator and by module, from a profiler's events: forward, backward, stalls in Python.

While `ModuleRanges` records, each call of a module is a range in the trace. A backward operator
belongs to the module that made its autograd node: the forward operator with the node's sequence
number on the node's thread, or the last one before it, lies in that module's range.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import floor
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C._autograd import DeviceType

from runner.core.record import markdown

SMALL_OPERATOR_US = 20.0  # step time per operator; a call takes 5 to 15
LOG_LEVEL_VARIABLE = "KINETO_LOG_LEVEL"
COMPILED_GRAPH = "compiled graph"
# rows of a trace that are calls of the GPU's runtime or driver, or the profiler's own work
RUNTIME_ROW = re.compile(
    r"(cuda|cu|hip|hsa)[A-Z_]\w*$|ProfilerStep|Activity Buffer Request$|Buffer Flush$"
    r"|Command Buffer Full$|Lazy Function Loading$|Runtime Triggered Module Loading$"
    r"|Instrumentation$|Resource$"
)
# rows of `debug.profile.stacks`: Python functions, and calls of modules
PYTHON_ROW = re.compile(r".*\.py\(\d+\): |<.*>|nn\.Module: |\w[\w.]*\(\d+\): ")
RANGE_PREFIX = "module "  # of a module's name in a trace
ROOT, REST, COMPILED = "(model)", "(rest)", "compiled"
LOOKUP = "TorchDynamo Cache Lookup"  # before a call of compiled code
COMPILED_PREFIXES = (LOOKUP, "Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")
BACKWARD_PREFIX = "autograd::engine::evaluate_function: "
BACKWARD_SCOPE = 1  # of an operator of a node, which has its number again
MAX_ROWS = 30  # modules in a table
MODULES_NOTE = (
    f"Time of each module's operators in a step, without that of the modules inside it. {REST} is "
    f"the loss, the optimizer and what else is outside of modules; {COMPILED} all compiled parts."
)
HEADER = ("module", "calls", "forward ms", "backward ms", "share")


def is_operator(event: Any) -> bool:
    """Whether a profiler's row is an operator: no kernel, and no call that launches one or waits.

    The time of a kernel is that of the operator that launched it.
    """
    is_on_host = event.device_type == DeviceType.CPU and not event.is_user_annotation
    is_python = PYTHON_ROW.match(event.key) is not None
    return is_on_host and not is_python and RUNTIME_ROW.match(event.key) is None


def is_kernel(event: Any) -> bool:
    """Whether a profiler's row is work of an accelerator."""
    return event.device_type != DeviceType.CPU and not event.is_user_annotation


class Trace(NamedTuple):
    """What a profiler recorded."""

    operators: list[dict[str, Any]]  # name, calls, seconds, in all steps; slowest first
    modules: list[ModuleTime]  # in a mean step
    kernel_seconds: float  # on an accelerator


def read_trace(profiler: Any, steps: int) -> Trace:
    """Return the times of `steps` profiled steps; with work of an accelerator, those of kernels."""
    totals = profiler.key_averages()
    kernels = [event for event in totals if is_kernel(event)]
    self_time = "self_device_time_total" if kernels else "self_cpu_time_total"  # µs
    operators = [
        {"name": operator_name(e.key), "calls": e.count, "seconds": getattr(e, self_time) / 1e6}
        for e in totals
        if is_operator(e)
    ]
    return Trace(
        sorted(operators, key=lambda row: -row["seconds"]),
        read_modules(profiler.events() or (), self_time, steps),
        sum(event.self_device_time_total for event in kernels) / 1e6,
    )


def operator_name(key: str) -> str:
    """Return an operator's name; that of a compiled graph is shortened."""
    call = re.match(r"^## Call CompiledFxGraph (\S+) ##$", key)
    return f"{COMPILED_GRAPH} {call[1][:8]}" if call else key


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep torch.profiler from logging its start and stop to stderr, unless the user set that."""
    was_unset = LOG_LEVEL_VARIABLE not in os.environ
    os.environ.setdefault(LOG_LEVEL_VARIABLE, "6")
    try:
        yield
    finally:
        if was_unset:
            os.environ.pop(LOG_LEVEL_VARIABLE, None)


# -- by module -----------------------------------------------------------------------------------


@dataclass
class ModuleTime:
    """Time of one module's operators in a step, without that of the modules inside it.

    On a GPU the time is that of the kernels. `compiled` is all compiled parts, `(rest)` is the
    loss, the optimizer and everything else outside of modules.
    """

    module: str  # dotted; (model) is the root
    calls: float = 0.0  # of its forward, also those that recompute it in backward
    forward_ms: float = 0.0
    backward_ms: float = 0.0  # with the operators of a recomputation
    share: float = 0.0  # of the time of all operators
    stall_ms: float = 0.0  # in its own Python code, beyond what calling operators takes

    @property
    def total_ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms


class ModuleRanges:
    """Names of modules, and the ranges in a trace around their calls.

    Without `model` each module that is called outside of those already known is a root, whose
    modules get names.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.names: dict[int, str] = {}
        self.roots: list[nn.Module] = []  # referenced, so that no other module gets its id
        self.finds_roots = model is None
        if model is not None:
            self._add_root(model)

    def _add_root(self, root: nn.Module) -> None:
        self.roots.append(root)
        used, kind = set(self.names.values()), type(root).__name__
        for name, module in root.named_modules():
            label = name or (kind if self.finds_roots else ROOT)
            if label in used:  # by a root before
                label = ".".join(filter(None, (f"{kind} {len(self.roots)}", name)))
            self.names.setdefault(id(module), label)

    def label(self, module: nn.Module) -> str:
        """Return the name of a called module's range; "" for none."""
        if self.finds_roots and id(module) not in self.names:
            self._add_root(module)
        name = self.names.get(id(module), "")
        return COMPILED if name and module._compiled_call_impl is not None else name

    @contextmanager
    def record(self) -> Iterator[None]:
        """Mark calls while entered; inside compiled code no module is called."""
        original, ranges = nn.Module.__call__, self

        # `self`, since torch.profiler reads a local of that name for `stacks`
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            label = "" if torch.compiler.is_compiling() else ranges.label(self)
            if not label:
                return original(self, *args, **kwargs)
            with torch.autograd.profiler.record_function(RANGE_PREFIX + label):
                return original(self, *args, **kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]


def read_modules(events: Iterable[Any], self_time: str, steps: int) -> list[ModuleTime]:
    """Return each module's time in a mean step, largest first; [] without ranges of modules.

    The times add up to those of all operators; `events` are those of `steps` steps, with their time
    in µs as `self_time`.
    """
    rows: dict[str, ModuleTime] = {REST: ModuleTime(REST)}
    owners = _NodeOwners()
    places: dict[int, tuple[str, bool]] = {}  # (module, whether in backward) by event
    pieces: dict[str, int] = {}  # calls that a module's Python code makes, and its own
    host = [event for event in events if event.device_type == DeviceType.CPU]
    for event in sorted(host, key=lambda e: (e.time_range.start, -e.time_range.end)):
        name, outer = event.key, places.get(id(event.cpu_parent), (REST, False))
        module, in_backward = outer
        is_node = name.startswith(BACKWARD_PREFIX)
        if is_node:
            module, in_backward = owners.of_node(event), True
        elif module == COMPILED or name.startswith(COMPILED_PREFIXES):
            module = COMPILED
        elif event.is_user_annotation and name.startswith(RANGE_PREFIX):
            module = name.removeprefix(RANGE_PREFIX)
        places[id(event)] = module, in_backward
        row = rows.setdefault(module, ModuleTime(module))
        is_range = event.is_user_annotation and name == RANGE_PREFIX + module
        enters_compiled = module == COMPILED != outer[0] and name != LOOKUP and not in_backward
        row.calls += is_range or enters_compiled
        if is_range:
            owners.add_call(event, module)
        elif not is_node:
            owners.add(event, module)
        if is_operator(event):
            ms = getattr(event, self_time) / 1e3 / steps
            if in_backward:
                row.backward_ms += ms
            else:
                row.forward_ms += ms
        elif event.is_user_annotation or PYTHON_ROW.match(name):
            row.stall_ms += event.self_cpu_time_total / 1e3 / steps
            pieces[module] = pieces.get(module, 0) + is_range + len(event.cpu_children)
    if len(rows) == 1:
        return []
    total_ms = sum(row.total_ms for row in rows.values()) or 1.0
    for module, row in rows.items():
        row.calls /= steps
        row.share = row.total_ms / total_ms
        explained_ms = pieces.get(module, 0) * SMALL_OPERATOR_US / 1e3 / steps
        is_module = module not in (REST, COMPILED)
        row.stall_ms = max(0.0, row.stall_ms - explained_ms) if is_module else 0.0
    return sorted(rows.values(), key=lambda row: -row.total_ms)


class _NodeOwners:
    """The module of each autograd node, by the node's thread and sequence number."""

    def __init__(self) -> None:
        # thread: (number of the next node at the start of an operator, module), in the order of
        # time; a call of a module, whose number is not known, lies between two numbers
        self.starts: dict[int, list[tuple[float, str]]] = {}
        self.last: dict[int, str] = {}  # module of the last node that a thread ran

    def add(self, event: Any, module: str) -> None:
        """Add an operator, which may make nodes."""
        if event.sequence_nr < 0 or event.scope == BACKWARD_SCOPE:
            return
        starts = self.starts.setdefault(event.thread, [])
        while starts and starts[-1][0] > event.sequence_nr:  # calls before which no node was made
            starts.pop()
        starts.append((event.sequence_nr, module))

    def add_call(self, event: Any, module: str) -> None:
        """Add a call of a module, which may make nodes without operators: TorchScript does."""
        starts = self.starts.setdefault(event.thread, [])
        starts.append((floor(starts[-1][0]) + 0.5 if starts else -0.5, module))

    def of_node(self, event: Any) -> str:
        """Return the module of the node that runs; of one that adds to `.grad`, the one before."""
        if event.sequence_nr >= 0:
            starts = self.starts.get(event.fwd_thread, [])
            position = bisect_right(starts, event.sequence_nr, key=lambda start: start[0]) - 1
            self.last[event.thread] = starts[position][1] if position >= 0 else REST
        return self.last.get(event.thread, REST)


def module_table(rows: list[ModuleTime]) -> str:
    """Return a Markdown table of the slowest modules; the others are one row."""
    others = [row for row in rows[MAX_ROWS:] if row.module not in (REST, COMPILED)]
    shown = [row for row in rows if row not in others]
    if others:
        total = ModuleTime(f"({len(others)} more)")
        for row in others:
            total.calls += row.calls
            total.forward_ms += row.forward_ms
            total.backward_ms += row.backward_ms
            total.share += row.share
        shown.append(total)
    return markdown.table(HEADER, map(module_cells, shown))


def module_cells(row: ModuleTime) -> tuple[str, str, str, str, str]:
    """Return the cells of a row under HEADER."""
    calls = f"{row.calls:,.4g}" if row.calls else ""
    times = f"{row.forward_ms:,.3g}", f"{row.backward_ms:,.3g}"
    return row.module, calls, *times, f"{row.share:.1%}"
