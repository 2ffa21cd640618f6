"""The module that makes the first NaN or Inf is the one named, in forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from runner.objectives.custom import Custom as CustomLoss
from runner.replay.findings import StepPhase
from runner.replay.trace import trace_compiled, trace_step
from runner.training.run import Run
from tests import runs
from tests.replay.planted_faults import (
    BACKWARD,
    FORWARD,
    NESTED,
    OF_FORWARD,
    Value,
    planted,
    planted_loss,
)
from tests.replay.replays import HERE, OVERRIDES

NET = "model._target_=planted_faults.Net"


@pytest.fixture(scope="module")
def made() -> Iterator[Run]:
    """A run whose model has a place for a fault, `block.2`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        with runs.opened(*OVERRIDES, NET) as run:
            yield run


def plant(run: Run, fault: Callable[[], nn.Module]) -> None:
    block = run.model.get_submodule("block")
    assert isinstance(block, nn.Sequential)
    block[2] = fault()


@pytest.mark.parametrize("fault", BACKWARD | NESTED)
def test_a_fault_of_the_backward_is_named_by_its_innermost_module(fault: str, made: Run) -> None:
    plant(made, (BACKWARD | NESTED)[fault])
    found = trace_step(made, made.train.at(0))
    phase = StepPhase.forward if fault.startswith(OF_FORWARD) else StepPhase.backward
    module = "block.2.inner" if fault in NESTED else "block.2"
    assert (found.phase, found.module) == (phase, module), found


@pytest.mark.parametrize("fault", FORWARD)
def test_a_fault_of_the_forward_is_named_by_its_module(fault: str, made: Run) -> None:
    plant(made, FORWARD[fault])
    found = trace_step(made, made.train.at(0))
    module = "block.2.inner" if fault.startswith("masked ") else "block.2"
    assert (found.phase, found.module) == (StepPhase.forward, module), found


def test_what_a_backward_raises_is_named_by_its_module(made: Run) -> None:
    plant(made, lambda: Value(planted("raises")))
    found = trace_step(made, made.train.at(0))
    assert (found.phase, found.module) == (StepPhase.exception, "block.2"), found
    assert found.cause == "block.2 (Value) raised ValueError: no gradient in the backward"


@pytest.mark.parametrize("fault", ["full_like", "where log"])
def test_a_fault_of_the_backward_is_named_in_the_graph_of_the_compiler_too(
    fault: str, made: Run
) -> None:
    plant(made, BACKWARD[fault])
    found = trace_compiled(made, made.train.at(0))
    assert (found.phase, found.module) == (StepPhase.backward, "block.2"), found


def test_what_the_model_and_the_objective_compute_themselves_is_named_so(
    made: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(made, nn.Identity)
    with monkeypatch.context() as patch:
        patch.setattr(made.model, "functional", True)
        found = trace_step(made, made.train.at(0))
    assert (found.phase, found.module, found.kind) == (StepPhase.backward, "", "Net"), found
    monkeypatch.setattr(made, "objective", CustomLoss(planted_loss, "planted"))
    found = trace_step(made, made.train.at(0))
    assert found.cause.startswith("the gradient through the objective becomes Inf"), found


def test_hooks_of_a_step_that_was_traced_are_gone(made: Run) -> None:
    plant(made, BACKWARD["output hook"])
    register = torch.Tensor.register_hook
    trace_step(made, made.train.at(0))
    assert torch.Tensor.register_hook is register
    assert all(module._compiled_call_impl is None for module in made.model.modules())
