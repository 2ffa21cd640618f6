"""What a step holds, module by module: weights, gradients, state of the optimizer, activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from runner.nest import tensors
from runner.predict import Prediction
from runner.run import Run

BATCH, LOSS = "(batch)", "(loss)"
MIB = 2**20


@dataclass
class Row:
    """Bytes of one module's own tensors, those of its children left out."""

    name: str
    kind: str
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    average: int = 0  # of the weights (optimizer.ema)
    buffers: int = 0  # and what a skipped step puts back
    activations: int = 0  # kept from forward to backward, of one micro-batch

    @property
    def all(self) -> int:
        """All of it."""
        return sum(getattr(self, name) for name in PARTS)


PARTS = ("parameters", "gradients", "optimizer", "average", "buffers", "activations")


@dataclass
class Account:
    """A step's memory in bytes, by module; a storage that several share counts at the first."""

    step: int
    samples: int  # of a micro-batch
    rows: list[Row] = field(default_factory=list)
    peak: int = 0  # what process or device held in the step at most, beyond what it held before

    def total(self, part: str) -> int:
        """Over all modules."""
        return sum(getattr(row, part) for row in self.rows)

    @property
    def all(self) -> int:
        """Over all modules and parts."""
        return sum(row.all for row in self.rows)

    @property
    def saved(self) -> int:
        """What is kept for the backward, the batch left out."""
        return sum(row.activations for row in self.rows if row.name != BATCH)

    def largest(self, most: int) -> list[Row]:
        """The modules that hold most, without those that hold nothing."""
        found = sorted(self.rows, key=lambda row: -row.all)
        return [row for row in found[:most] if row.all]


class Saved:
    """Counts what a forward keeps for its backward, by the innermost module that was running.

    Only the first forward of the root module counts, with the loss that follows it: the first of
    several micro-batches, since one is held at a time.
    """

    def __init__(self, model: nn.Module, known: Iterable[Tensor]) -> None:
        self.model = model
        self.names = {id(module): name for name, module in model.named_modules()}
        self.seen = {key(tensor) for tensor in known}
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
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
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
        mark = key(tensor)
        if mark not in self.seen:
            self.seen.add(mark)
            self.bytes[name] = self.bytes.get(name, 0) + size(tensor)


def take(run: Run, saved: Saved) -> Account:
    """The account of a step whose gradients are still there."""
    update, account = run.update, Account(run.progress.step + 1, saved.samples)
    averages = dict(zip(map(id, update.parameters), update.average, strict=False))
    kept: set[int] = set()

    def count(found: Iterable[Any]) -> int:
        total = 0
        for tensor in found:
            if isinstance(tensor, Tensor) and key(tensor) not in kept:
                kept.add(key(tensor))
                total += size(tensor)
        return total

    for name, module in run.model.named_modules():
        row = Row(name or "(model)", type(module).__name__)
        own = list(module.parameters(recurse=False))
        row.parameters = count(own)
        row.gradients = count(p.grad for p in own)
        row.optimizer = count(v for p in own for v in update.optimizer.state.get(p, {}).values())
        row.average = count(averages.get(id(p)) for p in own)
        row.buffers = count(module.buffers(recurse=False))
        row.activations = saved.bytes.pop(name, 0)
        account.rows.append(row)
    kinds = {BATCH: "inputs", LOSS: type(run.objective).__name__}
    for name, held in saved.bytes.items():
        account.rows.append(Row(name, kinds.get(name, ""), activations=held))
    if copies := count(update.buffers.saved):
        account.rows.append(Row("(guard)", "copies of buffers", buffers=copies))
    return account


def table(account: Account, most: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of a table in MiB: the largest modules, the rest, all of them."""
    shown = account.largest(most)
    rows = [_line(row.name, row.kind, [getattr(row, part) for part in PARTS]) for row in shown]
    left = [row for row in account.rows if row.all and all(row is not one for one in shown)]
    if left:
        sums = [sum(getattr(row, part) for row in left) for part in PARTS]
        rows.append(_line(f"{len(left)} more", "", sums))
    rows.append(_line("all", "", [account.total(part) for part in PARTS]))
    return ("module", "class", *PARTS, "MiB in all"), rows


def _line(name: str, kind: str, parts: list[int]) -> tuple[str, ...]:
    shown = [f"{part / MIB:.3f}" if part else "" for part in (*parts, sum(parts))]
    return (name, kind, *shown)


def beside(account: Account, said: Prediction | None) -> list[tuple[str, int, int | None]]:
    """What is measured, and what was predicted of it, in bytes."""
    own = account.total("parameters") + account.total("buffers")
    state = account.total("optimizer") + account.total("average")
    measured = {
        "weights and buffers": own,
        "gradients": account.total("gradients"),
        "optimizer's state and average": state,
        "kept for the backward": account.saved,
        "a step's peak, without what stays": account.peak,
    }
    if said is None:
        return [(name, held, None) for name, held in measured.items()]
    peak = said.gradients + said.activations
    predicted = (said.parameters, said.gradients, said.optimizer, said.saved, peak)
    return [(name, measured[name], of) for name, of in zip(measured, predicted, strict=True)]


def key(tensor: Tensor) -> int:
    """What tells its storage from others while it lives."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def size(tensor: Tensor) -> int:
    """Bytes of its whole storage; of a sparse one, of values and indices."""
    if tensor.layout is torch.strided:
        return tensor.untyped_storage().nbytes()
    if tensor.layout is torch.sparse_coo:
        return sum(size(part) for part in (tensor._values(), tensor._indices()))
    return tensor.element_size() * tensor._nnz()


def _unpack(tensor: Tensor) -> Tensor:
    return tensor
