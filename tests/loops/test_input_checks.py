"""`validate_inputs`: each kind of finding with its samples, and `safe_inference` around them."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from runner import safe_inference, validate_inputs
from runner.core.errors import UsageError
from tests.my_package import Computed


def batch(samples: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.rand(samples, 4), torch.arange(samples) % 3


def with_values(*places: tuple[int, int, float]) -> Tensor:
    x = batch()[0].clone()
    for row, column, value in places:
        x[row, column] = value
    return x


LIMITS: dict[str, Any] = {"low": 0.0, "high": 1.0, "classes": 3}
LABELS = torch.tensor([0, 1, 3, 2, -1, 0, -100, 2])
PLANTED: dict[str, tuple[Any, dict[str, Any], list[tuple[str, str]]]] = {
    "NaN and Inf": (
        (with_values((1, 0, math.nan), (5, 2, -math.inf)), batch()[1]),
        LIMITS,
        [("not_finite", "in 2 of 8 samples: 1, 5")],
    ),
    "range": (
        (with_values((2, 0, -0.5), (3, 3, 1.5), (4, 0, math.nan)), batch()[1]),
        LIMITS,
        [("not_finite", "in 1 of 8 samples: 4"), ("range", "in 2 of 8 samples: 2, 3")],
    ),
    "one limit": (with_values((7, 0, -2)), {"low": -1}, [("range", "in 1 of 8 samples: 7")]),
    "labels": ((batch()[0], LABELS), LIMITS, [("labels", "in 2 of 8 samples: 2, 4")]),
    "constant": (torch.full((3, 4), 0.5), LIMITS, [("constant", "every value")]),
    "features": ((batch()[0][:, :3], batch()[1]), {"like": batch(2)}, [("form", "[3] a sample")]),
    "dtype": ((batch()[0].double(), batch()[1]), {"like": batch(2)}, [("form", "float64")]),
    "dimensions": ((batch()[0][..., None], batch()[1]), {"like": batch(2)}, [("form", "[4, 1]")]),
    "no target": (batch()[0], {"like": batch(2)}, [("form", "missing")]),
    "a nest": (
        {"image": batch()[0], "extra": [batch()[0], {"deep": with_values((6, 1, math.inf))}]},
        {},
        [("not_finite", "in 1 of 8 samples: 6")],
    ),
    "arrays": (
        {"x": with_values((0, 0, math.nan)).numpy(), "labels": np.arange(8) % 4},
        {"classes": 3},
        [("labels", "in 2 of 8 samples: 3, 7"), ("not_finite", "in 1 of 8 samples: 0")],
    ),
    "fewer targets": ((batch()[0], batch()[1][:7]), {}, [("form", "7 rows for 8 samples")]),
    "ragged rows": (
        {"ids": torch.ones(8, 5).cumsum(0), "mask": torch.ones(7, 5)},
        {},
        [("form", "7 rows for 8 samples")],
    ),
    "ragged samples": ([torch.rand(3), torch.rand(5)], {}, [("form", "5 rows for 3 samples")]),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_is_named_by_kind_and_samples_and_nothing_else_is(what: str) -> None:
    given, options, expected = PLANTED[what]
    if what == "ragged samples":
        given = (given, torch.tensor([0, 1, 2]))
    report = validate_inputs(given, **options)
    found = sorted((reason.code, reason.evidence) for reason in report.reasons)
    assert [code for code, _ in found] == [code for code, _ in expected], str(report)
    for (_, evidence), (_, part) in zip(found, expected, strict=True):
        assert part in evidence
    assert not report.ok and report.findings == report.reasons
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["ok"] is False and plain["reasons"][0]["code"] in str(report)


SOUND: dict[str, tuple[Any, dict[str, Any]]] = {
    "a batch": (batch(), LIMITS | {"like": batch(5)}),
    "inputs alone": (batch()[0], {"like": batch(3)[0]}),
    "a flattened target for each token": ((torch.ones(2, 3).cumsum(1), torch.arange(6)), {}),
    "images of another size": (
        (torch.rand(2, 3, 8, 8),) * 2,
        {"like": (torch.rand(2, 3, 6, 6),) * 2},
    ),
    "a table that all samples share": ({"x": torch.rand(8, 4), "w": torch.rand(4)}, {}),
    "one sample": (torch.zeros(1, 4), {}),
    "values at the limits": (torch.tensor([[0.0, 1.0]]), {"low": 0, "high": 1}),
}


@pytest.mark.parametrize("what", SOUND)
def test_a_sound_batch_is_ok(what: str) -> None:
    given, options = SOUND[what]
    report = validate_inputs(given, **options)
    assert report.ok and report.reasons == [], str(report)


def test_a_mistake_names_the_argument() -> None:
    x, y = batch()
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: validate_inputs((x[:0], y[:0])), r"validate_inputs: batch .* shape \[0, 4\]"),
        (lambda: validate_inputs({}), "validate_inputs: batch must be tensors"),
        (lambda: validate_inputs("text"), "validate_inputs: batch must be tensors"),
        (lambda: validate_inputs(x, like=x[:0]), "validate_inputs: like must be tensors"),
        (lambda: validate_inputs(x, low=2, high=1), "low must be at most high, got 2 > 1"),
        (lambda: validate_inputs(x, high=math.nan), "high must be a number or None, got nan"),
        (lambda: validate_inputs(x, low="0"), "low must be a number"),  # type: ignore[arg-type]
        (lambda: validate_inputs((x, y), classes=0), "classes must be a whole number ≥ 1"),
        (lambda: safe_inference(nn.Linear(4, 2), x, retries=-1), "retries must be .* got -1"),
        (lambda: safe_inference(nn.Linear(4, 2), x, retries=101), "retries must be at most 100"),
        (lambda: safe_inference(nn.Linear(4, 2), x, transient=()), "transient must be exception"),
        (
            lambda: safe_inference(nn.Linear(4, 2), x, transient=("timeout",)),  # type: ignore[arg-type]
            "transient must be exception classes, got",
        ),
        (lambda: safe_inference(nn.Linear(4, 2), x[:0]), "batch must be tensors"),
        (lambda: safe_inference(nn.Linear(4, 2), x, like="x"), "like must be tensors"),
    ]
    for call, message in calls:
        with pytest.raises(UsageError, match=message):
            call()


class Failing(nn.Module):
    """Fails `times`, then answers."""

    def __init__(self, times: int, error: Exception) -> None:
        super().__init__()
        self.layer, self.error, self.left, self.calls = nn.Linear(4, 2), error, times, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise self.error
        return self.layer(x)


@pytest.mark.parametrize(
    "error", [TimeoutError("slow"), ConnectionError("gone"), ConnectionResetError("reset")]
)
def test_transient_errors_are_tried_again_and_the_last_one_is_a_problem(error: Exception) -> None:
    x = batch()[0]
    model = Failing(2, error)
    result = safe_inference(model, x, retries=2)
    assert result.ok and (result.retries, model.calls, result.problems) == (2, 3, [])
    assert torch.equal(result.output, model.layer(x))
    model = Failing(3, error)
    result = safe_inference(model, x, retries=2)
    assert not result.ok and result.output is None and model.training
    assert (result.retries, model.calls, result.pieces) == (2, 3, 0)
    assert result.problems == [f"{type(error).__name__}: {error}"]
    with pytest.raises(type(error), match=str(error)):
        safe_inference(Failing(1, error), x)


def test_other_errors_are_raised_and_classes_can_be_chosen() -> None:
    x = batch()[0]
    with pytest.raises(ValueError, match="wrong"):
        safe_inference(Failing(1, ValueError("wrong")), x, retries=5)
    assert safe_inference(Failing(1, ValueError("wrong")), x, retries=1, transient=(ValueError,)).ok
    with pytest.raises(TimeoutError):
        safe_inference(Failing(1, TimeoutError()), x, retries=1, transient=(ValueError,))


def same(noise: float = 0.0) -> nn.Module:
    return Computed(lambda _, x: {"logits": 100 + noise * x, "scale": torch.ones(2)})


def test_an_output_that_is_the_same_for_all_samples_is_a_problem() -> None:
    x = batch()[0]
    result = safe_inference(same(), x)
    assert not result.ok and result.problems == ["output: the same for all 8 samples"]
    assert torch.equal(result.output["logits"], torch.full((8, 4), 100.0))
    assert not safe_inference(same(5e-5), x).ok  # at most 1e-6 of 100
    assert safe_inference(same(1e-2), x).ok
    assert safe_inference(same(), x[:1]).ok


def test_a_batch_of_another_form_than_the_earlier_one_is_a_problem() -> None:
    x, model = batch()[0], nn.Linear(4, 2)
    assert safe_inference(model, x, like=x[:2]).ok
    result = safe_inference(model, x[:, :3], like=x)  # the model cannot take it
    assert not result.ok and result.output is None
    assert result.problems[0].startswith("form: inputs is float32 of shape [3] a sample, expected")
    assert "RuntimeError" in result.problems[1]
    result = safe_inference(nn.Flatten(), x[:, :3], like=x)
    assert not result.ok and torch.equal(result.output, x[:, :3])
