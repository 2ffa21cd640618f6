"""A fault in a real run is traced to its module, its operation and its line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.replay.attempt import make_attempt
from runner.replay.compiled import trace_compiled
from runner.replay.findings import StepPhase
from runner.replay.spike import explain_spike
from runner.replay.trace import trace_step
from runner.training.step import forward_backward

POISON = "+data.poison=[3,17,20,33,41,50]"
AMP = ["optimization.amp.enabled=true", "optimization.amp.dtype=bf16"]


@pytest.mark.parametrize(
    ("overrides", "phase", "module", "kind", "mark"),
    [
        (["+model.part=log"], StepPhase.forward, "part", "Log", "LOG"),
        (["+model.part=log", "training.micro_batch=3"], StepPhase.forward, "part", "Log", "LOG"),
        (["+model.part=root"], StepPhase.backward, "part", "Root", "ROOT"),
        (["+model.part=masks"], StepPhase.forward, "part", "Masks", "MASKS"),
        (["+model.part=cancels", *AMP], StepPhase.forward, "part", "Cancels", "CANCELS"),
        (
            ["+model.part=cancels", *AMP, "optimization.amp.pure=true"],
            StepPhase.forward,
            "part",
            "Cancels",
            "CANCELS",
        ),
        (["+model.part=raises"], StepPhase.exception, "part", "Raises", "RAISES"),
        (["objective._target_=faulty_models.broken_loss"], StepPhase.loss, "", "", "LOSS"),
    ],
    ids=[
        "log of 0",
        "in micro-batches",
        "slope of a root",
        "masked row",
        "bf16",
        "pure bf16",
        "exception",
        "loss",
    ],
)
def test_a_fault_is_traced_to_module_and_line(
    overrides: list[str],
    phase: StepPhase,
    module: str,
    kind: str,
    mark: str,
    captured: Any,
    standing: Any,
    marked: Any,
) -> None:
    with standing(captured(POISON, *overrides)) as (run, batch, _):
        found = trace_step(run, batch)
    assert (found.phase, found.module, found.kind) == (phase, module, kind)
    assert found.line is not None
    assert found.line.file.endswith("faulty_models.py")
    assert found.line.number == marked(mark)
    assert found.line.source.endswith(f"# {mark}")


@pytest.mark.parametrize("part", ["writes", "times"])
def test_a_nan_that_the_code_itself_names_is_not_said_to_come_of_inf(
    part: str, captured: Any, standing: Any, marked: Any
) -> None:
    with standing(captured(POISON, f"+model.part={part}")) as (run, batch, _):
        found = trace_step(run, batch)
    assert found.line is not None
    assert found.line.number == marked(part.upper())
    assert found.cause.endswith("of a constant NaN")


def test_the_operation_and_the_parameters_with_bad_gradients_are_named(
    captured: Any, standing: Any
) -> None:
    with standing(captured(POISON, "+model.part=root")) as (run, batch, _):
        found = trace_step(run, batch)
    assert found.operation == "div.Tensor in SqrtBackward0"
    assert found.parameters == ["first.bias", "first.weight"]  # not those after it


def test_what_went_into_the_module_is_told_in_numbers(captured: Any, standing: Any) -> None:
    with standing(captured(POISON, "+model.part=log")) as (run, batch, capture):
        found = trace_step(run, batch)
        inputs = []
        run.model.part.register_forward_pre_hook(lambda module, args: inputs.extend(args))
        forward_backward(run, batch)
    told, (x, off) = found.inputs[0], [t.detach() for t in inputs]
    assert told.shape == list(x.shape)
    assert told.not_finite == 0
    assert (told.minimum, told.maximum) == pytest.approx((float(x.min()), float(x.max())))
    assert found.outputs[0].name == "result of log"
    assert found.outputs[0].not_finite == len(found.samples) == int(off.sum())
    assert {capture.samples[i] for i in found.samples} <= {3, 17, 20, 33, 41, 50}


def test_bad_samples_of_the_batch_are_counted_out(captured: Any, standing: Any) -> None:
    with standing(captured("+data.nan=[1,2,4,6,8,33,40]")) as (run, batch, capture):
        found = trace_step(run, batch)
    assert found.phase is StepPhase.input
    assert "input is not finite" in found.cause
    assert {capture.samples[i] for i in found.samples} <= {1, 2, 4, 6, 8, 33, 40}
    assert len(found.samples) == int(torch.isnan(batch[0]).any(1).sum()) > 0


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        ("first.weight", float("nan"), "weight of first (Linear) was not finite before"),
        ("norm.running_var", float("inf"), "buffer running_var of norm (BatchNorm1d) was not"),
    ],
)
def test_what_was_bad_before_the_step_is_named_as_the_cause(
    name: str, value: float, cause: str, captured: Any, standing: Any
) -> None:
    with standing(captured(POISON, "+model.part=log", "+model.norm=true")) as (run, batch, _):
        with torch.no_grad():
            run.model.state_dict()[name].view(-1)[0] = value
        found = trace_step(run, batch)
    assert found.phase is StepPhase.weights
    assert found.cause.startswith(cause)
    assert found.module == name.rpartition(".")[0]


def test_statistics_that_a_forward_ruins_are_named_where_the_loss_is_finite(
    captured: Any, standing: Any
) -> None:
    with standing(captured(POISON, "+model.part=log", "+model.norm=true")) as (run, batch, _):
        run.model.part = __import__("faulty_models").Through()
        healthy = run.train.at(3)[0].clone()
        healthy[:, -1] = 0
        with torch.no_grad():
            run.model.first.weight *= 1e25  # the variance overflows, what is normalised does not
            run.model.first.bias.zero_()
        found = trace_step(run, (healthy, batch[1]))
    assert (found.phase, found.module, found.kind) == (StepPhase.forward, "norm", "BatchNorm1d")
    assert "running_var" in found.cause


def test_a_fault_of_the_traced_graph_alone_has_its_line_too(
    captured: Any, standing: Any, marked: Any
) -> None:
    path = captured(POISON, "+model.part=log")  # any: the part is put in its place below
    with standing(path) as (run, batch, _):
        run.model.part = __import__("faulty_models").OnlyCompiled()
        assert trace_step(run, batch).phase is StepPhase.nowhere
        found = trace_compiled(run, batch)
    assert (found.phase, found.module, found.kind) == (StepPhase.forward, "part", "OnlyCompiled")
    assert found.line is not None
    assert found.line.number == marked("COMPILED")


def test_a_spike_is_brought_back_to_the_module_that_grew_and_its_samples(
    captured: Any, standing: Any
) -> None:
    path = captured(
        POISON,
        "+model.part=grows",
        "training.steps=40",
        "+data.samples=200",
        "stability.spike.at_least=5",
        "stability.spike.floor=0",
        "training.validate_every=40",
    )
    with standing(path) as (run, batch, capture):
        before = run.train.at(capture.step - 2)
        found = explain_spike(run, batch, before)
    assert (found.phase, found.module, found.kind) == (StepPhase.spike, "part", "Grows")
    assert {capture.samples[i] for i in found.samples} <= {3, 17, 20, 33, 41, 50}
    assert found.samples
    assert found.gradients[0].bad > 10 * (found.gradients[0].healthy or 0.0)


def test_a_look_leaves_the_run_as_it_was(captured: Any, standing: Any) -> None:
    path: Path = captured(POISON, "+model.part=masks", "+model.norm=true")

    def kept(tensors: Any) -> list[Tensor]:
        return [t.detach().clone() for t in tensors]

    with standing(path) as (run, batch, capture):
        run.model.train()
        before = kept(run.model.state_dict().values())
        trace_step(run, batch)
        explain_spike(run, batch, run.train.at(1))
        after = kept(run.model.state_dict().values())
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert all(p.grad is None for p in run.model.parameters())
        looked = make_attempt(run, batch, capture)
    with standing(path) as (run, batch, capture):
        plain = make_attempt(run, batch, capture)
    assert (str(looked.loss), str(looked.grad_norm)) == (str(plain.loss), str(plain.grad_norm))
