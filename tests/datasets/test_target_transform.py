"""data.target_transform: predictions and errors are in the target's unit, whatever is predicted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from runner import build, compose, evaluate, load, train
from runner.core.config.run_config import WrittenConfig, config_hash
from runner.core.errors import ConfigError, DataError
from runner.core.execution.evaluation import inference
from runner.core.jobs.evaluate import main as evaluate_job
from tests import runs
from tests.core.objectives.test_user_metrics import SMALL
from tests.datasets.tables import write_columns

RNG = np.random.default_rng(0)
X = RNG.normal(size=200)
PRICES = np.exp(6 + 1.5 * X + 0.1 * RNG.normal(size=200))
MAE = "objective._target_=torch.nn.L1Loss"


def table(folder: Path, name: str = "prices.csv", **columns: object) -> list[str]:
    """Overrides for a table of prices."""
    path = write_columns(folder / name, {"x": [*X], "y": [*PRICES], **columns})  # type: ignore[dict-item]
    typed = ["data=tabular", f"data.path={path}", "data.target=y", "model=mlp", *runs.QUICK]
    own = "checkpoint=default", "training.steps=60", "training.validate_every=60"
    return [*typed, *SMALL, *own, "optimizer.lr=0.01"]


@pytest.mark.parametrize("loss", ["", MAE], ids=["ours", "torch.nn"])
@pytest.mark.parametrize("transform", ["none", "standardise", "log"])
def test_predictions_and_errors_are_in_the_targets_unit(
    tmp_path: Path, transform: str, loss: str
) -> None:
    typed = [*table(tmp_path), f"data.target_transform={transform}"]
    metrics = "objective.metrics=[MeanAbsoluteError]"
    config = compose([*typed, metrics, *filter(None, [loss])])
    with build(config, folder=tmp_path / "run") as run:
        summary = train(run)
        source = run.train.fetch.source
        rows = PRICES[source.train]
        values = np.log(rows) if transform == "log" else rows
        mean, deviation = (0.0, 1.0) if transform == "none" else (values.mean(), values.std())
        with inference(run) as forward:
            batches = [(forward(x)[:, 0], y) for x, y in run.validation.batches(0)]
            raw, y = (torch.cat(part).double().numpy() for part in zip(*batches, strict=True))
        again = evaluate(run).metrics
    unit = raw * deviation + mean
    due = np.exp(unit) if transform == "log" else unit
    with load(tmp_path / "run") as model:
        indices = np.asarray(run.validation.fetch.order.indices)
        columns = {"x": list(X[indices])}
        predicted = model.predict(columns)["prediction"]
    np.testing.assert_allclose(predicted, due, rtol=1e-5, atol=1e-6 * deviation)
    assert predicted.std() > 0
    mae = np.abs(due - PRICES[indices]).mean()
    assert summary.metrics["val/MeanAbsoluteError"] == pytest.approx(mae, rel=1e-5)
    goal = np.log(y) if transform == "log" else y
    error = raw - (goal - mean) / deviation
    if loss:
        assert summary.metrics["val/loss"] == pytest.approx(np.abs(error).mean(), rel=1e-5)
    else:
        assert summary.metrics["val/mae"] == pytest.approx(mae, rel=1e-5)
        assert summary.metrics["val/loss"] == pytest.approx((error**2).mean(), rel=1e-4)
    assert again["val/loss"] == pytest.approx(summary.metrics["val/loss"])
    evaluated = compose([*typed, metrics, *filter(None, [loss]), "job=evaluate",
                         f"checkpoint.resume={tmp_path / 'run'}"])  # fmt: skip
    (tmp_path / "evaluated").mkdir()
    same = evaluate_job(evaluated, tmp_path / "evaluated").metrics
    assert same["val/MeanAbsoluteError"] == pytest.approx(mae, rel=1e-5)


def test_a_log_beats_none_on_targets_of_many_magnitudes(tmp_path: Path) -> None:
    errors = {}
    for transform in ("none", "log"):
        with build(compose([*table(tmp_path), f"data.target_transform={transform}"])) as run:
            errors[transform] = train(run).metrics["val/mae"]
    assert errors["log"] < errors["none"] / 2


def test_an_exported_pipeline_predicts_in_the_targets_unit(tmp_path: Path) -> None:
    typed = [*table(tmp_path), "data.target_transform=log"]
    with build(compose(typed), folder=tmp_path / "run") as run:
        train(run)
    job = ["job=evaluate", "evaluate.export=export", f"checkpoint.resume={tmp_path / 'run'}"]
    (tmp_path / "out").mkdir()
    evaluate_job(compose([*typed, *job]), tmp_path / "out")
    program = torch.export.load(next((tmp_path / "out").rglob("pipeline.pt2"))).module()
    raw = torch.tensor([[0.5], [-1.0]], dtype=torch.float64)
    exported = program(raw, torch.zeros(2, 0, dtype=torch.int64))[:, 0].detach().numpy()
    with load(tmp_path / "run") as model:
        predicted = model.predict({"x": [0.5, -1.0]})["prediction"]
    np.testing.assert_allclose(exported, predicted, rtol=1e-4)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    typed = [
        *table(tmp_path),
        "data.target_transform=log",
        "checkpoint.every=10",
        "schedule=constant",
    ]
    with build(compose(typed)) as run:
        train(run)
        whole = [p.detach().clone() for p in run.model.parameters()]
    with build(compose([*typed, "training.steps=30"]), folder=tmp_path / "run") as run:
        train(run)
    resumed = compose([*typed, f"checkpoint.resume={tmp_path / 'run'}"])
    with build(resumed, folder=tmp_path / "on") as run:
        train(run)
        assert all(map(torch.equal, whole, run.model.parameters()))


def test_a_config_without_the_key_has_the_hash_that_it_had(tmp_path: Path) -> None:
    typed = table(tmp_path)
    written = WrittenConfig(compose(typed))
    null = written.hash()
    del written._tree["data"]["target_transform"]  # as earlier versions wrote it
    assert written.hash() == null
    assert config_hash(compose([*typed, "data.target_transform=none"])) != null


@pytest.mark.parametrize("kind", ["tabular", "arrays"])
def test_a_target_without_a_logarithm_is_an_error_with_its_line(tmp_path: Path, kind: str) -> None:
    prices = [*PRICES]
    prices[41] = 0.0
    typed = table(tmp_path, y=prices)
    where = "line 43, column 'y'"
    if kind == "arrays":
        np.savez(tmp_path / "a.npz", x=X.astype(np.float32)[:, None], y=np.array(prices))
        typed = ["data=arrays", f"data.path={tmp_path / 'a.npz'}", "model=mlp", *runs.QUICK]
        where = "sample 41"
    asked = compose([*typed, "data.target_transform=log"])
    says = f"{where}: the target 0 has no logarithm; .*target_transform=standardise"
    with pytest.raises(DataError, match=says):
        build(asked)


def test_arrays_are_predicted_in_their_unit(tmp_path: Path) -> None:
    y = np.stack([PRICES, PRICES * 2], 1)
    np.savez(tmp_path / "a.npz", x=X.astype(np.float32)[:, None], y=y)
    typed = ["data=arrays", f"data.path={tmp_path / 'a.npz'}", "model=mlp", *runs.QUICK]
    steps = ["training.steps=60", "training.validate_every=60", "optimizer.lr=0.01"]
    asked = [*typed, "data.target_transform=log", *steps]
    with build(compose(asked), folder=tmp_path / "run") as run:
        metrics = train(run).metrics
        indices = np.asarray(run.validation.fetch.order.indices)
    with load(tmp_path / "run") as model:
        columns = model.predict(torch.from_numpy(X.astype(np.float32)[indices, None]))
    predicted = np.stack([columns["prediction 0"], columns["prediction 1"]], 1)
    assert metrics["val/mae"] == pytest.approx(np.abs(predicted - y[indices]).mean(), rel=1e-4)


def test_classes_and_losses_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    words = table(tmp_path, y=["no", "yes"] * 100)
    with pytest.raises(
        ConfigError, match=r"^data.target_transform: log is for numbers, but .*clas"
    ):
        build(compose([*words, "data.target_transform=log"]))
    poisson = "objective._target_=torch.nn.PoissonNLLLoss"
    with pytest.raises(ConfigError, match=r"^data.target_transform: .*PoissonNLLLoss, which appl"):
        build(compose([*table(tmp_path), "data.target_transform=log", poisson]))


def test_small_predictions_are_not_rounded_to_zero(tmp_path: Path) -> None:
    typed = [*table(tmp_path, y=[*(PRICES * 1e-12)]), "data.target_transform=log"]
    with build(compose(typed), folder=tmp_path / "run") as run:
        train(run)
    with load(tmp_path / "run") as model:
        low, high = model.predict({"x": [-0.5, 0.5]})["prediction"]
    assert 1e-11 < low < high < 1e-8
