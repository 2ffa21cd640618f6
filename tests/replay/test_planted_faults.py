"""The module that makes the first NaN or Inf is the one named, in forward and backward."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner import build, compose
from runner.jobs.replay import main
from runner.objectives.custom import Custom as CustomLoss
from runner.replay import page
from runner.replay.compiled import trace_compiled
from runner.replay.findings import StepPhase
from runner.replay.trace import trace_step
from runner.training.run import Run
from tests.replay.planted_faults import BACKWARD, FORWARD, NESTED, OF_FORWARD, Custom, planted_loss

TRUSTED = "security.trusted=[faulty_models,planted_faults]"
NET = "model._target_=planted_faults.Net"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run whose model has a place for a fault, `block.2`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        config = compose(
            [
                TRUSTED,
                NET,
                "data._target_=faulty_models.Poisoned",
                "data.workers=0",
                "optimization=none",
                "device.threads=1",
                "training.batch_size=8",
                "monitoring.progress=false",
            ]
        )
        with build(config, tmp_path_factory.mktemp("run")) as run:
            yield run


def plant(run: Run, fault: Callable[[], nn.Module]) -> None:
    block = run.model.get_submodule("block")
    assert isinstance(block, nn.Sequential)
    block[2] = fault()


@pytest.mark.parametrize("fault", BACKWARD)
def test_a_fault_of_the_backward_is_named_by_its_module(fault: str, made: Run) -> None:
    plant(made, BACKWARD[fault])
    found = trace_step(made, made.train.at(0))
    phase = StepPhase.forward if fault in OF_FORWARD else StepPhase.backward
    assert (found.phase, found.module) == (phase, "block.2"), found


@pytest.mark.parametrize("fault", FORWARD)
def test_a_fault_of_the_forward_is_named_by_its_module(fault: str, made: Run) -> None:
    plant(made, FORWARD[fault])
    found = trace_step(made, made.train.at(0))
    module = "block.2.inner" if fault.startswith("masked ") else "block.2"
    assert (found.phase, found.module) == (StepPhase.forward, module), found


def test_what_a_backward_raises_is_named_by_its_module(made: Run) -> None:
    plant(made, lambda: Custom("raises"))
    found = trace_step(made, made.train.at(0))
    assert (found.phase, found.module) == (StepPhase.exception, "block.2"), found
    assert found.cause == "block.2 (Custom) raised ValueError: no gradient in the backward"


@pytest.mark.parametrize("fault", NESTED)
def test_a_fault_that_is_computed_again_is_named_by_the_innermost_module(
    fault: str, made: Run
) -> None:
    plant(made, NESTED[fault])
    found = trace_step(made, made.train.at(0))
    phase = StepPhase.forward if fault.startswith(OF_FORWARD) else StepPhase.backward
    assert (found.phase, found.module) == (phase, "block.2.inner"), found


@pytest.mark.parametrize("fault", ["full_like", "where log", "saved"])
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


def test_the_page_and_the_script_name_the_module_of_a_bad_backward(
    captured: Any, tmp_path: Path
) -> None:
    path = captured(TRUSTED, NET, "+model.fault='full_like'")
    folder = tmp_path / "replay"
    folder.mkdir()
    asked = ["job=replay", f"replay.path={path}", TRUSTED, "replay.attribute=false"]
    replay = main(compose(asked), folder)
    assert replay.reproduced
    assert (replay.found.phase, replay.found.module) == (StepPhase.backward, "block.2")
    headline = dict(page.facts(replay))["where"]
    assert headline.startswith(f"the gradient through block.2 ({replay.found.kind}) becomes ")
    script = [sys.executable, str(folder / "reproduce.py")]
    done = subprocess.run(script, capture_output=True, text=True, check=False)  # noqa: S603
    assert (done.returncode, done.stdout.splitlines()[-1]) == (3, f"bad: {headline}"), done.stderr


def test_hooks_of_a_step_that_was_traced_are_gone(made: Run) -> None:
    plant(made, BACKWARD["output hook"])
    register = torch.Tensor.register_hook
    trace_step(made, made.train.at(0))
    assert torch.Tensor.register_hook is register
    assert all(module._compiled_call_impl is None for module in made.model.modules())
