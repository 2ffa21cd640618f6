"""Losses of torch that compare number by number, and data in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner import train
from runner.core.errors import ConfigError
from runner.core.interfaces.batch import Sizes
from runner.core.objectives.build import build_objective
from runner.core.objectives.custom import CustomObjective
from runner.core.schemas.models import ObjectiveConfig
from runner.datasets import predict
from tests.runs import opened, trained

TWO = Sizes("classification", 4, classes=2, class_names=("no", "yes"))
SMALL = ("model.width=8", "training.steps=20", "optimization=none", "checkpoint=off")
BCE = "objective._target_=torch.nn.BCEWithLogitsLoss"
MSE = "objective._target_=torch.nn.MSELoss"
HERE = "_target_=tests.core.objectives.test_pairwise"


class Doubles:
    """NumPy's own float64 inputs, and whole numbers or floats as targets."""

    def __init__(self, target: str = "float") -> None:
        self.x = np.random.default_rng(0).normal(size=(60, 5))
        self.y = self.x @ np.arange(5.0)
        self.target = target

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        y = self.y[index]
        targets = {"float": np.array([y]), "count": int(abs(y)), "label": int(y > 0)}
        return self.x[index], targets[self.target]


class Double(nn.Module):
    """A model in float64."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, classes, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


def made(target: str) -> CustomObjective:
    def resolve(name: str, key: str) -> Any:
        owner: Any = F if "functional" in name else nn
        return getattr(owner, name.rpartition(".")[2])

    objective = build_objective(ObjectiveConfig(_target_=target), TWO, resolve)
    assert isinstance(objective, CustomObjective)
    return objective


@pytest.mark.parametrize("shape", [(9, 1), (9,)])
@pytest.mark.parametrize("target", ["BCEWithLogitsLoss", "functional.mse_loss", "HuberLoss"])
def test_labels_get_the_outputs_dtype_and_shape(target: str, shape: tuple[int, ...]) -> None:
    output, labels = torch.randn(shape), torch.arange(9) % 2
    loss = {"BCE": F.binary_cross_entropy_with_logits, "fun": F.mse_loss, "Hub": F.huber_loss}
    expected = loss[target[:3]](output.flatten(), labels.float())
    assert torch.equal(made(f"torch.nn.{target}")(output, labels), expected)
    half = made(f"torch.nn.{target}")(output.bfloat16(), labels)
    assert half.dtype == torch.float32


def test_what_torch_cannot_compare_is_one_line_that_names_the_key() -> None:
    labels = torch.arange(9) % 2
    for name, shape, says in (
        ("MSELoss", (9, 2), r"targets int64 of shape \[9\]: it compares element by element"),
        ("NLLLoss", (9, 1), ""),
        ("CrossEntropyLoss", (8, 2), ""),
    ):
        with pytest.raises(ConfigError, match=f"^objective._target_: torch.nn.{name} .*{says}"):
            made(f"torch.nn.{name}")(torch.zeros(shape), labels)


def test_two_classes_get_one_logit_and_are_predicted_by_it() -> None:
    asked = ("data.sampler=balanced", "objective.metrics=[AUROC]", "training.steps=90")
    with opened("data=cancer", *SMALL, BCE, *asked) as run:
        summary = train(run)
        batch = next(run.validation.batches(0))
        columns = predict._prediction_columns(run.model(batch[0]).detach(), run.sizes)
        expected = run.model(batch[0]).sigmoid().detach().flatten()
    assert summary.metrics["val/AUROC"] > 0.9
    shares = torch.tensor(columns["probability benign"])
    torch.testing.assert_close(shares, expected, rtol=0, atol=1e-6)
    chosen = {choice.key: choice.value for choice in summary.choices}
    assert chosen["objective._target_"] == "float targets"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("data=digits", BCE), "BCEWithLogitsLoss is for two classes, and the data has 10"),
        (("data=cancer", "objective._target_=torch.nn.BCELoss"), "use .*BCEWithLogitsLoss"),
        (("data=digits", MSE), "MSELoss is for regression, but the targets are classes; use "),
        (("data=cancer", BCE, "objective.loss=focal"), "objective.loss: is not used by custom"),
        (("data=cancer", BCE, "objective.class_weights=balanced"), "not used by custom"),
    ],
)
def test_a_loss_that_does_not_fit_the_classes_is_named(
    overrides: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says), opened(*SMALL, *overrides):
        pass


@pytest.mark.parametrize("target", ["float", "count"])
def test_whole_numbers_are_quantities_to_mse_and_float64_is_cast(target: str) -> None:
    data = (f"data.{HERE}.Doubles", f"+data.target={target}", "security.trusted=[tests]")
    summary = trained(*data, MSE, *SMALL, "objective.metrics=[R2Score]")
    assert {"val/loss", "val/R2Score"} <= summary.metrics.keys()
    chosen = [(choice.key, choice.value) for choice in summary.choices]
    assert ("data._target_", "cast to float32") in chosen
    assert (("objective._target_", "float targets") in chosen) == (target == "count")


def test_a_model_in_float64_gets_its_data_in_float64() -> None:
    keys = (f"data.{HERE}.Doubles", f"model.{HERE}.Double")
    more = ("+data.target=label", "security.trusted=[tests]", "training.steps=20")
    with opened(*keys, *more, "optimization=none", "checkpoint=off") as run:
        inputs, target = next(run.train.batches(0))
        assert inputs.dtype == torch.float64 and target.dtype == torch.int64
        assert train(run).status == "done"


def test_a_user_loss_predicts_in_the_unit_of_the_target(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("x,y\n" + "".join(f"{i % 7},{1000 + 3.5 * (i % 7)}\n" for i in range(200)))
    table = ("data=tabular", f"data.path={path}", "data.target=y", *SMALL)
    with opened(*table, MSE) as run:
        assert (run.sizes.target_mean, run.sizes.target_deviation) == (0.0, 1.0)
        assert [c.value for c in run.choices if c.key == "data.target"] == ["not standardised"]
        first = predict._prediction_columns(torch.tensor([[1000.0]]), run.sizes)["prediction"]
    assert first.tolist() == [1000.0]
