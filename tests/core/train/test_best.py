"""Which checkpoint is the best: the direction of a metric, and what a best value is of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner import compose, train
from runner.core.build.setup import Components
from runner.core.errors import ConfigError
from runner.core.interfaces.objective import Objective, rises_by_name
from runner.core.interfaces.run import BestCriterion
from runner.core.objectives.classification import ClassificationObjective
from runner.core.objectives.from_model import ModelLossObjective
from runner.core.record.summary import Summary
from runner.scale.sweep.search_space import resolve_metric, trial_mode
from tests import runs
from tests.runs import opened, rows

SMALL = ("data=cancer", "training.epochs=4", "schedule=constant", "optimization=none")


class WithBrier(ClassificationObjective):
    """Classification with the Brier score, of which lower values are better."""

    def batch_sums(self, output: Any, target: Any) -> dict[str, Any]:
        sums = super().batch_sums(output, target)
        hot = torch.nn.functional.one_hot(target, 2)
        return {**sums, "brier": ((output.softmax(1) - hot) ** 2).sum()}

    def metrics(self, totals: dict[str, Any]) -> dict[str, float]:
        own = {name: x for name, x in totals.items() if name != "brier"}
        return {**super().metrics(own), "brier": float(totals["brier"] / totals["count"])}


class Named(WithBrier):
    """Monitors the Brier score, with the direction of its base for another metric."""

    monitor = "val/brier"


class Declared(Named):
    """Says that lower values are better."""

    higher_is_better = False


class Derived(Declared):
    """Has metric and direction from the same class."""


class InObject(Named):
    """Sets both in its constructor."""

    def __init__(self) -> None:
        super().__init__(2)
        self.monitor, self.higher_is_better = "val/brier", False


@pytest.mark.parametrize(
    ("objective", "monitor"), [(WithBrier(2), "val/brier"), (Named(2), None), (Named(2), "val/ece")]
)
def test_an_undeclared_direction_is_an_error_before_the_first_step(
    objective: Objective, monitor: str | None, tmp_path: Path
) -> None:
    overrides = [*SMALL, *([f"training.monitor={monitor}"] if monitor else [])]
    problem = f"training.monitor_mode: cannot be inferred for {monitor or 'val/brier'}; use min"
    with pytest.raises(ConfigError, match=problem):
        runs.trained(*overrides, folder=tmp_path, given=Components(objective=objective))
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("objective", [Declared(2), Derived(2), InObject()])
def test_the_class_of_an_objective_declares_the_direction_of_its_monitor(
    objective: Objective,
) -> None:
    assert objective.rises("val/brier") is False
    assert objective.rises("val/accuracy") is True
    assert Named(2).rises("val/brier") is None


def test_our_metrics_have_a_direction_by_their_whole_name() -> None:
    lower = ("loss", "mse", "mae", "rmse", "perplexity", "bits_per_byte", "bits_per_token")
    higher = ("accuracy", "top5", "top10", "f1", "auroc", "r2")
    assert {rises_by_name(f"val/{name}") for name in lower} == {False}
    assert {rises_by_name(f"val/{name}") for name in higher} == {True}
    for other in ("val/brier", "val/mse/skill", "val/top5_error", "val/team/loss", "val/f1_error"):
        assert rises_by_name(other) is None, other
    classes = ClassificationObjective(2, ("loss", "gain"))
    assert classes.rises("val/accuracy/loss") is True  # of a class that is called so
    assert ModelLossObjective("regression").rises("val/loss/accuracy") is False  # a loss's part


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["training.monitor=val/brier", "training.monitor_mode=min"], ("val/brier", False, [])),
        (["search.metric=val/brier", "training.monitor_mode=max"], ("val/brier", True, [])),
        (["training.monitor=val/brier"], "search.direction: cannot be inferred for val/brier"),
        (
            ["search.metric=val/brier", "search.direction=minimize"],
            ("val/brier", False, ["training.monitor_mode=min"]),
        ),
        (  # the mode is typed for another metric, which the trials do not monitor
            ["search.metric=val/loss", "training.monitor=val/a", "training.monitor_mode=max"],
            ("val/loss", False, ["training.monitor_mode=min"]),
        ),
        (["search.metric=val/loss", "search.direction=minimize"], ("val/loss", False, [])),
        (
            ["search.metric=val/loss", "search.direction=maximize"],
            "search.direction: maximize contradicts val/loss, of which lower is better",
        ),
        (
            ["training.monitor_mode=min", "training.monitor=val/x", "search.direction=maximize"],
            "search.direction: maximize contradicts val/x.*training.monitor_mode=max",
        ),
    ],
)
def test_a_search_has_the_direction_of_its_trials(
    overrides: list[str], expected: tuple[str, bool, list[str]] | str
) -> None:
    search = compose(overrides)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            resolve_metric(search)
    else:
        metric, maximize = resolve_metric(search)
        assert (metric, maximize, trial_mode(search, metric, maximize)) == expected


# what a best value is of


@pytest.fixture
def trained_run(tmp_path: Path) -> Path:
    assert runs.trained(*SMALL, folder=tmp_path / "run").best is not None
    return tmp_path / "run"


def resumed(folder: Path, *typed: str) -> tuple[Summary, float | None]:
    """Resume the run for two more epochs; return the summary, and the best that it began with."""
    overrides = (*SMALL, "training.epochs=6", f"checkpoint.resume={folder}", *typed)
    with opened(*overrides, folder=folder) as run:
        best = run.progress.best
        return train(run), best


def test_a_resumed_run_keeps_its_best_and_one_with_more_training_batches_too(
    trained_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = Summary.read(trained_run)
    summary, best = resumed(trained_run, "training.batch_size=16", "training.patience=50")
    assert best == before.best and summary.best is not None and summary.best >= best
    assert "starts over" not in caplog.text and "validation set changed" not in caplog.text


@pytest.mark.parametrize(
    ("typed", "difference"),
    [
        (["training.monitor=val/loss"], "of val/accuracy, not val/loss"),
        (["training.monitor_mode=min"], "the max of val/accuracy, not the min"),
        (["data.split_seed=1"], "of other validation samples"),
        (["data.validation_samples=20"], "of other validation samples"),
    ],
)
def test_the_best_starts_over_with_another_metric_direction_or_validation_set(
    typed: list[str], difference: str, trained_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = Summary.read(trained_run)
    summary, best = resumed(trained_run, *typed)
    assert best is None and summary.best_step > before.steps
    assert f"is {difference}: it starts over" in caplog.text
    name = summary.monitor.removeprefix("val/")
    values = {row["step"]: row[name] for row in rows(trained_run, "val")}
    best_of = min if "training.monitor_mode=min" in typed or name == "loss" else max
    later = [value for step, value in values.items() if step > before.steps]
    assert summary.best == values[summary.best_step] == best_of(later)
    best_checkpoint = (trained_run / "checkpoints" / "best").resolve().name
    assert best_checkpoint == f"step_{summary.best_step:08d}"


def test_a_loss_of_another_kind_is_not_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = np.random.default_rng(0).normal(size=(80, 3)).astype("float32")
    np.savez(tmp_path / "d.npz", x=x, y=x.sum(1) * 9)
    overrides = ["data=arrays", f"data.path={tmp_path}/d.npz", "training.epochs=2"]
    runs.trained(*overrides, folder=tmp_path / "run")
    more = [*overrides, "training.epochs=3", "objective.loss=mae", "checkpoint.resume=auto"]
    with opened(*more, folder=tmp_path / "run") as run:
        assert run.progress.best is None
    assert "of another loss (objective.loss=None)" in caplog.text


def test_a_checkpoint_of_an_earlier_version_has_the_metric_of_its_settings() -> None:
    now = BestCriterion("val/r2", "max", "abc")
    older: dict[str, Any] = {"settings": {"training.monitor": "val/rmse"}}
    assert BestCriterion.of_state(older, now, "val/loss") == BestCriterion("val/rmse", "max", "abc")
    for settings in ({"training.monitor": "None"}, {}):
        assert BestCriterion.of_state({"settings": settings}, now, "val/loss").metric == "val/loss"


def trained_count(caplog: pytest.LogCaptureFixture) -> str:
    match = re.search(r"validation set changed: (.*) of its (\d+) samples", caplog.text)
    assert match is not None, caplog.text
    return match[1]


def write_table(path: Path, rows: int) -> Path:
    lines = [f"{i % 13},{i * i % 7},{i // 5},{'yes' if i % 13 > 6 else 'no'}" for i in range(rows)]
    path.write_text("\n".join(["x,z,patient,y", *lines]) + "\n")
    return path


GROUP, SEED = ("data.split=group", "data.split_by=patient"), "data.split_seed=3"


@pytest.mark.parametrize(
    ("data", "before", "after"),
    [
        ("cancer", ("data.split_seed=0",), ("data.split_seed=1",)),
        ("cancer", ("data.folds=4", "data.fold=0"), ("data.folds=4", "data.fold=1")),
        ("cancer", ("data.validation=0.3",), ("data.validation=0.6",)),
        # the split of a table is made again from the recorded one
        ("tabular", (*GROUP, SEED), (*GROUP, "data.split_seed=5")),
        ("tabular", (SEED,), (SEED, "data.split=random")),  # stratified is chosen for classes
        ("tabular", (SEED, "data.split=random"), (SEED, "data.split=stratified")),
    ],
)
def test_a_changed_split_counts_the_validation_samples_that_were_trained_on(
    data: str, before: tuple[str, ...], after: tuple[str, ...], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    quick: tuple[str, ...] = (f"data={data}", "training.steps=2", "training.validate_every=2")
    if data == "tabular":
        quick += (f"data.path={write_table(tmp_path / 't.csv', 200)}", "data.target=y")
    with opened(*quick, *before, folder=tmp_path / "run") as run:
        trained = set(run.train.fetch.order.indices.tolist())
        train(run)
    resume = f"checkpoint.resume={tmp_path / 'run'}"
    with opened(*quick, *after, resume, folder=tmp_path / "run") as run:
        validated = set(run.validation.fetch.order.indices.tolist())
    assert 0 < len(validated & trained) < len(validated) or "data.fold=1" in after
    assert trained_count(caplog) == f"{len(validated & trained)}"


def test_a_changed_file_of_a_users_data_set_starts_the_best_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, my_package: None
) -> None:
    files = {name: tmp_path / name for name in ("same", "changed")}
    for file in files.values():
        file.mkdir()
        (file / "rows").write_text("1 2 3")
    for name, file in files.items():
        quick = ("security.trusted=[my_package]", "data._target_=my_package.Stored")
        quick = (*quick, f"+data.rows={file}", "model._target_=my_package.Net", "training.steps=2")
        runs.trained(*quick, folder=tmp_path / f"run-{name}")
        if name == "changed":
            (file / "rows").write_text("4 5 6 7")
        resume = f"checkpoint.resume={tmp_path / f'run-{name}'}"
        with opened(*quick, resume, folder=tmp_path / f"run-{name}") as run:
            assert (run.progress.best is None) == (name == "changed")
    assert trained_count(caplog) == "an unknown number"


def test_after_the_file_changed_the_number_of_trained_samples_is_unknown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_table(tmp_path / "t.csv", 200)
    quick = ("data=tabular", f"data.path={path}", "data.target=y", "training.steps=2")
    runs.trained(*quick, folder=tmp_path / "run")
    write_table(path, 190)
    more = (*quick, "data.changed=accept", f"checkpoint.resume={tmp_path / 'run'}")
    with opened(*more, folder=tmp_path / "run") as run:
        assert run.progress.best is None
    assert trained_count(caplog) == "an unknown number"


@pytest.mark.parametrize(("metric", "mode"), [("accuracy", "min"), ("loss", "max")])
def test_a_mode_against_the_declared_direction_is_taken_and_said(metric: str, mode: str) -> None:
    typed = (f"training.monitor=val/{metric}", f"training.monitor_mode={mode}")
    for overrides, warned in ((typed, 1), (typed[:1], 0)):
        with opened(*SMALL, *overrides) as run:
            choices = [c for c in run.choices if c.key == "training.monitor_mode" and c.is_notice]
            assert len(choices) == warned
            assert run.higher_is_better == ((metric == "accuracy") != bool(warned))
