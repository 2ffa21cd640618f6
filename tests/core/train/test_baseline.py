"""The metrics of constant predictions, and a model that does not beat them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from runner.core.build.setup import Components
from runner.core.data.dataset import TensorsDataset
from runner.core.data.user_dataset import UserDataset
from runner.core.interfaces.batch import Sizes
from runner.core.jobs.run_report import render_report
from runner.core.record.summary import Summary, unbeaten
from runner.core.schemas.data import DataConfig
from runner.core.train.baseline import LABEL_LOSS
from tests import runs

OFF = ("checkpoint=off", "optimization=none", "training.batch_size=16", "training.steps=40")
TRAINED, HELD_OUT = np.arange(48), np.arange(48, 80)


class Pairs:
    """A user's data set, which does not state its targets."""

    classes = 3

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.x[index], int(self.y[index])


def summary_of(data: Any, model: nn.Module, *more: str, folder: Path | None = None) -> Summary:
    given = Components(model=model, data=data)
    return runs.trained(*OFF, *more, folder=folder, given=given)


def classes(user: bool) -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 4, generator=generator)
    y = (torch.rand(80, generator=generator) * 5).long().clamp(max=2)  # two fifths are of class 2
    sizes = Sizes("classification", in_features=4, classes=3)
    if not user:
        return y, TensorsDataset(x, y, sizes, (TRAINED, HELD_OUT))
    data = UserDataset(Pairs(x, y), "Pairs", DataConfig())
    data.train, data.validation = TRAINED, HELD_OUT
    return y, data


@pytest.mark.parametrize("user", [False, True])
def test_the_baseline_of_a_classifier_is_the_most_frequent_class_of_the_training_split(
    user: bool, caplog: pytest.LogCaptureFixture
) -> None:
    y, data = classes(user)
    majority = np.bincount(y.numpy()[TRAINED]).argmax()
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    model.bias.data = torch.tensor([90.0, 0.0, 0.0])  # always class 0
    with caplog.at_level(logging.WARNING, "runner"):
        summary = summary_of(data, model, "training.steps=1")
    expected = float((y.numpy()[HELD_OUT] == majority).mean())
    assert summary.baseline == {"val/accuracy": pytest.approx(expected)}
    assert summary.metrics["val/accuracy"] < expected
    assert "does not beat the most frequent class" in caplog.text
    assert "not beaten" in render_report(summary, None)


@pytest.mark.parametrize("targets", [1, 2])
def test_the_baselines_of_a_regression_are_mean_and_median_of_the_training_split(
    targets: int, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    y = x[:, :targets].exp() * 3 + 1
    y = y[:, 0] if targets == 1 else y
    sizes = Sizes("regression", in_features=4, classes=targets, target_mean=4, target_deviation=3)
    data = TensorsDataset(x, y, sizes, (TRAINED, HELD_OUT))
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, targets))
    with caplog.at_level(logging.WARNING, "runner"):
        summary = summary_of(data, model, "optimizer.lr=0.02", "training.steps=200")
    own, others = (y.double().numpy()[rows].reshape(len(rows), -1) for rows in (TRAINED, HELD_OUT))
    errors = others - own.mean(0)
    mse = float((errors**2).mean())
    r2 = 1 - (errors**2).sum(0) / ((others - others.mean(0)) ** 2).sum(0)
    mae = float(np.abs(others - np.median(own, axis=0)).mean())
    expected = {"val/mse": mse, "val/rmse": mse**0.5, "val/mae": mae, "val/r2": float(r2.mean())}
    assert summary.baseline == {name: pytest.approx(x, rel=1e-6) for name, x in expected.items()}
    assert all(name in summary.metrics for name in expected)
    assert summary.metrics["val/rmse"] < mse**0.5 and "does not beat" not in caplog.text
    text = render_report(summary, None)
    assert "by the mean (mae: median)" in text and "not beaten" not in text


@pytest.mark.parametrize(("typed", "is_said"), [("objective=auto", True), (LABEL_LOSS, False)])
def test_labels_of_0_and_1_that_are_trained_as_numbers_are_said_to_be(
    typed: str, is_said: bool
) -> None:
    x = torch.randn(80, 4)
    data = torch.utils.data.TensorDataset(x, (x[:, :3] > 0).float())
    choices = summary_of(data, nn.Linear(4, 3), typed, "training.steps=2").choices
    said = [choice.reason for choice in choices if choice.is_notice]
    assert said == ["labels 0 and 1 need " + LABEL_LOSS] * is_said


def test_a_metric_equal_to_its_baseline_does_not_beat_it_and_the_best_of_the_monitored_counts() -> (
    None
):
    baseline = {"val/accuracy": 0.7, "val/rmse": 2.0}
    assert unbeaten(baseline, {"val/accuracy": 0.7, "val/rmse": 1.9}, "val/loss", None) == [
        "val/accuracy"
    ]
    metrics = {"val/accuracy": 0.6, "val/rmse": 2.1}
    assert unbeaten(baseline, metrics, "val/accuracy", 0.8) == ["val/rmse"]
    assert unbeaten(baseline, {"val/accuracy": float("nan")}, "", None) == [*baseline]


def test_a_data_set_that_is_slow_to_read_has_no_baseline() -> None:
    _, data = classes(user=True)
    data.sample_seconds = 1.0
    assert summary_of(data, nn.Linear(4, 3)).baseline == {}
