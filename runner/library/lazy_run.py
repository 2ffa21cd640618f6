"""A run around a model that somebody else trains or calls, put together when it is first needed."""

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
from runner.library.batches import InMemory
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
MANY = 1_000_000  # calls, where nobody says how many: enough that compiling pays back


class MeanOutputLoss(Objective):
    """The mean of all that a model puts out: stands in for a loss where there is none.

    It reaches every operator of forward and backward, which is what looking at a step needs.
    """

    def __call__(self, output: Any, target: Any) -> Tensor:
        """A number that depends on every float of the output."""
        found = [t for t in tensors(_plain(output)) if t.is_floating_point()]
        if not found:
            raise UsageError(f"the model puts out {batches.describe(output)}, without a float")
        whole = torch.stack([t.float().mean() for t in found]).sum()
        if torch.is_grad_enabled() and not whole.requires_grad:  # a frozen model
            whole = whole + torch.zeros((), device=whole.device, requires_grad=True)
        return whole

    def weight(self, target: Any) -> int:
        """How many samples there are."""
        return len(tensors(target)[0])

    def tally(self, output: Any, target: Any) -> dict[str, Tensor]:
        """The same, summed over samples."""
        n = self.weight(target)
        mean = self(output, target).detach()
        return {"loss": mean * n, "count": torch.full((), n, device=mean.device)}

    def metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """The mean over all samples, as `loss`: by it two ways to compute a model are compared."""
        return {"loss": float(totals["loss"] / totals["count"])}


@dataclass
class LazyRun:
    """What is to be put together, and the run once it is."""

    who: str  # the function that was called, for messages
    model: nn.Module
    level: str
    overrides: Sequence[str]
    device: str | torch.device | None  # None: where the model is
    left_out: dict[str, str]  # techniques that make no sense here, and why
    optimizer: Optimizer | None = None
    objective: Objective | None = None
    steps: int | None = None
    run: Run | None = None
    closed: bool = False
    asked_in_vain: set[str] = field(default_factory=set)  # of those left out

    def __post_init__(self) -> None:
        check_module(self.who, self.model)
        check_overrides(self.who, self.overrides)
        if self.optimizer is not None:
            check_optimizer(self.who, self.model, self.optimizer)
        # a mistake in these is answered now, though a batch may come much later
        self.config = compose(
            [
                f"optimization={self.level}",
                *self._device(),
                *QUIET,
                f"training.steps={self.steps or MANY}",
                *self.overrides,
            ]
        )

    def build_run(self, inputs: Inputs, target: Any = None) -> Run:
        """The run, put together around this batch the first time."""
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
                    f"{self.who}: the model failed on {batches.describe(inputs)}: "
                    f"{type(error).__name__}: {shorten(str(error), 300)}"
                ) from error
        return self.run

    def rows(self) -> list[TechniqueStatus]:
        """Every technique: asked for or not, taken hold or not, why. Runs the model."""
        if self.run is None:
            asked = self.config.optimization.techniques()
            reason = "closed" if self.closed else "waits for the first batch (or an example)"
            return [TechniqueStatus(name, t.enabled, False, reason) for name, t in asked]
        with stash_gradients(self.model):
            collect_evidence(self.run)
        return [
            replace(row, requested=True, reason=self.left_out[row.name])
            if row.name in self.asked_in_vain
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
        config = self.config
        asked = config.training.micro_batch
        micro_batch = None if asked is None else min(asked, n)
        training = replace(config.training, batch_size=n, micro_batch=micro_batch)
        optimization = replace(config.optimization)
        for name, technique in optimization.techniques():
            if name in self.left_out and technique.enabled:
                self.asked_in_vain.add(name)
                setattr(optimization, name, replace(technique, enabled=False))
        every = np.arange(n)
        label = torch.zeros(n, dtype=torch.int64) if target is None else target
        example = InMemory(
            batches.moved(inputs, torch.device("cpu")),
            batches.moved(label, torch.device("cpu")),
            _sizes(inputs),
            (every, every),
        )
        before = {m: m._compiled_call_impl for m in self.model.modules()}
        run = build(
            replace(config, training=training, optimization=optimization),
            given=Components(
                self.model,
                example,
                self.objective or MeanOutputLoss(),
                self.optimizer or _idle(self.model),
            ),
        )
        run.scope.callback(_uncompile, before)
        if self.objective is None:  # nothing here cuts a batch smaller
            run.recoveries = [r for r in run.recoveries if r is not halve_micro_batch]
        # the random numbers of the caller's own loop are the caller's
        run.device = replace(run.device, reseed=_leave_alone)
        return run

    def _device(self) -> list[str]:
        if self.device is None:
            where = device_of(self.model)
        elif self.device == "auto":
            return ["device=auto"]
        else:
            try:
                where = torch.device(self.device)
            except RuntimeError as error:
                fix = "use 'auto', 'cpu', 'cuda', 'cuda:1' or 'mps'"
                raise UsageError(f"{self.who}: device={self.device!r} is none; {fix}") from error
        if where.type not in ("cpu", "cuda", "mps"):
            raise UsageError(
                f"{self.who}: device={where} is not one that runs here; "
                "use 'auto', 'cpu', 'cuda' or 'mps'"
            )
        index = (
            [] if where.index is None or where.type != "cuda" else [f"device.index={where.index}"]
        )
        return [f"device={where.type}", *index]


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first tensor is."""
    found = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if found is None else found.device


@contextmanager
def stash_gradients(model: nn.Module) -> Iterator[None]:
    """Within, gradients can be made and there are none; afterwards those of before are back."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in before:
            parameter.grad = None
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def check_module(who: str, model: Any) -> None:
    """Raise UsageError where the model is none."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"{who}: model is {batches.describe(model)}; give a torch.nn.Module")


def check_loss_fn(who: str, loss_fn: Any) -> None:
    """Raise UsageError where the loss cannot be called."""
    if not callable(loss_fn):
        given = batches.describe(loss_fn)
        raise UsageError(f"{who}: loss_fn is {given}; give a function of (output, target)")


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


def check_overrides(who: str, overrides: Any) -> None:
    """Raise UsageError for a string in place of a list, which would be read letter by letter."""
    if isinstance(overrides, str):
        raise UsageError(f"{who}: overrides is one string; give a list: [{overrides!r}]")


def check_optimizer(who: str, model: nn.Module, optimizer: Any) -> None:
    """Raise UsageError where the optimizer is none, or one of another model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        given = batches.describe(optimizer)
        raise UsageError(f"{who}: optimizer is {given}; give a torch.optim.Optimizer")
    if why := unfit(type(optimizer), model):
        raise UsageError(f"{who}: {why}; use torch.optim.AdamW")
    mine = {id(p) for p in model.parameters()}
    if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
        raise UsageError(
            f"{who}: none of the optimizer's parameters is the model's; make it with "
            "model.parameters(), after anything that replaces them"
        )


def _idle(model: nn.Module) -> Optimizer:
    """An optimizer of nothing, for a model that nobody trains here."""
    nothing = torch.zeros(1, device=device_of(model), requires_grad=True)
    return torch.optim.SGD([nothing], lr=0.0)


def _sizes(inputs: Inputs) -> Sizes:
    """What the first tensor of an example tells."""
    first = tensors(inputs)[0]
    if not first.is_floating_point() and first.ndim == 2:
        return Sizes("given", sequence=first.shape[1])
    channels = first.shape[1] if first.ndim == 4 else None
    return Sizes("given", in_features=first[0].numel(), in_channels=channels)


def _plain(output: Any) -> Any:
    """The output as a nest; some libraries return objects with fields."""
    return dict(output) if isinstance(output, dict) else output


def _uncompile(before: dict[nn.Module, Any]) -> None:
    for module, implementation in before.items():
        module._compiled_call_impl = implementation


def _leave_alone(seed: int) -> None:
    """In place of seeding."""


def run_contexts(run: Run) -> ExitStack:
    """The run's contexts (autocast), entered."""
    with ExitStack() as stack:
        for context in run.contexts:
            stack.enter_context(context())
        return stack.pop_all()
