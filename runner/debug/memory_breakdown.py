"""What a step holds, module by module, measured and predicted."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.optim import Optimizer

from runner.data.batch import rows
from runner.data.config import DataConfig
from runner.data.nested import tensors
from runner.techniques.base import RunBuilder
from runner.techniques.memory_prediction import Prediction, predict
from runner.training.run import Run

BATCH, LOSS = "(batch)", "(loss)"
MIB = 2**20
PARTS = ("parameters", "gradients", "optimizer", "average", "buffers", "activations")


@dataclass
class ModuleMemory:
    """Bytes of one module's own tensors, those of its children left out."""

    name: str
    kind: str
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    average: int = 0  # of the weights (optimizer.ema)
    buffers: int = 0  # and what a skipped step restores
    activations: int = 0  # kept from forward to backward, of one micro-batch

    @property
    def all(self) -> int:
        """Bytes of all parts."""
        return sum(getattr(self, part) for part in PARTS)


@dataclass
class Breakdown:
    """A step's memory in bytes, by module; a storage that several share counts at the first."""

    step: int
    samples: int  # of a micro-batch
    rows: list[ModuleMemory] = field(default_factory=list)
    peak: int = 0  # held on the device in the step at most, beyond what it held before

    def total(self, part: str) -> int:
        """Bytes of one part over all modules."""
        return sum(getattr(row, part) for row in self.rows)

    def largest(self, most: int) -> list[ModuleMemory]:
        """The modules that hold most, without those that hold nothing."""
        ranked = sorted(self.rows, key=lambda row: -row.all)
        return [row for row in ranked[:most] if row.all]

    def table(self, most: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and rows of a table in MiB: the largest modules, and all of them."""
        total = ModuleMemory("all", "", **{part: self.total(part) for part in PARTS})
        cells = []
        for row in (*self.largest(most), total):
            sizes = [*(getattr(row, part) for part in PARTS), row.all]
            cells.append(
                (row.name, row.kind, *(f"{size / MIB:.3f}" if size else "" for size in sizes))
            )
        return ("module", "class", *PARTS, "MiB in all"), cells


class SavedTensors:
    """Counts what a forward keeps for its backward, by the innermost module that was running.

    Only the first forward of the root module counts, with the loss that follows it: the first of
    several micro-batches, since one is held at a time.
    """

    def __init__(self, model: nn.Module, known: Iterable[Tensor]) -> None:
        self.model = model
        self.names = {id(module): name for name, module in model.named_modules()}
        self.seen = {storage_key(tensor) for tensor in known}
        self.bytes: dict[str, int] = {}
        self.samples = 0
        self.stack: list[str] = []
        self.began = self.over = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Forwards in here are counted; nothing of the model or the graph is changed."""
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
            self.over = self.over or self.began
            if not self.over:
                self.began = True
                for tensor in tensors(inputs):
                    self.samples = self.samples or (len(tensor) if tensor.ndim else 0)
                    self._count(tensor, BATCH)
        if id(module) in self.names:
            self.stack.append(self.names[id(module)])

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if id(module) in self.names and self.stack:
            self.stack.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        if not self.over:
            self._count(tensor, self.stack[-1] if self.stack else LOSS)
        return tensor

    def _count(self, tensor: Tensor, name: str) -> None:
        key = storage_key(tensor)
        if key not in self.seen:
            self.seen.add(key)
            self.bytes[name] = self.bytes.get(name, 0) + storage_bytes(tensor)


def break_down(run: Run, saved: SavedTensors) -> Breakdown:
    """The memory of a step whose gradients are still there."""
    update, result = run.update, Breakdown(run.progress.step + 1, saved.samples)
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
        own = list(module.parameters(recurse=False))
        row.parameters = count(own)
        row.gradients = count(p.grad for p in own)
        row.optimizer = count(v for p in own for v in update.optimizer.state.get(p, {}).values())
        row.average = count(averages.get(id(p)) for p in own)
        row.buffers = count(module.buffers(recurse=False))
        row.activations = saved.bytes.get(name, 0)
        result.rows.append(row)
    for name, kind in ((BATCH, "inputs"), (LOSS, type(run.objective).__name__)):
        if held := saved.bytes.get(name, 0):
            result.rows.append(ModuleMemory(name, kind, activations=held))
    if copies := count(update.buffers.saved):
        result.rows.append(ModuleMemory("(guard)", "copies of buffers", buffers=copies))
    return result


def storage_key(tensor: Tensor) -> int:
    """The identity of its storage, while that lives."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of its whole storage; of a sparse one, of its values."""
    if tensor.layout is torch.strided:
        return tensor.untyped_storage().nbytes()
    return tensor.element_size() * tensor._nnz()


def predict_step(run: Run, samples: int | None = None) -> Prediction:
    """A step's memory with `samples` per backward (None: as now), traced without its data.

    Nothing of the run changes; what the model raises when it is traced passes through. A tenth of
    a second, and hardly any memory.
    """
    draft = RunBuilder(
        device=run.device,
        sizes=run.sizes,
        model=run.model,
        optimizer_class=type(run.update.optimizer),
        objective=run.objective,
        batch_size=run.train.samples(0),
        micro_batch=min(run.micro_batch, run.train.samples(0)),
        micro_batch_asked=None,
        tf32_asked=None,
        threads_asked=None,
        sample=lambda count: rows(run.train.peek(), slice(count)),  # placed already
        data=DataConfig(kind=""),
        in_memory=True,
        loader=lambda how: run.train,
        total_steps=run.total_steps,
        scope=ExitStack(),
        forward=run.forward,
        make_optimizer=lambda model: _similar_optimizer(run.update.optimizer, model),
        ema=bool(run.update.average),
        contexts=list(run.contexts),
    )
    with torch.compiler.set_stance("force_eager"):
        return predict(draft, samples)


def _similar_optimizer(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """Another one that keeps the same state; its rates do not matter."""
    parameters = inspect.signature(type(optimizer)).parameters
    options = {
        name: value
        for name, value in optimizer.defaults.items()
        if name in parameters and name not in ("lr", "fused", "foreach", "capturable")
    }
    make: Any = type(optimizer)
    made: Optimizer = make([p for p in model.parameters() if p.requires_grad], lr=1e-3, **options)
    return made
