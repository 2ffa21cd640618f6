"""data.target_transform: predictions and errors are in the target's unit, whatever is predicted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from runner import compose, evaluate, load, train
from runner.core.config.run_config import WrittenConfig, config_hash
from runner.core.data import target_scale
from runner.core.errors import ConfigError, DataError
from runner.core.execution.evaluation import inference
from runner.core.interfaces.batch import Sizes
from runner.core.jobs.evaluate import main as evaluate_job
from runner.core.objectives.regression import RegressionObjective
from runner.core.schemas.data import TargetTransform
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
    typed = ["data=tabular", f"data.path={path}", "data.target=y", "model=mlp"]
    own = "checkpoint=default", "training.steps=60", "training.validate_every=60"
    return [*typed, *SMALL, *own, "optimizer.lr=0.01"]


@pytest.mark.parametrize("loss", ["", MAE], ids=["ours", "torch.nn"])
@pytest.mark.parametrize("transform", ["none", "standardise", "log"])
def test_predictions_and_errors_have_the_targets_unit(
    tmp_path: Path, transform: str, loss: str
) -> None:
    typed = [*table(tmp_path), f"data.target_transform={transform}", *filter(None, [loss])]
    typed.append("objective.metrics=[MeanAbsoluteError]")
    with runs.opened(*typed, folder=tmp_path / "run") as run:
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
    asked = "job=evaluate", f"checkpoint.resume={tmp_path / 'run'}"
    same = evaluate_job(runs.config(*typed, *asked), tmp_path / "evaluated").metrics
    assert same["val/MeanAbsoluteError"] == pytest.approx(mae, rel=1e-5)


def test_an_exported_pipeline_predicts_in_the_targets_unit(tmp_path: Path) -> None:
    typed = [*table(tmp_path), "data.target_transform=log"]
    runs.trained(*typed, folder=tmp_path / "run")
    job = ["job=evaluate", "evaluate.export=export", f"checkpoint.resume={tmp_path / 'run'}"]
    evaluate_job(runs.config(*typed, *job), tmp_path / "out")
    program = torch.export.load(next((tmp_path / "out").rglob("pipeline.pt2"))).module()
    raw = torch.tensor([[0.5], [-1.0]], dtype=torch.float64)
    exported = program(raw, torch.zeros(2, 0, dtype=torch.int64))[:, 0].detach().numpy()
    with load(tmp_path / "run") as model:
        predicted = model.predict({"x": [0.5, -1.0]})["prediction"]
    np.testing.assert_allclose(exported, predicted, rtol=1e-4)


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
        typed = ["data=arrays", f"data.path={tmp_path / 'a.npz'}", "model=mlp"]
        where = "sample 41"
    says = f"{where}: the target 0 has no logarithm; .*target_transform=standardise"
    with pytest.raises(DataError, match=says):
        runs.opened(*typed, "data.target_transform=log").__enter__()


def unlike_targets(folder: Path, *more: str) -> tuple[np.ndarray, list[str]]:
    """Targets of about 3e4, of 1 ± 0.001 and a constant; overrides for them."""
    x = X.astype(np.float32)[:, None]
    y = np.stack([1e4 * X + 3e4, 1 + 1e-3 * X, np.full(200, 7.0)], 1)
    np.savez(folder / "unlike.npz", x=x, y=y)
    typed = ["data=arrays", f"data.path={folder / 'unlike.npz'}", "model=mlp"]
    steps = "training.steps=60", "training.validate_every=60", "checkpoint=default"
    return y, [*typed, *steps, "optimizer.lr=0.01", *more]


def r2(predicted: np.ndarray, y: np.ndarray) -> np.ndarray:
    squares: np.ndarray = ((predicted - y) ** 2).sum(0) / ((y - y.mean(0)) ** 2).sum(0)
    return 1 - squares


def predictions(run: Path) -> np.ndarray:
    """The predictions of all samples of `unlike_targets`, [200, 3]."""
    with load(run) as model:
        columns = model.predict(torch.from_numpy(X.astype(np.float32)[:, None]))
    return np.stack([columns[f"prediction {i}"] for i in range(3)], 1)


@pytest.mark.parametrize("loss", ["", MAE], ids=["ours", "torch.nn"])
def test_each_of_several_targets_has_its_own_scale(tmp_path: Path, loss: str) -> None:
    own = [loss, "data.target_transform=standardise"] if loss else ["objective.loss=mae"]
    y, typed = unlike_targets(tmp_path, *own)
    with runs.opened(*typed, folder=tmp_path / "run") as run:
        metrics = train(run).metrics
        rows, indices = run.train.fetch.source.train, run.validation.fetch.order.indices
        with inference(run) as forward:
            outputs = forward(torch.from_numpy(X.astype(np.float32)[:, None])).double().numpy()
    [file, *_] = (tmp_path / "run").rglob("preprocessing.json")
    sizes = json.loads(file.read_text())["sizes"]
    np.testing.assert_allclose(sizes["target_mean"], y[rows].mean(0), rtol=1e-5)
    np.testing.assert_allclose(sizes["target_deviation"], [*y[rows].std(0)[:2], 1], rtol=1e-5)
    due = outputs * sizes["target_deviation"] + sizes["target_mean"]
    predicted = predictions(tmp_path / "run")
    np.testing.assert_allclose((predicted - due) / sizes["target_deviation"], 0, atol=1e-5)
    assert (r2(predicted[:, :2], y[:, :2]) > 0.9).all()
    errors = np.abs(due - y)[indices]
    if not loss:
        assert metrics["val/mae"] == pytest.approx(errors.mean(), rel=1e-5)
    loss_due = (errors / sizes["target_deviation"]).mean()
    assert metrics["val/loss"] == pytest.approx(loss_due, rel=1e-4)
    job = "job=evaluate", "evaluate.export=export", f"checkpoint.resume={tmp_path / 'run'}"
    again = evaluate_job(runs.config(*typed, *job), tmp_path / "out").metrics
    assert again["val/loss"] == pytest.approx(loss_due, rel=1e-4)
    exported = tmp_path / "out" / "exports"
    assert json.loads((exported / "preprocessing.json").read_text())["sizes"] == sizes


def test_an_earlier_run_keeps_its_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    y, typed = unlike_targets(tmp_path, "schedule=constant")
    whole, half = tmp_path / "whole", tmp_path / "half"
    with monkeypatch.context() as earlier:
        earlier.setattr(target_scale, "target_columns", lambda target: [target])
        for folder, steps in ((whole, 60), (half, 30)):
            runs.trained(*typed, f"training.steps={steps}", folder=folder)
        predicted = predictions(half)
    [file, *_] = half.rglob("preprocessing.json")
    assert isinstance(json.loads(file.read_text())["sizes"]["target_mean"], float)
    np.testing.assert_array_equal(predictions(half), predicted)
    with runs.opened(*typed, f"checkpoint.resume={half}", folder=tmp_path / "on") as run:
        train(run)
        assert run.sizes.target_mean == pytest.approx(y[run.train.fetch.source.train].mean())
    np.testing.assert_array_equal(predictions(tmp_path / "on"), predictions(whole))


def test_one_target_and_images_have_one_scale() -> None:
    for shape in ((200,), (200, 1), (200, 4, 4)):
        target = np.random.default_rng(1).normal(5, 2, size=shape).astype(np.float32)
        sizes, _ = target_scale.fit_target_scale(target, np.arange(100))
        mean, deviation = float(target[:100].mean()), float(target[:100].std())
        assert sizes == {"target_mean": mean, "target_deviation": deviation, "log_target": False}


@pytest.mark.parametrize("log", [False, True], ids=["plain", "log"])
def test_float32_targets_of_a_large_mean_keep_their_scale(log: bool) -> None:
    offsets = np.array([1e6, 1e-3, 1.0])
    y = (offsets + RNG.normal(size=(500, 3)) * offsets * [1e-5, 1e-1, 1e-1]).astype(np.float32)
    transform = TargetTransform.log if log else TargetTransform.standardise
    fitted, _ = target_scale.fit_target_scale(y, np.arange(500), transform)
    sizes, target = Sizes("regression", **fitted), torch.from_numpy(y).double()
    values = np.log(y.astype(np.float64)) if log else y.astype(np.float64)
    np.testing.assert_allclose(sizes.target_mean, values.mean(0), rtol=1e-6)
    np.testing.assert_allclose(sizes.target_deviation, values.std(0), rtol=0.05)
    scaled = target_scale.in_model_unit(sizes, target)
    due = (values - sizes.target_mean) / np.array(sizes.target_deviation)
    np.testing.assert_allclose(scaled.numpy(), due, rtol=1e-9)
    for shape in ((500, 3), (500, 3, 1), (1500,)):  # as models return them
        unit = target_scale.in_target_unit(sizes, scaled.reshape(shape))
        torch.testing.assert_close(unit, target.reshape(shape))
    with pytest.raises(ConfigError, match=r"^model: returns \[500, 2\], but the data has 3 targ"):
        target_scale.in_target_unit(sizes, scaled[:, :2])


def test_a_target_is_float64_if_float32_rounds_one_of_its_columns() -> None:
    y = np.stack([1e9 + RNG.normal(size=100), 1e12 * RNG.normal(size=100)], 1)
    deviations = target_scale.target_deviations(target_scale.target_columns(y))
    assert target_scale.target_array(y, deviations).dtype == np.float64
    assert target_scale.target_array(y[:, 1:], deviations[1:]).dtype == np.float32


def test_several_scales_take_part_in_a_graph() -> None:
    objective = RegressionObjective((3e4, 0.1), (1e4, 1e-3), "huber")
    output, target = torch.randn(8, 2), torch.tensor([3e4, 0.1]) + torch.rand(8, 2)
    graph = torch.compile(lambda *batch: objective(*batch), fullgraph=True, backend="eager")
    torch.testing.assert_close(graph(output, target), objective(output, target))


def test_columns_of_labels_are_said_and_learned_by_a_loss_for_them(tmp_path: Path) -> None:
    y = np.stack([X > 0, X > 1], 1).astype(np.int64)
    np.savez(tmp_path / "labels.npz", x=X.astype(np.float32)[:, None], y=y)
    path = f"data.path={tmp_path / 'labels.npz'}"
    typed = ["data=arrays", path, "model=mlp", "training.steps=60"]
    advice = "objective._target_=torch.nn.BCEWithLogitsLoss"
    with runs.opened(*typed) as run:
        [notice] = [choice for choice in run.choices if choice.is_notice]
        assert (notice.key, notice.value) == ("data.target", "standardised")
        assert notice.reason.startswith("integers taken as numbers; ")
        assert notice.reason.endswith(advice)
    with runs.opened(*typed) as run:
        train(run)
        assert len([choice for choice in run.choices if advice in choice.reason]) == 1
    for said in (advice, "data.task=regression"):
        with runs.opened(*typed, said) as run:
            assert not [choice for choice in run.choices if choice.is_notice]
    own = advice, "optimizer.lr=0.01", "checkpoint=default"
    runs.trained(*typed, *own, folder=tmp_path / "run")
    with load(tmp_path / "run") as model:
        columns = model.predict(torch.from_numpy(X.astype(np.float32)[:, None]))
    probabilities = np.stack([columns["prediction 0"], columns["prediction 1"]], 1)
    assert ((probabilities > 0.5) == y).mean() > 0.9


def test_classes_and_losses_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    words = table(tmp_path, "words.csv", y=["no", "yes"] * 100)
    poisson = [*table(tmp_path), "objective._target_=torch.nn.PoissonNLLLoss"]
    for typed, says in ((words, "log is for numbers, but .*clas"), (poisson, ".*PoissonNLLLoss")):
        with pytest.raises(ConfigError, match=f"^data.target_transform: {says}"):
            runs.opened(*typed, "data.target_transform=log").__enter__()


def test_small_predictions_are_not_rounded_to_zero(tmp_path: Path) -> None:
    typed = [*table(tmp_path, y=[*(PRICES * 1e-12)]), "data.target_transform=log"]
    runs.trained(*typed, folder=tmp_path / "run")
    with load(tmp_path / "run") as model:
        low, high = model.predict({"x": [-0.5, 0.5]})["prediction"]
    assert 1e-11 < low < high < 1e-8
