"""The memory of a step by module, and the report of an out-of-memory error."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from runner.core.device import resources
from runner.core.format import count_noun
from runner.core.interfaces.nested import tensors
from runner.core.interfaces.run import Run
from runner.core.record import markdown
from runner.core.record.storage import make_folder, replace_text

log = logging.getLogger("runner")

OOM_FILE = "debug/out_of_memory.md"
BATCH, LOSS = "(batch)", "(loss)"
MIB = 2**20
ROWS = 30  # of a table, the largest modules
PARTS = ("parameters", "gradients", "optimizer", "average", "buffers", "activations")


@dataclass
class ModuleMemory:
    """Bytes of one module's own tensors, excluding its children."""

    name: str
    kind: str
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    average: int = 0  # averaged weights (optimizer.ema)
    buffers: int = 0  # and their copies for the guard
    activations: int = 0  # saved for backward, of one micro-batch

    @property
    def total_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(getattr(self, part) for part in PARTS)


@dataclass
class MemoryBreakdown:
    """A step's memory in bytes, by module; shared storages count at the first module."""

    step: int
    samples: int  # of a micro-batch
    rows: list[ModuleMemory] = field(default_factory=list)
    peak: int = 0  # peak device memory in the step, beyond that before it

    def total(self, part: str) -> int:
        """Bytes of one part over all modules."""
        return sum(getattr(row, part) for row in self.rows)

    def table(self) -> str:
        """Return a Markdown table in MiB of the largest modules and the total."""
        total = ModuleMemory("all", "", **{part: self.total(part) for part in PARTS})
        cells = []
        ranked = sorted(self.rows, key=lambda row: -row.total_bytes)
        for row in (*(row for row in ranked[:ROWS] if row.total_bytes), total):
            sizes = [*(getattr(row, part) for part in PARTS), row.total_bytes]
            cells.append((row.name, row.kind, *(f"{n / MIB:.3f}" if n else "" for n in sizes)))
        return markdown.table(("module", "class", *PARTS, "MiB in all"), cells)


class SavedTensors:
    """Counts tensors saved for backward, by the innermost running module.

    Only the root module's first forward and its loss count: the first micro-batch, since one is
    held at a time.
    """

    def __init__(self, model: nn.Module, excluded: Iterable[Tensor]) -> None:
        self.model = model
        self.names = {id(module): name for name, module in model.named_modules()}
        self.counted_storages = {storage_key(tensor) for tensor in excluded}
        self.bytes: dict[str, int] = {}
        self.samples = 0
        self.module_stack: list[str] = []
        self.forward_began = self.forward_done = False

    @contextmanager
    def count_saved(self) -> Iterator[None]:
        """Count within this context; model and graph are not changed."""
        handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if module is self.model:
            self.forward_done = self.forward_done or self.forward_began
            if not self.forward_done:
                self.forward_began = True
                for tensor in tensors(inputs):
                    self.samples = self.samples or (len(tensor) if tensor.ndim else 0)
                    self._count(tensor, BATCH)
        if id(module) in self.names:
            self.module_stack.append(self.names[id(module)])

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if id(module) in self.names and self.module_stack:
            self.module_stack.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        if not self.forward_done:
            self._count(tensor, self.module_stack[-1] if self.module_stack else LOSS)
        return tensor

    def _count(self, tensor: Tensor, name: str) -> None:
        key = storage_key(tensor)
        if key not in self.counted_storages:
            self.counted_storages.add(key)
            self.bytes[name] = self.bytes.get(name, 0) + storage_bytes(tensor)


def measure_breakdown(run: Run, saved: SavedTensors | None = None) -> MemoryBreakdown:
    """Return the memory of a step that still has gradients; without `saved`, no activations."""
    update, activations = run.update, {} if saved is None else saved.bytes
    result = MemoryBreakdown(run.progress.step + 1, saved.samples if saved else 0)
    averages = dict(zip(map(id, update.parameters), update.average, strict=False))
    seen: set[int] = set()

    def count(values: Iterable[Any]) -> int:
        total = 0
        for tensor in values:
            if isinstance(tensor, Tensor) and storage_key(tensor) not in seen:
                seen.add(storage_key(tensor))
                total += storage_bytes(tensor)
        return total

    for name, module in run.model.named_modules():
        row = ModuleMemory(name or "(model)", type(module).__name__)
        params = list(module.parameters(recurse=False))
        row.parameters = count(params)
        row.gradients = count(p.grad for p in params)
        row.optimizer = count(v for p in params for v in update.optimizer.state.get(p, {}).values())
        row.average = count(averages.get(id(p)) for p in params)
        row.buffers = count(module.buffers(recurse=False))
        row.activations = activations.get(name, 0)
        result.rows.append(row)
    for name, kind in ((BATCH, "inputs"), (LOSS, type(run.objective).__name__)):
        if size := activations.get(name, 0):
            result.rows.append(ModuleMemory(name, kind, activations=size))
    if copies := count(update.buffers.saved):
        result.rows.append(ModuleMemory("(guard)", "copies of buffers", buffers=copies))
    return result


def storage_key(tensor: Tensor) -> int:
    """Return an identity of its storage, valid while the storage lives."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def storage_bytes(tensor: Tensor) -> int:
    """Return the bytes of its storage; of a sparse tensor, of its values."""
    if tensor.layout is torch.strided:
        return tensor.untyped_storage().nbytes()
    return tensor.element_size() * tensor._nnz()


def write_oom_report(run: Run, reason: str, breakdown: MemoryBreakdown | None = None) -> None:
    """Write debug/out_of_memory.md: memory by module, largest first.

    Errors here are logged, since the run's own error matters. Without the breakdown of an earlier
    step, the current memory is shown.
    """
    if run.folder is None:
        return
    try:
        text = _oom_page(run, reason, breakdown)
        make_folder((run.folder / OOM_FILE).parent)
        replace_text(run.folder / OOM_FILE, text)
        run.recorder.text("memory/out_of_memory", text, run.progress.step)
        log.warning("what holds the memory is in %s", run.folder / OOM_FILE)
    except Exception as error:  # memory is short, and models vary
        log.warning("no %s: %s: %s", OOM_FILE, type(error).__name__, error)


def _oom_page(run: Run, reason: str, breakdown: MemoryBreakdown | None) -> str:
    room = resources.tightest_memory_limit()
    limit_text = (
        f"Limit: {room.limit / MIB:,.0f} MiB ({markdown.escape(room.name)}); "
        f"{room.left / MIB:,.0f} MiB free after the step was aborted."
    )
    if run.device.kind != "cpu":
        limit_text += f" The device has {run.device.memory_bytes / MIB:,.0f} MiB."
    title = "## By module, MiB"
    if breakdown is not None:
        title += f", at step {breakdown.step} with {count_noun(breakdown.samples, 'sample')}"
    table = (breakdown or measure_breakdown(run)).table()
    lines = ["# Out of memory", "", markdown.escape(reason), "", limit_text, "", title, "", table]
    return "\n".join(lines) + "\n"
