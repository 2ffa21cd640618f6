"""A run around a model that somebody else trains or calls, built at the first batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.build import Components, build
from runner.composing import compose
from runner.data.batch import Inputs, Sizes
from runner.data.nested import tensors
from runner.errors import RunnerError, UsageError
from runner.library import batches
from runner.library.batches import InMemory, describe
from runner.objectives.base import Objective
from runner.objectives.custom import Custom
from runner.optim.optimizer import Optimizer, unfit
from runner.record.text import shorten
from runner.techniques.base import TechniqueStatus
from runner.training.evidence import collect_evidence, technique_statuses
from runner.training.recovery import halve_micro_batch
from runner.training.run import Run

Loss = Callable[[Any, Any], Tensor]
QUIET = ("monitoring=quiet", "checkpoint=off", "training.epochs=null")
MANY_STEPS = 1_000_000  # where nobody says how many: enough that compiling pays back


class MeanOutputLoss(Objective):
    """The mean of all outputs: a stand-in loss that reaches every operator."""

    def __call__(self, output: Any, target: Any) -> Tensor:
        """A number that depends on every float of the output."""
        nest = dict(output) if isinstance(output, dict) else output  # some libraries' own classes
        floats = [t for t in tensors(nest) if t.is_floating_point()]
        if not floats:
            raise UsageError(f"the model's output must hold floats, got {describe(output)}")
        loss = torch.stack([t.float().mean() for t in floats]).sum()
        if torch.is_grad_enabled() and not loss.requires_grad:  # a frozen model
            loss = loss + torch.zeros((), device=loss.device, requires_grad=True)
        return loss

    def weight(self, target: Any) -> int:
        """How many samples there are."""
        return len(tensors(target)[0])

    def tally(self, output: Any, target: Any) -> dict[str, Tensor]:
        """The loss, summed over samples."""
        n, mean = self.weight(target), self(output, target).detach()
        return {"loss": mean * n, "count": torch.full((), n, device=mean.device)}

    def metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """The mean over all samples, by which two ways to compute a model are compared."""
        return {"loss": float(totals["loss"] / totals["count"])}


@dataclass
class LazyRun:
    """The settings of a run, and the run once a batch has come."""

    who: str  # the function that was called, for messages
    model: nn.Module
    level: str
    overrides: Sequence[str]
    device: str | torch.device | None  # None: where the model is
    not_applicable: dict[str, str]  # techniques that make no sense here, and why
    optimizer: Optimizer | None = None
    objective: Objective | None = None
    steps: int | None = None
    run: Run | None = None
    closed: bool = False
    refused: set[str] = field(default_factory=set)  # requested, and not applicable

    def __post_init__(self) -> None:
        check_module(self.who, self.model)
        check_overrides(self.who, self.overrides)
        if self.optimizer is not None:
            check_optimizer(self.who, self.model, self.optimizer)
        # mistakes are answered now, though a batch may come much later
        level, steps = f"optimization={self.level}", f"training.steps={self.steps or MANY_STEPS}"
        self.config = compose([level, *self._device(), *QUIET, steps, *self.overrides])

    def build_run(self, inputs: Inputs, target: Any = None) -> Run:
        """The run, built around this batch the first time."""
        if self.run is None:
            if self.closed:
                raise UsageError(f"{self.who}: it was closed; make another one")
            try:
                with stash_gradients(self.model):  # some techniques try a step out
                    self.run = self._build(inputs, target)
            except RunnerError:
                raise
            except Exception as error:
                raise UsageError(
                    f"{self.who}: the model failed on {describe(inputs)}: "
                    f"{type(error).__name__}: {shorten(str(error), 300)}"
                ) from error
        return self.run

    def statuses(self) -> list[TechniqueStatus]:
        """Each technique: requested or not, engaged or not, and why. Runs the model."""
        if self.run is None:
            reason = "closed" if self.closed else "waits for the first batch (or an example)"
            requested = self.config.optimization.techniques()
            return [TechniqueStatus(name, t.enabled, False, reason) for name, t in requested]
        with stash_gradients(self.model):
            collect_evidence(self.run)
        return [
            replace(row, requested=True, reason=self.not_applicable[row.name])
            if row.name in self.refused
            else row
            for row in technique_statuses(self.run)
        ]

    def close(self) -> None:
        """Undo every global switch, and let the model run uncompiled again."""
        self.closed = True
        if self.run is not None:
            self.run.scope.close()
            self.run = None

    def _build(self, inputs: Inputs, target: Any) -> Run:
        n = batches.samples(inputs, f"{self.who}: the batch")
        micro_batch = self.config.training.micro_batch
        training = replace(
            self.config.training,
            batch_size=n,
            micro_batch=None if micro_batch is None else min(micro_batch, n),
        )
        optimization = replace(self.config.optimization)
        for name, technique in optimization.techniques():
            if name in self.not_applicable and technique.enabled:
                self.refused.add(name)
                setattr(optimization, name, replace(technique, enabled=False))
        host, rows = torch.device("cpu"), np.arange(n)
        label = torch.zeros(n, dtype=torch.int64) if target is None else target
        inputs, label = batches.moved(inputs, host), batches.moved(label, host)
        compiled = [(module, module._compiled_call_impl) for module in self.model.modules()]
        run = build(
            replace(self.config, training=training, optimization=optimization),
            given=Components(
                self.model,
                InMemory(inputs, label, _sizes(inputs), (rows, rows)),
                self.objective or MeanOutputLoss(),
                self.optimizer or _idle_optimizer(self.model),
            ),
        )
        for module, implementation in compiled:  # techniques compile in place
            run.scope.callback(setattr, module, "_compiled_call_impl", implementation)
        if self.objective is None:  # no loop here cuts a batch smaller
            run.recoveries = [r for r in run.recoveries if r is not halve_micro_batch]
        # the random numbers of the caller's own loop are the caller's
        run.device = replace(run.device, reseed=lambda seed: None)
        return run

    def _device(self) -> list[str]:
        if self.device == "auto":
            return ["device=auto"]
        try:
            device = device_of(self.model) if self.device is None else torch.device(self.device)
        except RuntimeError:
            device = torch.device("meta")
        if device.type not in ("cpu", "cuda", "mps"):
            raise UsageError(
                f"{self.who}: device must be 'auto', 'cpu', 'cuda', 'cuda:1' or 'mps', "
                f"got {self.device or device!s}"
            )
        return device_overrides(device)


def device_overrides(device: torch.device) -> list[str]:
    """The overrides that choose this device."""
    index = [] if device.type != "cuda" or device.index is None else [device.index]
    return [f"device={device.type}", *(f"device.index={i}" for i in index)]


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first tensor is."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


@contextmanager
def stash_gradients(model: nn.Module) -> Iterator[None]:
    """Within, gradients are enabled and start empty; afterwards those of before are back."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.grad = None
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def run_contexts(run: Run) -> ExitStack:
    """The run's contexts (autocast), entered."""
    with ExitStack() as stack:
        for context in run.contexts:
            stack.enter_context(context())
        return stack.pop_all()


def objective_of(loss_fn: Loss) -> Custom:
    """A loss function of the user's own as an objective."""
    return Custom(loss_fn, getattr(loss_fn, "__name__", type(loss_fn).__name__), "loss_fn")


def check_trainable(
    who: str, model: Any, loss_fn: Any, optimizer: Optimizer | None, overrides: Any
) -> None:
    """Raise UsageError for what cannot be trained; without loss or optimizer the config decides."""
    check_module(who, model)
    check_overrides(who, overrides)
    if loss_fn is not None:
        check_loss_fn(who, loss_fn)
    if optimizer is not None:
        check_optimizer(who, model, optimizer)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(f"{who}: no parameter of the model needs a gradient: nothing to train")


def check_module(who: str, model: Any) -> None:
    """Raise UsageError for a model that is no module."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"{who}: model must be a torch.nn.Module, got {describe(model)}")


def check_loss_fn(who: str, loss_fn: Any) -> None:
    """Raise UsageError for a loss that cannot be called."""
    if not callable(loss_fn):
        given = describe(loss_fn)
        raise UsageError(f"{who}: loss_fn must be a function of (output, target), got {given}")


def check_overrides(who: str, overrides: Any) -> None:
    """Raise UsageError for a string in place of a list, which would be read letter by letter."""
    if isinstance(overrides, str):
        raise UsageError(f"{who}: overrides must be a list, got one string: [{overrides!r}]")


def check_optimizer(who: str, model: nn.Module, optimizer: Any) -> None:
    """Raise UsageError for something else than an optimizer, or one of another model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        given = describe(optimizer)
        raise UsageError(f"{who}: optimizer must be a torch.optim.Optimizer, got {given}")
    if why := unfit(type(optimizer), model):
        raise UsageError(f"{who}: {why}; use torch.optim.AdamW")
    mine = {id(p) for p in model.parameters()}
    if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
        raise UsageError(
            f"{who}: none of the optimizer's parameters is the model's; make it with "
            "model.parameters(), after anything that replaces them"
        )


def _idle_optimizer(model: nn.Module) -> Optimizer:
    """An optimizer of nothing, for a model that is not trained."""
    nothing = torch.zeros(1, device=device_of(model), requires_grad=True)
    return torch.optim.SGD([nothing], lr=0.0)


def _sizes(inputs: Inputs) -> Sizes:
    """What the first tensor of an example tells."""
    first = tensors(inputs)[0]
    if not first.is_floating_point() and first.ndim == 2:
        return Sizes("given", sequence=first.shape[1])
    channels = first.shape[1] if first.ndim == 4 else None
    return Sizes("given", in_features=first[0].numel(), in_channels=channels)
