"""A fault in a real run is traced to its module, its operation and its line."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.core.format import metric
from runner.core.train.step import forward_backward
from runner.diagnose.replay.reopen import make_attempt
from runner.diagnose.replay.results import StepPhase
from runner.diagnose.replay.trace import explain_spike, trace_compiled, trace_step
from runner.diagnose.replay.tracer import Tracer
from tests.diagnose.replay.faulty_models import Fuses, OnlyCompiled, Through
from tests.diagnose.replay.replays import POISON, ROWS, Captured, line_of, opened
from tests.my_package import Computed

LOG = (POISON, "+model.part=log")
NORM = (*LOG, "+model.norm=true")
CASES = {
    "in micro-batches": (["+model.part=log", "training.micro_batch=3"], StepPhase.forward, "Log"),
    "slope of a root": (["+model.part=root"], StepPhase.backward, "Root"),
    "masked row": (["+model.part=masks"], StepPhase.forward, "Masks"),
    "exception": (["+model.part=raises"], StepPhase.exception, "Raises"),
    "NaN by hand": (["+model.part=writes"], StepPhase.forward, "Writes"),
    "loss": (["objective._target_=faulty_models.broken_loss"], StepPhase.loss, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_traced_to_module_and_line(case: str, captured: Captured) -> None:
    overrides, phase, kind = CASES[case]
    mark = kind.upper() or "LOSS"
    with opened(captured(POISON, *overrides)) as (run, batch, _):
        cause = trace_step(run, batch)
    assert (cause.phase, cause.module, cause.kind) == (phase, "part" if kind else "", kind)
    assert cause.line is not None
    assert cause.line.file.endswith("faulty_models.py")
    assert cause.line.number == line_of(mark)
    assert cause.line.source.endswith(f"# {mark}")
    assert cause.cause.endswith("of a constant NaN") is case.startswith("NaN")
    if case == "slope of a root":
        assert cause.operation == "div.Tensor in SqrtBackward0"
        assert cause.parameters == ["first.bias", "first.weight"]  # not those after it


def test_the_numbers_of_a_modules_input_are_reported(captured: Captured) -> None:
    with opened(captured(*LOG)) as (run, batch, capture):
        cause = trace_step(run, batch)
        inputs = []
        run.model.part.register_forward_pre_hook(lambda module, args: inputs.extend(args))
        forward_backward(run, batch)
    numbers, (x, off) = cause.inputs[0], [t.detach() for t in inputs]
    assert (numbers.shape, numbers.not_finite) == (list(x.shape), 0)
    assert (numbers.minimum, numbers.maximum) == pytest.approx((float(x.min()), float(x.max())))
    assert cause.outputs[0].name == "result of log"
    assert cause.outputs[0].not_finite == len(cause.samples) == int(off.sum())
    assert {capture.samples[i] for i in cause.samples} <= ROWS


def test_bad_samples_of_the_batch_are_counted_out(captured: Captured) -> None:
    with opened(captured("+data.nan=[1,2,4,6,8,33,40]")) as (run, batch, capture):
        cause = trace_step(run, batch)
    assert cause.phase is StepPhase.input
    assert "input is not finite" in cause.cause
    assert {capture.samples[i] for i in cause.samples} <= {1, 2, 4, 6, 8, 33, 40}
    assert len(cause.samples) == int(torch.isnan(batch[0]).any(1).sum()) > 0


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("first.weight", float("nan"), "weight of first (Linear) was not finite before"),
        ("norm.running_var", float("inf"), "buffer running_var of norm (BatchNorm1d) was not"),
    ],
)
def test_weights_that_were_bad_before_the_step_are_named_as_the_cause(
    name: str, value: float, says: str, captured: Captured
) -> None:
    with opened(captured(*NORM)) as (run, batch, _):
        with torch.no_grad():
            run.model.state_dict()[name].view(-1)[0] = value
        cause = trace_step(run, batch)
    assert (cause.phase, cause.module) == (StepPhase.weights, name.rpartition(".")[0])
    assert cause.cause.startswith(says)


def test_statistics_that_a_forward_ruins_are_named_where_the_loss_is_finite(
    captured: Captured,
) -> None:
    with opened(captured(*NORM)) as (run, batch, _):
        run.model.part = Through()
        healthy = run.train.at(3)[0].clone()
        healthy[:, -1] = 0
        with torch.no_grad():
            run.model.first.weight *= 1e25  # the variance overflows, what is normalised does not
            run.model.first.bias.zero_()
        cause = trace_step(run, (healthy, batch[1]))
    assert (cause.phase, cause.module, cause.kind) == (StepPhase.forward, "norm", "BatchNorm1d")
    assert "running_var" in cause.cause


def test_a_fault_of_the_traced_graph_alone_has_its_line_too(captured: Captured) -> None:
    with opened(captured(*LOG)) as (run, batch, _):
        run.model.part = OnlyCompiled()
        assert trace_step(run, batch).phase is StepPhase.nowhere
        cause = trace_compiled(run, batch)
    assert (cause.phase, cause.module, cause.kind) == (StepPhase.forward, "part", "OnlyCompiled")
    assert cause.line is not None
    assert cause.line.number == line_of("COMPILED")
    with opened(captured(*LOG)) as (run, batch, _):
        run.model.part = Fuses()  # only the generated code is bad
        cause = trace_compiled(run, batch)
    assert (cause.phase, cause.line) == (StepPhase.nowhere, None)
    assert cause.cause == "only the compiler's generated code is bad: its graph is good"


def test_a_spike_states_loss_and_norm_to_their_medians_and_the_samples_of_highest_loss(
    captured: Captured,
) -> None:
    spike = ["stability.spike.at_least=5", "stability.spike.floor=0"]
    long = ["training.steps=40", "training.validate_every=40", "+data.samples=200"]
    with opened(captured(POISON, "+model.part=grows", *long, *spike)) as (run, batch, capture):
        cause = explain_spike(run, batch, capture)
    assert (cause.phase, cause.module) == (StepPhase.spike, "")
    loss, norm = cause.values
    assert (loss.bad, norm.bad) == (capture.loss, capture.grad_norm)
    assert (loss.healthy, norm.healthy) == (capture.medians["loss"], capture.medians["grad_norm"])
    assert norm.bad > 10 * (norm.healthy or 0) and f"(median {metric(norm.healthy)})" in cause.cause
    assert cause.samples
    assert {capture.samples[i] for i in cause.samples} <= ROWS
    assert cause.losses[0].bad == max(row.bad for row in cause.losses)


def test_a_look_leaves_the_run_as_it_was(captured: Captured) -> None:
    path = captured(POISON, "+model.part=masks", "+model.norm=true")

    def copies(tensors: Any) -> list[Tensor]:
        return [t.detach().clone() for t in tensors]

    with opened(path) as (run, batch, capture):
        before = copies(run.model.state_dict().values())
        trace_step(run, batch)
        explain_spike(run, batch, capture)
        after = copies(run.model.state_dict().values())
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert all(p.grad is None for p in run.model.parameters())
        traced = make_attempt(run, batch, capture)
    with opened(path) as (run, batch, capture):
        plain = make_attempt(run, batch, capture)
    assert (str(traced.loss), str(traced.grad_norm)) == (str(plain.loss), str(plain.grad_norm))


class OwnColumn(nn.Module):
    """Makes NaN or Inf in one column of its input, through a view."""

    def __init__(self, column: int, inf: bool = False) -> None:
        super().__init__()
        self.column, self.inf = column, inf

    def forward(self, x: Tensor) -> Tensor:
        column = x[:, self.column]
        if self.inf:
            column.div_(0)
        else:
            column.mul_(-1).log_()
        return x


def first_column(model: Any, x: Tensor) -> Tensor:
    """A loss that is of the first column alone."""
    x = x * 1.0
    for part in model.parts:
        x = part(x)
    return x[:, 0].sum()


@pytest.mark.parametrize("inf", [False, True])
@pytest.mark.parametrize("guilty", [0, 1])
def test_a_module_that_changes_another_view_in_place_is_not_blamed(guilty: int, inf: bool) -> None:
    parts = [OwnColumn(1, inf), OwnColumn(1, inf)]
    parts[guilty] = OwnColumn(0)
    model, x = Computed(first_column, parts=nn.ModuleList(parts)), torch.rand(3, 4) + 0.1
    tracer = Tracer(model, {"input": x})
    with tracer.track_modules(), tracer:
        loss = model(x)
    event = tracer.origin(loss)
    assert event is not None and event.frame is not None
    assert (event.frame.name, event.operation, event.kind) == (f"parts.{guilty}", "log_", "NaN")
