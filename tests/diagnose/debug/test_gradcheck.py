"""Backward passes that are wrong are found by name, and right ones are left alone."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from runner import Summary, train
from runner.core.build.setup import Components
from runner.core.errors import NotVerified
from runner.core.objectives.custom import CustomObjective
from runner.core.schemas.debug import GradcheckConfig
from runner.diagnose.debug.gradcheck import GradientCheck, check_model_gradients
from tests import runs
from tests.my_package import Computed

RUN = (
    "data=digits optimization=none training.steps=4 training.batch_size=16 "
    "debug.gradcheck.enabled=true"
).split()
cross_entropy = nn.functional.cross_entropy


class Scale(Function):
    """A tensor times a number of its own; the number's gradient is right or off by `factor`."""

    factor = 1.0
    sign = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Tensor) -> Tensor:
        ctx.save_for_backward(x, by)
        return x * by

    @classmethod
    def backward(cls, ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, by = ctx.saved_tensors
        return cls.sign * upstream * by, cls.factor * (upstream * x).sum().reshape(by.shape)


class Doubled(Scale):
    factor = 2.0


class Turned(Scale):
    sign = -1.0


class Scaling(nn.Module):
    def __init__(self, function: type[Scale]) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor([1.5]))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.by)


class Own(nn.Module):
    """A model with a function of its own at its end, dropout and BatchNorm before it."""

    def __init__(self, function: type[Scale] = Scale) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU()
        )
        self.tail = Computed(
            lambda tail, x: tail.head(tail.scale(x)),
            scale=Scaling(function),
            head=nn.Linear(16, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.body(x))


def images(samples: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(samples, 1, 8, 8, generator=draw), torch.arange(samples) % 10


def checked(model: nn.Module, batch: Any, loss: Any = None, **knobs: Any) -> list[GradientCheck]:
    given = batch if isinstance(batch, tuple) else (batch, None)
    name = getattr(loss, "__name__", "loss")
    return check_model_gradients(model, given, loss, GradcheckConfig(True, **knobs), name)


def by_name(checks: list[GradientCheck]) -> dict[str, GradientCheck]:
    return {check.name: check for check in checks}


@pytest.mark.parametrize(
    ("function", "leaf", "ratio"), [(Doubled, "by", 2.0), (Turned, "input", -1)]
)
def test_a_wrong_backward_is_found_by_module_and_input(
    function: type[Scale], leaf: str, ratio: float
) -> None:
    checks = by_name(checked(Own(function), images(), cross_entropy))
    wrong = checks["tail.scale"]
    assert (wrong.of, wrong.result, wrong.where) == ("Scaling", "wrong", leaf)
    analytical, numerical = map(float, re.findall(r"al ([-\d.e]+)", wrong.reason))
    assert analytical / numerical == pytest.approx(ratio, rel=1e-2)
    assert checks["objective"].result == "passed"
    for name in ("tail", "Own"):  # blamed on what is wrong in them, not once more
        assert checks[name].result == "unchecked"
        assert "contains tail.scale" in checks[name].reason


def at_kinks(model: Any, x: Tensor) -> Tensor:
    """ReLU at exactly 0, equal values under a maximum, and the absolute value of 0."""
    y = model.layer(x).relu_()
    return y + y.amax(1, keepdim=True) + model.layer(x).abs()


def in_float32(model: Any, x: Tensor) -> Tensor:
    """Whatever it gets, as some normalisations do."""
    y = x.to(torch.float32)
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return model.weight * y.to(x.dtype)


def test_gradcheck_passes_every_correct_backward() -> None:
    checks = checked(Own(), images(), cross_entropy)
    assert [check.name for check in checks] == ["objective", "tail.scale", "tail", "Own"]
    assert {c.result for c in checks} == {"passed"}
    kinked = Computed(at_kinks, layer=nn.Linear(16, 16))
    for weight in kinked.parameters():
        nn.init.zeros_(weight)
    own = nn.Sequential(
        nn.Linear(16, 16), Computed(in_float32, weight=nn.Parameter(torch.ones(16)))
    )
    sparse = nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.LayerNorm(6), nn.GELU())
    for model, batch in (
        (kinked, torch.zeros(4, 16)),
        (
            Computed(lambda m, x: m.layer(x.view(12, 16)), layer=nn.Linear(16, 4)),
            torch.randn(12, 16),
        ),
        (own, torch.randn(4, 16)),
        (Computed(lambda m, ids: m.body(ids), body=sparse), torch.arange(60).reshape(3, 20) % 20),
    ):
        assert [check.result for check in checked(model, batch)] == ["passed"]
    torchs = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))  # its modules are left out
    (loss,) = checked(torchs, (torch.randn(4, 16), torch.tensor([0, 1, 2, 0])), cross_entropy)
    assert (loss.name, loss.result) == ("objective", "passed")


def test_a_small_gradient_is_checked_as_well_as_a_large_one() -> None:
    """Also where it is far below the absolute tolerance of torch.autograd.gradcheck."""
    by = nn.Parameter(torch.tensor([1.5]))
    small = Computed(lambda model, x: 1e-9 * Doubled.apply(x, model.by), by=by)
    (check,) = checked(small, torch.randn(4, 16))
    assert (check.result, check.where) == ("wrong", "by")


def test_what_cannot_be_checked_says_why() -> None:
    calls = itertools.count(1)
    drifting = Computed(lambda model, x: model.layer(x) * next(calls), layer=nn.Linear(16, 4))
    for model, batch, budget_s, reason in (
        (drifting, torch.randn(4, 16), 10, "two calls"),
        (drifting, torch.randn(4, 3), 10, "shapes cannot be multiplied"),
        (Own(), images(), 1e-9, "budget_s"),
    ):
        check = checked(model, batch, budget_s=budget_s)[0]
        assert check.result == "unchecked" and reason in check.reason


def halved(output: Tensor, target: Tensor) -> Tensor:
    error = output - nn.functional.one_hot(target, 10).to(output.dtype)
    return (error * error.detach()).mean()


def test_an_objective_of_the_users_that_is_wrong_is_found_and_one_that_is_right_passes() -> None:
    wrong = by_name(checked(Own(), images(), halved))["objective"]
    assert (wrong.of, wrong.result, wrong.where) == ("halved", "wrong", "input")
    weighted = nn.CrossEntropyLoss(weight=torch.rand(10) + 0.5, label_smoothing=0.1)
    assert by_name(checked(Own(), images(), weighted))["objective"].result == "passed"
    assert "objective" not in by_name(checked(Own(), images(), halved, skip=["halved"]))


@pytest.mark.parametrize("named", ["tail.scale", "Scaling"])
def test_a_deliberate_non_derivative_is_left_out_with_its_module(named: str) -> None:
    checks = checked(Own(Doubled), images(), cross_entropy, skip=[named])
    assert [(check.name, check.result) for check in checks] == [("objective", "passed")]


# in real runs


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=cnn", "model.width=4"],
        (
            "data=stdlib_text model=gpt model.width=16 model.heads=2 model.depth=2 "
            "optimization.recompute.enabled=true optimization.recompute.what=full"
        ).split(),
    ],
    ids=["cnn", "gpt, recomputed"],
)
def test_our_own_models_and_objectives_pass_and_train_the_same_weights(
    overrides: list[str], tmp_path: Path
) -> None:
    short = [*RUN, "training.steps=2", "data.validation_samples=8", *overrides]
    ends = []
    for more in ("budget_s=1000", "enabled=false"):
        with runs.opened(*short, f"debug.gradcheck.{more}", folder=tmp_path / more) as run:
            train(run)
            ends.append(runs.weights(run))
    checks = runs.debug_file(tmp_path / "budget_s=1000", "gradcheck")["checks"]
    assert len(checks) > 1 and {check["result"] for check in checks} == {"passed"}
    assert runs.differences(*ends) == []


def test_a_run_with_a_wrong_backward_says_so_and_trains_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with runs.opened(*RUN, folder=tmp_path, given=Components(model=Own(Doubled))) as run:
        summary = train(run)
    assert summary.status == "done" and summary.steps == 4
    assert summary.faults["wrong_gradient"] == 1
    (fault,) = runs.faults(tmp_path, "wrong_gradient")
    assert fault["severity"] == "error" and "tail.scale (Scaling)" in fault["message"]
    assert "gradient of by is wrong: analytical " in fault["message"]
    assert "tail.scale (Scaling)" in caplog.text
    (tool,) = summary.tools
    assert tool.finding == "2 checked, 1 wrong: tail.scale; 2 could not be checked"


def test_with_on_anomaly_raise_the_run_ends_before_its_first_step(tmp_path: Path) -> None:
    given = Components(model=Own(), objective=CustomObjective(halved, "halved"))
    with runs.opened(*RUN, "debug.on_anomaly=raise", folder=tmp_path, given=given) as run:
        with pytest.raises(NotVerified, match=r"objective \(halved\).*debug.gradcheck.skip"):
            train(run)
    summary = Summary.read(tmp_path)
    assert summary.status == "failed" and summary.steps == 0
    assert (tmp_path / "debug/gradcheck.json").exists()
