"""A run around a model that the caller trains or calls, built at the first batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.build import Components, build
from runner.composing import compose
from runner.data.batch import Inputs, Sizes
from runner.data.nested import tensors
from runner.errors import UsageError
from runner.library.arguments import (
    InMemory,
    Loss,
    check_model_arguments,
    describe,
    device_of,
    device_overrides,
    moved,
    samples,
    translate_model_errors,
)
from runner.objectives.custom import Custom
from runner.optim.optimizer import Optimizer
from runner.techniques.base import TechniqueStatus
from runner.training.evidence import collect_evidence, technique_statuses
from runner.training.recovery import halve_micro_batch
from runner.training.run import Run

QUIET = ("monitoring=quiet", "checkpoint=off", "training.epochs=null")
MANY_STEPS = 1_000_000  # where the caller does not say how many: compiling pays back


def mean_output(output: Any, target: Any = None) -> Tensor:
    """The mean of all floats of an output: a stand-in loss that reaches every operator."""
    nest = dict(output) if isinstance(output, dict) else output  # some libraries' own classes
    floats = [t for t in tensors(nest) if t.is_floating_point()]
    if not floats:
        raise UsageError(f"the model's output must hold floats, got {describe(output)}")
    loss = torch.stack([t.float().mean() for t in floats]).sum()
    if torch.is_grad_enabled() and not loss.requires_grad:  # a frozen model
        loss = loss + torch.zeros((), device=loss.device, requires_grad=True)
    return loss


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
    loss_fn: Loss | None = None
    steps: int | None = None
    run: Run | None = None
    closed: bool = False

    def __post_init__(self) -> None:
        check_model_arguments(
            self.who,
            self.model,
            loss_fn=self.loss_fn or mean_output,
            optimizer=self.optimizer,
            overrides=self.overrides,
        )
        # mistakes are answered now, though a batch may come much later
        where = device_of(self.model) if self.device is None else self.device
        level, steps = f"optimization={self.level}", f"training.steps={self.steps or MANY_STEPS}"
        self.config = compose([level, *device_overrides(where), *QUIET, steps, *self.overrides])
        self.objective = loss_objective(self.loss_fn or mean_output)
        requested = [name for name, t in self.config.optimization.techniques() if t.enabled]
        self.refused = self.not_applicable.keys() & requested

    def build_run(self, inputs: Inputs, target: Any = None) -> Run:
        """The run, built around this batch the first time."""
        if self.run is None:
            if self.closed:
                raise UsageError(f"{self.who}: it was closed; make another one")
            with translate_model_errors(self.who, inputs), stash_gradients(self.model):
                self.run = self._build(inputs, target)  # some techniques try a step
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
        n = samples(inputs, f"{self.who}: the batch")
        optimization = replace(self.config.optimization)
        for name in self.refused:
            setattr(optimization, name, replace(getattr(optimization, name), enabled=False))
        micro = self.config.training.micro_batch
        training = replace(self.config.training, batch_size=n, micro_batch=micro and min(micro, n))
        config = replace(self.config, training=training, optimization=optimization)
        host, rows = torch.device("cpu"), np.arange(n)
        label = torch.zeros(n, dtype=torch.int64) if target is None else target
        nests = moved((inputs, label), host)
        data = InMemory(*nests, Sizes("given"), (rows, rows))
        compiled = [(module, module._compiled_call_impl) for module in self.model.modules()]
        optimizer = self.optimizer or _idle_optimizer(self.model)
        run = build(config, given=Components(self.model, data, self.objective, optimizer))
        for module, implementation in compiled:  # techniques compile in place
            run.scope.callback(setattr, module, "_compiled_call_impl", implementation)
        if self.loss_fn is None:  # no loop here cuts a batch smaller
            run.recoveries = [r for r in run.recoveries if r is not halve_micro_batch]
        # the random numbers of the caller's own loop are the caller's
        run.device = replace(run.device, reseed=lambda seed: None)
        return run


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


def loss_objective(loss_fn: Loss) -> Custom:
    """A loss function of the user's own as an objective."""
    return Custom(loss_fn, getattr(loss_fn, "__name__", type(loss_fn).__name__), "loss_fn")


def _idle_optimizer(model: nn.Module) -> Optimizer:
    """An optimizer of nothing, for a model that is not trained."""
    nothing = torch.zeros(1, device=device_of(model), requires_grad=True)
    return torch.optim.SGD([nothing], lr=0.0)
