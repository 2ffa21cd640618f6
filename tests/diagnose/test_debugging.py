"""The debugger for loops of the user's own: times, faults and NaNs by name."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch import Tensor, nn

from runner import debug_operation, debugger, profile
from runner.core.errors import UsageError
from runner.diagnose.debugging import Debugger, NotFinite


@pytest.fixture
def own() -> Debugger:
    return Debugger()


def calls(of: Debugger) -> dict[str, int]:
    return {row.name: row.calls for row in of.summary().operations}


def test_a_plain_loop_shows_where_the_nan_came_from_and_at_which_step() -> None:
    debugger.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    @debug_operation("forward")
    def forward(batch: Tensor) -> Tensor:
        return model(batch)

    for number in range(6):
        batch = torch.randn(4, 8)
        if number == 3:
            batch[0, 0] = float("nan")
        with debugger.context("step"), profile.section("anything"):
            debugger.check(forward(batch).pow(2).mean(), "loss").backward()
    summary = debugger.summary()
    rows = {row.name: row for row in summary.operations}
    assert rows["step"].calls == rows["step/forward"].calls == 6
    assert rows["step"].seconds >= rows["step/forward"].seconds > 0
    first, second = summary.faults
    assert first.message == "step/forward/output: 1 NaN of 4 values"
    assert second.message.startswith("step/loss: 1 NaN")
    assert first.steps == second.steps == [4]
    assert "step/forward" in str(summary) and first.message in str(summary)


def test_an_exception_is_recorded_with_its_traceback_and_raised(own: Debugger) -> None:
    with pytest.raises(ZeroDivisionError), own.context("outer"), own.context("inner"):
        _ = 1 / 0
    with own.context("after"):
        pass
    assert calls(own) == {"outer": 1, "outer/inner": 1, "after": 1}, "a context was left open"
    first = own.summary().faults[0]
    assert first.message == "outer/inner: ZeroDivisionError: division by zero"
    assert "_ = 1 / 0" in first.traceback


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor([1.0, float("inf")]), "x: 1 Inf of 2 values"),
        ({"a": [torch.ones(2), torch.tensor(float("nan"))]}, "x.a[1]: 1 NaN"),
        (float("nan"), "x: nan"),
        (torch.tensor([complex(0, float("inf"))]), "x: 1 Inf of 1 value"),
        (torch.tensor([0.0, 1.0, float("nan")]).to_sparse(), "x: 1 NaN of 2 values"),
    ],
    ids=["inf", "nest", "number", "complex", "sparse"],
)
def test_values_that_are_not_finite_are_recorded_or_raised_and_logged_once(
    value: object, message: str, own: Debugger, caplog: pytest.LogCaptureFixture
) -> None:
    for fine in (torch.ones(3), torch.arange(3), 1.0, 3, "text", None, [torch.zeros(0)]):
        own.check(fine)
    with caplog.at_level(logging.WARNING, "runner"):
        for _ in range(5):
            assert own.check(value, "x") is value
        with pytest.raises(NotFinite, match="x"):
            own.check(value, "x", on="raise")
    (fault,) = own.summary().faults
    assert message in fault.message and fault.count == 6
    assert len(caplog.records) == 1


def test_the_decorator_raises_if_asked_and_keeps_the_functions_name(own: Debugger) -> None:
    @own.operation(check_finite="raise")
    def broken(x: Tensor) -> Tensor:
        """Divides."""
        return x / 0

    @own.operation("quiet", check_finite=False)
    def quiet() -> Tensor:
        return torch.tensor(float("nan"))

    assert (broken.__name__, broken.__doc__) == ("broken", "Divides.")
    with pytest.raises(NotFinite, match="broken/output"):
        broken(torch.ones(2))
    quiet()
    assert [fault.kind for fault in own.summary().faults] == ["non_finite", "exception"]
    with pytest.raises(UsageError, match="check_finite must be"):
        own.operation("x", check_finite="rais")
    with pytest.raises(UsageError, match="on must be"):
        own.check(1.0, on="stop")
    with pytest.raises(UsageError, match=r"got a Tensor; write check\(value, name\)"):
        own.check("loss", torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="check_gradients: model must be .*, got a str"):
        own.check_gradients("net")  # type: ignore[arg-type]
    assert repr(own) == "<Debugger: 2 operations, 2 faults>"


def test_threads_count_together(own: Debugger) -> None:
    def work() -> None:
        for _ in range(100):
            with own.context("outer"), own.context("inner"):
                pass

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls(own) == {"outer": 600, "outer/inner": 600}


def test_faults_of_gradients_are_recorded_and_logged(
    own: Debugger, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 1)
    model(torch.randn(5, 3)).sum().backward()
    assert own.check_gradients(model).problems == own.summary().faults == []
    (model(torch.randn(5, 3)).sum() * float("nan")).backward()
    with own.context("step"):
        own.check_gradients(model)
    (fault,) = own.summary().faults
    assert (fault.kind, fault.steps) == ("non_finite", [1])
    assert fault.message == "step/gradients: not finite: weight and bias"
    assert fault.message in caplog.text
    model.weight.grad, model.bias.grad = None, torch.ones(1)
    own.check_gradients(model, torch.optim.SGD([model.weight], 0.1))
    kinds = [fault.kind for fault in own.summary().faults]
    assert kinds == ["non_finite", "no_gradient", "not_optimized"]
