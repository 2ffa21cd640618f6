"""The module that makes the first NaN or Inf is the one named, in forward and backward."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runner.core.build.setup import Components
from runner.core.interfaces.run import Run
from runner.core.objectives.custom import CustomObjective as CustomLoss
from runner.diagnose.replay.results import StepPhase
from runner.diagnose.replay.trace import trace_compiled, trace_step
from tests import runs
from tests.my_package import Computed, differentiable

INF = float("inf")
Change = Callable[[Tensor], Tensor]
Made = Callable[[], nn.Module]


def numpy_inf(tensor: Tensor) -> Tensor:
    """Inf of the same shape, written behind torch's back."""
    changed = tensor.detach().clone()
    changed.numpy()[:] = np.inf
    return changed


def spoiled(change: Change) -> Change:
    """x as it is, and a changed gradient."""
    return differentiable(lambda ctx, x: x.clone(), lambda ctx, g: change(g))


def infinite(gradient: Tensor) -> Tensor:
    return torch.full_like(gradient, INF)


def refuse(gradient: Tensor) -> Tensor:
    raise ValueError("no gradient")


def hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(infinite)
    return x


def scaled() -> nn.Module:
    """A parameter of its own, to which a hook gives a bad gradient."""
    module = Computed(lambda module, x: x * module.weight, weight=nn.Parameter(torch.ones(8)))
    module.weight.register_hook(lambda g: g * INF)
    return module


def hooked_module() -> nn.Module:
    module = Computed(lambda _, x: x * 1)
    module.register_full_backward_hook(lambda module, ins, outs: tuple(g * INF for g in ins))
    return module


class Attention(nn.Module):
    """With a mask that leaves nothing; the softmax is torch's, or by hand in place."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        values = x[:, None]
        scores = values.transpose(1, 2) @ values + torch.full((8, 8), -INF)
        if self.by_hand:
            scores.sub_(scores.amax(-1, keepdim=True).detach()).exp_()
            return x + (values @ (scores / scores.sum(-1, keepdim=True)))[:, 0]
        return x + (values @ scores.softmax(-1))[:, 0]


def value(of: Change) -> Made:
    return lambda: Computed(lambda _, x: of(x))


def slope(of: Change) -> Made:
    """A finite value whose derivative is not."""
    return value(lambda x: x + of(x))


BACKWARD: dict[str, Made] = {  # layers from 8 to 8 features whose value is finite
    "full_like": value(spoiled(infinite)),
    "nan": value(spoiled(lambda g: torch.where(g == g, float("nan"), g))),
    "numpy": value(spoiled(numpy_inf)),
    "no operation": value(differentiable(lambda ctx, x: x, lambda ctx, g: infinite(g))),
    "parameter hook": scaled,
    "input hook": value(lambda x: hooked(x) * 1),
    "output hook": value(lambda x: hooked(x * 1)),
    "module hook": hooked_module,
    "sqrt": slope(lambda x: (x * 0).sqrt()),
    "where log": slope(lambda x: torch.where(x * 0 > 0, (x * 0).log(), 0.0)),
}
FORWARD: dict[str, Made] = {  # the same with a value that is not, or an Inf that is left out
    "log": value(lambda x: x + (x * 0).log()),
    "masked_fill": value(lambda x: x.masked_fill(x == x, -INF)),
    "numpy": value(lambda x: x + numpy_inf(x)),
    "function": value(differentiable(lambda ctx, x: x + numpy_inf(x), lambda ctx, g: g)),
    "overflow": value(lambda x: (x + 1e30) * 1e30),
    "masked attention": lambda: Attention(by_hand=False),
    "masked in place": lambda: Attention(by_hand=True),
    "selects": value(lambda x: torch.where(torch.zeros_like(x) > 0, 1 / (x * 0), x)),
    "where exp": slope(lambda x: torch.where(x * 0 > 0, (x * 0 + 1e3).exp(), 0.0)),
}


class Net(nn.Module):
    """A small network with a place for such a layer: `block.2`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(30, 8), nn.Linear(8, 2)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Identity(), nn.Linear(8, 8))
        self.functional = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.first(x))
        return self.last(spoiled(infinite)(x) if self.functional else x)


@pytest.fixture(scope="module")
def made() -> Iterator[Run]:
    given = Components(model=Net())
    with runs.opened("data=cancer", "optimization=none", given=given) as run:
        yield run


def traced(run: Run, fault: Made, trace: Callable[..., Any] = trace_step) -> tuple[Any, str, str]:
    """The phase, the module and the sentence that are named for a fault in `block.2`."""
    run.model.block[2] = fault()
    cause = trace(run, run.train.at(0))
    return cause.phase, cause.module, cause.cause


@pytest.mark.parametrize("fault", BACKWARD)
def test_a_fault_of_the_backward_is_named_by_its_module(fault: str, made: Run) -> None:
    assert traced(made, BACKWARD[fault])[:2] == (StepPhase.backward, "block.2")


@pytest.mark.parametrize("fault", FORWARD)
def test_a_fault_of_the_forward_is_named_by_its_module(fault: str, made: Run) -> None:
    assert traced(made, FORWARD[fault])[:2] == (StepPhase.forward, "block.2")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("fault", ["numpy", "where log", "selects"])
def test_a_fault_of_a_recomputed_module_is_named_by_its_module(
    fault: str, reentrant: bool, made: Run
) -> None:
    phase = StepPhase.backward if fault in BACKWARD else StepPhase.forward

    def checkpointed() -> nn.Module:
        inner, before = (BACKWARD.get(fault) or FORWARD[fault])(), nn.Linear(8, 8)
        body = nn.Sequential(before, inner)
        recomputed = partial(checkpoint, body, use_reentrant=reentrant)
        return Computed(lambda _, x: recomputed(x), before=before, inner=inner)

    assert traced(made, checkpointed)[:2] == (phase, "block.2.inner")


@pytest.mark.parametrize("fault", ["full_like", "where log"])
def test_a_fault_of_the_backward_is_named_in_the_graph_of_the_compiler_too(
    fault: str, made: Run
) -> None:
    assert traced(made, BACKWARD[fault], trace_compiled)[:2] == (StepPhase.backward, "block.2")


def test_a_fault_of_the_model_itself_the_objective_or_an_exception_is_named_so(
    made: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = "block.2 (Computed) raised ValueError: no gradient in the backward"
    assert traced(made, value(spoiled(refuse))) == (StepPhase.exception, "block.2", raised)
    with monkeypatch.context() as patch:
        patch.setattr(made.model, "functional", True)
        assert traced(made, nn.Identity)[:2] == (StepPhase.backward, "")

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(spoiled(numpy_inf)(output), target)

    monkeypatch.setattr(made, "objective", CustomLoss(loss, "planted"))
    found = traced(made, nn.Identity)[2]
    assert found.startswith("the gradient through the objective becomes Inf")


def test_hooks_of_a_step_that_was_traced_are_gone(made: Run) -> None:
    register = torch.Tensor.register_hook
    traced(made, BACKWARD["output hook"])
    assert torch.Tensor.register_hook is register
    assert all(module._compiled_call_impl is None for module in made.model.modules())
