"""The debugger for loops of the user's own: times, faults and NaNs by name."""

import inspect
import json
import logging
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
    step, forward = sorted(summary.operations, key=lambda row: row.name)
    assert (step.name, forward.name) == ("step", "step/forward")
    assert step.calls == forward.calls == 6 and step.seconds >= forward.seconds > 0
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
    def work(_: int) -> None:
        for _ in range(100):
            with own.context("outer"), own.context("inner"):
                pass

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
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


def test_rows_have_the_longest_call_failures_findings_and_memory(own: Debugger) -> None:
    for seconds in (0.0, 0.05, 0.0):
        with own.context("step"):
            time.sleep(seconds)
            own.check({"a": torch.tensor(math.inf), "b": torch.tensor(1.0)}, "x")
    with pytest.raises(ValueError, match="no"), own.context("step"):
        raise ValueError("no")

    @own.operation("grow", memory=True)
    def grow(size: int) -> int:
        return len(torch.ones(size, dtype=torch.uint8))

    grow(100 << 20)
    grow(1)
    rows = {row.name: row for row in own.summary().operations}
    step = rows["step"]
    assert 0.05 <= step.longest < step.seconds < 0.05 * 4
    assert (step.calls, step.failures, step.not_finite, step.memory) == (4, 1, 3, None)
    assert rows["grow"].memory == pytest.approx(100 << 20, rel=0.1)
    assert (rows["grow"].failures, rows["grow"].not_finite) == (0, 0)
    for title in ("longest", "failures", "not finite", "memory"):
        assert title in str(own.summary()).splitlines()[0]


class Root(nn.Module):
    """Its derivative at 0 is Inf, times 0."""

    def forward(self, x: Tensor) -> Tensor:
        y = (x - x).sqrt()
        return torch.where(x > 1e9, y, x)


@pytest.mark.parametrize("call", ["method", "function", "keyword", "grad"])
def test_a_nan_of_a_backward_is_named_by_operation_module_and_line(
    own: Debugger, call: str
) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), Root()), nn.Linear(4, 1))

    def backward(model: nn.Module) -> None:
        loss = model(torch.randn(5, 3)).pow(2).mean()
        assert loss.isfinite()
        if call == "method":
            loss.backward()
        elif call == "function":
            torch.autograd.backward([loss])
        elif call == "keyword":
            torch.autograd.backward(tensors=loss)
        else:
            torch.autograd.grad(loss, list(model.parameters()))

    functions = torch.autograd.backward, torch.autograd.grad
    with own.context("step", anomaly=True), own.context("inner", anomaly=True):
        backward(net)
        backward(nn.Sequential(net[0], net[2]))
    (fault,) = own.summary().faults
    line = inspect.getsourcelines(Root.forward)[1] + 1
    assert (fault.kind, fault.count) == ("anomaly", 1)
    assert fault.message.startswith(
        "step/inner: NaN in the backward, by SqrtBackward0, module 1.1 (Root), "
    )
    assert fault.message.endswith(f"test_debugging.py:{line} `y = (x - x).sqrt()`")
    assert {row.name: row.not_finite for row in own.summary().operations}["step/inner"] == 1
    with pytest.raises(NotFinite, match="SqrtBackward0"):
        own.operation("raising", anomaly=True, on="raise")(backward)(net)
    assert (torch.autograd.backward, torch.autograd.grad) == functions
    assert not torch.is_anomaly_enabled()
    backward(net)
    assert [f.kind for f in own.summary().faults] == ["anomaly", "anomaly", "exception"]


def test_an_inf_before_the_nan_and_operations_outside_of_modules_are_named(own: Debugger) -> None:
    weight = torch.zeros(3, requires_grad=True)
    with own.context("step", anomaly=True):
        (nn.Identity()(weight) * torch.zeros(3)).sqrt().sum().backward()
    (fault,) = own.summary().faults
    assert fault.message.startswith("step: NaN in the backward, by MulBackward0, ")
    assert "; Inf first, by SqrtBackward0, " in fault.message and "module" not in fault.message


def test_the_norm_of_a_gradient_report_is_torchs_total_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 2))
    model(torch.randn(3, 7)).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
    assert debugger.check_gradients(model).norm == pytest.approx(expected, rel=1e-6)
    model[0].weight.grad = None
    expected = nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
    assert debugger.check_gradients(model).norm == pytest.approx(expected, rel=1e-6)
    model[1].weight.grad[0, 0] = math.nan
    assert math.isnan(debugger.check_gradients(model).norm)
    debugger.reset()


def test_the_summary_is_exported_as_json(own: Debugger, tmp_path: Path) -> None:
    with own.context("step"):
        own.check(math.nan, "loss")
    file = own.export(tmp_path / "new" / "debug.json")
    assert file == tmp_path / "new" / "debug.json"
    written = json.loads(file.read_text())
    assert written == own.summary().as_dict()
    (row,) = written["operations"]
    assert (row["name"], row["calls"], row["not_finite"], row["memory"]) == ("step", 1, 1, None)
    assert row["mean"] == row["longest"] == row["seconds"]
    assert written["faults"][0]["message"] == "step/loss: nan"
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "link.json").symlink_to(file)
    for name, problem in {
        "folder.json": "is a folder", "link.json": "is a link", "debug.txt": r"must end in \.json",
        "debug": r"must end in \.json", "new/debug.json/inner.json": "cannot be written",
    }.items():  # fmt: skip
        with pytest.raises(UsageError, match=f"debugger.export: .*{problem}"):
            own.export(tmp_path / name)
    for call in (lambda: own.context("x", on="stop").__enter__(), lambda: own.operation(on="x")):
        with pytest.raises(UsageError, match="on must be 'record' or 'raise', got"):
            call()


def test_contexts_of_two_threads_leave_torch_as_it_was() -> None:
    """The second begins within the first, and ends after it."""
    before = torch.autograd.backward, torch.autograd.grad, torch.is_anomaly_enabled()
    own, first_left = Debugger(), threading.Event()
    entered, texts = threading.Event(), list[str]()

    def second() -> None:
        with own.context("second", anomaly=True):
            entered.set()
            first_left.wait(20)
            weight = torch.zeros(3, requires_grad=True)
            (weight.sqrt() * 0).sum().backward()  # 0 * Inf
        texts.extend(fault.message for fault in own.summary().faults)

    thread = threading.Thread(target=second)
    with own.context("first", anomaly=True):
        thread.start()
        entered.wait(20)
    first_left.set()
    thread.join()
    assert any(text.startswith("second: NaN in the backward") for text in texts)
    assert (torch.autograd.backward, torch.autograd.grad, torch.is_anomaly_enabled()) == before


def test_a_reset_within_a_context_does_not_break_the_backward() -> None:
    own, weight = Debugger(), torch.zeros(3, requires_grad=True)
    with own.context("step", anomaly=True):
        own.reset()
        (weight.sqrt() * 0).sum().backward()
    assert weight.grad is not None
