"""Files as people have them are trained on, evaluated and predicted as computed independently."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.core.jobs import evaluate
from runner.datasets import predict
from tests import runs
from tests.core.data.foreign_files import STRANGERS, Known, Stranger, known, probabilities

STEPS = 12


def metric(sizes: Known, outputs: np.ndarray, targets: list[Any]) -> tuple[str, float]:
    """The mean absolute error of quantities, or the accuracy."""
    if sizes["task"] == "regression":
        values = outputs[:, 0] * sizes["target_deviation"] + sizes["target_mean"]
        return "mae", float(np.abs(values - np.array(targets)).mean())
    names = [sizes["class_names"][place] for place in outputs.argmax(1)]
    right = [name == str(target) for name, target in zip(names, targets, strict=True)]
    return "accuracy", float(np.mean(right))


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda stranger: stranger.name)
def test_new_rows_get_what_was_computed_independently(stranger: Stranger, tmp_path: Path) -> None:
    def asked(part: str, *more: str) -> list[str]:
        path = stranger.write(tmp_path, part)
        target = [] if "data=images" in stranger.overrides else [f"data.target={stranger.target}"]
        return [
            *stranger.overrides, f"data.path={path}", *target, "data.workers=0",
            "optimization=none", "training.batch_size=32", *more,
        ]  # fmt: skip

    run = tmp_path / "run"
    steps = f"training.steps={STEPS}", f"checkpoint.every={STEPS}"
    trained = runs.trained(*asked("train", *steps), folder=run)
    fitted, rows = known(run), stranger.rows("new")
    inputs = stranger.inputs(fitted, rows)
    outputs = stranger.outputs(run, inputs, asked("train", *steps))
    assert np.isfinite(outputs).all() and len(outputs) == len(rows)
    for part, known_rows in stranger.parts().items():
        inputs = stranger.inputs(fitted, known_rows)
        given = stranger.outputs(run, inputs, stranger.overrides)
        name, value = metric(fitted["sizes"], given, [row[stranger.target] for row in known_rows])
        assert trained.metrics[f"{part}/{name}"] == pytest.approx(value, rel=1e-4), part

    new = asked("new", *steps, f"checkpoint.resume={run}")
    if stranger.labelled:
        summary = evaluate.main(runs.config(*new, "job=evaluate"), tmp_path / "evaluated")
        reasons = [choice.reason for choice in summary.choices]
        assert any(stranger.said in reason for reason in reasons), reasons
        name, value = metric(fitted["sizes"], outputs, [row[stranger.target] for row in rows])
        assert summary.metrics[f"val/{name}"] == pytest.approx(value, rel=1e-4)
    predict.main(runs.config(*new, "job=predict"), tmp_path / "predicted")
    with (tmp_path / "predicted" / "predictions.csv").open(newline="") as file:
        answers = list(csv.DictReader(file))
    sizes = fitted["sizes"]
    if sizes["task"] == "regression":
        values = outputs[:, 0] * sizes["target_deviation"] + sizes["target_mean"]
        predicted = [float(answer["prediction"]) for answer in answers]
        np.testing.assert_allclose(predicted, values, rtol=1e-4, atol=1e-4 * values.std())
        return
    names = sizes["class_names"]
    shares = probabilities(outputs)
    assert len({*shares.argmax(1)}) > 1, "the model says the same of all: the test shows little"
    assert [answer["prediction"] for answer in answers] == [names[i] for i in shares.argmax(1)]
    for place, name in enumerate(names):
        column = [float(answer[f"probability {name}"]) for answer in answers]
        np.testing.assert_allclose(column, shares[:, place], atol=1e-5)
