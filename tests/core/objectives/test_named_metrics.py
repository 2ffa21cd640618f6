"""objective.metrics: metrics of torchmetrics, compared with NumPy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runner import train
from runner.core.errors import ConfigError
from runner.core.execution.evaluation import evaluate
from runner.core.interfaces.batch import Sizes
from runner.core.interfaces.objective import resolve_monitor
from runner.core.objectives.build import build_objective
from runner.core.objectives.classification import ClassificationObjective
from runner.core.objectives.custom import CustomObjective
from runner.core.objectives.named_metrics import build_named_metrics
from runner.core.schemas.models import ObjectiveConfig
from tests.core.objectives.sums import CUTS, measured
from tests.runs import opened, rows

THREE = Sizes("classification", 4, classes=3, class_names=("cat", "dog", "owl"))
TWO = Sizes("classification", 4, classes=2, class_names=("no", "yes"))
VALUE = Sizes("regression", 4, classes=1, target_mean=50.0, target_deviation=4.0)
SMALL = ("model.width=8", "training.steps=20", "checkpoint=off", "optimization=none")


def named(sizes: Sizes, *names: str) -> Any:
    return build_named_metrics(names, sizes, -100)[0]


def ours(classes: int, logits: Tensor, target: Tensor) -> dict[str, float]:
    """What the objective itself measures, which other tests compare with NumPy."""
    objective = ClassificationObjective(classes)
    return objective.metrics(objective.batch_sums(logits, target))


@pytest.mark.parametrize("cuts", CUTS)
def test_multiclass_metrics_are_means_over_classes_without_the_ignored(cuts: list[int]) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(37, 3), torch.randint(3, (37,))
    target[[3, 20]] = -100
    group = named(THREE, "F1Score", "AUROC", "Accuracy", "Recall")
    values = measured(group, logits, target, cuts)
    own = ours(3, logits, target)
    recall = np.mean([own[f"accuracy/{c}"] for c in range(3)])
    due = {"F1Score": own["f1"], "AUROC": own["auroc"], "Accuracy": own["accuracy"]}
    assert values == pytest.approx({**due, "Recall": recall}, rel=1e-5)


@pytest.mark.parametrize("outputs", ["two logits", "one logit [n, 1]", "one logit [n]"])
def test_binary_metrics_are_of_the_second_class(outputs: str) -> None:
    torch.manual_seed(1)
    logits, target = torch.randn(37, 2), torch.randint(2, (37,))
    score = logits[:, 1] - logits[:, 0]
    given = {"two logits": logits, "one logit [n, 1]": score[:, None], "one logit [n]": score}
    group = named(TWO, "Accuracy", "AUROC", "F1Score")
    values = measured(group, given[outputs], target, CUTS[0])
    own, predicted = ours(2, logits, target), score > 0
    hits = int((predicted & (target == 1)).sum())
    f1 = 2 * hits / int(predicted.sum() + target.sum())
    due = {"Accuracy": own["accuracy"], "AUROC": own["auroc"], "F1Score": f1}
    assert values == pytest.approx(due, rel=1e-5)


def test_regression_metrics_are_in_the_targets_unit() -> None:
    torch.manual_seed(2)
    output, noise = torch.randn(37, 1), torch.randn(37)
    target = (output[:, 0] + 0.3 * noise) * 4 + 50
    group = named(VALUE, "MeanSquaredError", "PearsonCorrCoef", "R2Score")
    values = measured(group, output, target, CUTS[1])
    x, y = output[:, 0].double().numpy() * 4 + 50, target.double().numpy()
    squared = (x - y) ** 2
    assert values["MeanSquaredError"] == pytest.approx(squared.mean())
    assert values["PearsonCorrCoef"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert values["R2Score"] == pytest.approx(1 - squared.sum() / ((y - y.mean()) ** 2).sum())


def test_a_run_records_them_and_may_monitor_one_of_which_less_is_better(tmp_path: Path) -> None:
    asked = ("objective.metrics=[F1Score,AUROC,CalibrationError]", "training.validate_every=10")
    monitor = "training.monitor=val/CalibrationError"
    with opened(*SMALL, *asked, monitor, folder=tmp_path / "run") as run:
        assert not run.higher_is_better
        summary = train(run)
        again = evaluate(run).metrics
    metrics = summary.metrics
    assert metrics["val/F1Score"] == pytest.approx(metrics["val/f1"])  # of ours
    assert metrics["val/AUROC"] == pytest.approx(metrics["val/auroc"], abs=1e-6)
    assert again == {name: metrics[name] for name in again}
    logged = rows(tmp_path / "run", "val")
    assert len(logged) == 2 and logged[-1]["F1Score"] == metrics["val/F1Score"]
    best = min(row["CalibrationError"] for row in logged)
    assert summary.best == pytest.approx(best)
    chosen = {(choice.key, choice.value) for choice in summary.choices}
    assert {("objective.metrics", f"{name}: macro") for name in ("F1Score", "AUROC")} <= chosen


@pytest.mark.parametrize(
    ("sizes", "name", "says"),
    [
        (THREE, "f1score", "torchmetrics has no 'f1score' for classification; did you mean F1Sc"),
        (THREE, "system", "torchmetrics has no 'system'.*available: AUROC, Accuracy"),
        (VALUE, "F1Score", "no 'F1Score' for regression; .*R2Score"),
        (THREE, "ConfusionMatrix", "ConfusionMatrix is not a single number"),
        (THREE, "ROC", "ROC is not a single number"),
        (THREE, "FBetaScore", "FBetaScore does not fit: .*beta"),
        (Sizes("language_modelling", vocab=9), "F1Score", "need classification or regression"),
    ],
)
def test_names_that_make_no_metric_are_one_line(sizes: Sizes, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^objective.metrics: .*{says}"):
        named(sizes, name)


def test_outputs_that_do_not_fit_the_data_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"returns \[5, 4\] for labels of 5 .*each of 3 classes"):
        named(THREE, "F1Score").batch_sums(torch.zeros(5, 4), torch.zeros(5))
    with pytest.raises(ConfigError, match=r"returns \[5, 2\] for targets \[5\]"):
        named(VALUE, "R2Score").batch_sums(torch.zeros(5, 2), torch.zeros(5))


def test_an_objective_that_knows_its_metrics_refuses_to_monitor_another() -> None:
    own = build_objective(ObjectiveConfig(), VALUE, max)
    for objective in (CustomObjective(torch.nn.MSELoss(), "loss"), own):
        objective.named = (named(VALUE, "R2Score", "MeanAbsoluteError"),)
        assert resolve_monitor(objective, "val/R2Score") == "val/R2Score"
        assert objective.rises("val/R2Score") and not objective.rises("val/MeanAbsoluteError")
        with pytest.raises(ConfigError, match="did you mean training.monitor=val/R2Score"):
            resolve_monitor(objective, "val/R2Scor")


def test_without_the_extra_one_line_names_key_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(ConfigError, match=r"^objective.metrics: needs .*pip install '.*\[metr"):
        named(THREE, "F1Score")
