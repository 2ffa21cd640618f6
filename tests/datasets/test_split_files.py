"""Validation and test sets in files of their own, and the one time that a test set is evaluated."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from runner import train
from runner.core.errors import ConfigError, DataError, Interrupted, UsageError
from runner.core.execution.evaluation import evaluate as evaluate_split
from runner.core.jobs import evaluate
from runner.core.jobs import train as train_job
from tests import runs
from tests.core.data.foreign_files import known, write_csv

TABLE = ("data=tabular", "data.target=y", "model=mlp", "model.width=8", "optimization=none")
STEPS = ("training.batch_size=16", "training.steps=24", "training.validate_every=4")
FIELDS = ("validation", "test")


def write(folder: Path, name: str, rows: int, shift: float = 0.0) -> Path:
    """Rows whose class follows from two numbers, with much noise."""
    rng = np.random.default_rng(rows)
    values = rng.normal(shift, 1, (rows, 2))
    labels = np.where(values.sum(1) + rng.normal(0, 1.5, rows) > 2 * shift, "yes", "no")
    columns = [{"a": a, "b": b, "y": y} for (a, b), y in zip(values.tolist(), labels, strict=True)]
    return write_csv(folder / name, columns)


def files(folder: Path) -> list[str]:
    """The keys of three files: validation and test rows are shifted."""
    paths = (
        f"data.path={write(folder, 'train.csv', 150)}",
        f"data.validation_path={write(folder, 'validation.csv', 60, 0.5)}",
        f"data.test_path={write(folder, 'test.csv', 70, 1.0)}",
    )
    return [*TABLE, *STEPS, "data.workers=0", *paths]


def evaluated(run: Path, folder: Path, *overrides: str) -> dict[str, float]:
    """The metrics of job=evaluate, without their `val/`."""
    config = runs.config(*overrides, "job=evaluate", f"checkpoint.resume={run}")
    metrics = evaluate.main(config, folder).metrics
    return {name.removeprefix("val/"): value for name, value in metrics.items()}


def test_the_best_checkpoint_is_tested_and_validation_has_a_file_of_its_own(tmp_path: Path) -> None:
    typed, folder = [*files(tmp_path), "optimizer.lr=0.2"], tmp_path / "run"
    summary = train_job.main(runs.config(*typed), folder)
    columns = {column["name"]: column for column in known(folder)["columns"]}
    rows = np.loadtxt(tmp_path / "train.csv", delimiter=",", skiprows=1, usecols=(0, 1))
    assert [columns[n]["mean"] for n in "ab"] == pytest.approx(rows.mean(0))  # of all rows
    assert [columns[n]["deviation"] for n in "ab"] == pytest.approx(rows.std(0))

    assert summary.best_step < summary.steps, "the last is the best: the test shows little"
    validated, tested = (
        {name[len(split) :]: x for name, x in summary.metrics.items() if name.startswith(split)}
        for split in ("val/", "test/")
    )
    last, best = folder / "checkpoints/last", folder / "checkpoints/best"
    assert evaluated(last, tmp_path / "1", *typed) == pytest.approx(validated, abs=1e-6)
    new = [*typed, f"data.path={tmp_path / 'test.csv'}"]
    assert evaluated(best, tmp_path / "2", *new) == pytest.approx(tested, abs=1e-6)
    assert evaluated(last, tmp_path / "3", *new)["loss"] != pytest.approx(tested["loss"], abs=1e-4)

    (row,) = runs.rows(folder, "test")
    assert row == {"step": summary.best_step, "split": "test", **tested}
    assert summary.tested == {"step": summary.best_step, "samples": 70}
    report = (folder / "report.md").read_text()
    result, test_set = report.split("## Test set")
    assert "test/" not in result and "these samples chose" not in report
    assert f"the best weights, of step {summary.best_step}, on 70 samples" in test_set


def test_a_test_set_alone_leaves_training_as_it_was(tmp_path: Path) -> None:
    typed = [*files(tmp_path), "training.monitor=val/loss", "training.monitor_mode=max"]
    with_test = [text for text in typed if "validation_path" not in text]
    without = [text for text in with_test if "test_path" not in text]
    touched: list[int] = []
    with runs.opened(*with_test, folder=tmp_path / "tested") as run:
        assert run.test is not None and len(run.train.fetch.order.indices) == 120
        batches = run.test.batches

        def spied(step: int) -> Iterator[Any]:
            touched.append(run.progress.step)
            return batches(step)

        run.test.batches = spied  # type: ignore[method-assign]
        tested = train(run)
        now = runs.weights(run)
    assert touched == [tested.steps]  # once, at the end
    assert tested.best_step is not None and tested.best_step < tested.steps
    last = load_file(tmp_path / "tested/checkpoints/last/model.safetensors")
    assert not runs.differences(now, last)  # not the best's, any more
    plain = train_job.main(runs.config(*without), tmp_path / "plain")
    assert plain.metrics == {n: x for n, x in tested.metrics.items() if n.startswith("val/")}
    assert "they also chose the best checkpoint" in (tmp_path / "plain/report.md").read_text()
    with runs.opened(*without) as run, pytest.raises(UsageError, match="has no test set"):
        evaluate_split(run, test=True)


def test_without_a_checkpoint_the_last_weights_are_tested(tmp_path: Path) -> None:
    summary = runs.trained(*files(tmp_path), "checkpoint=off", folder=tmp_path / "run")
    assert summary.tested["step"] == summary.steps and "test/loss" in summary.metrics


def test_a_finished_run_is_not_tested_again_and_a_longer_one_is(tmp_path: Path) -> None:
    typed, folder = files(tmp_path), tmp_path / "run"
    first = runs.trained(*typed, folder=folder)
    (tmp_path / "test.csv").write_text("a,b,y\n9,9,no\n")
    with pytest.raises(ConfigError, match=r"data\.validation_path: .* or .*/test.csv has changed"):
        runs.trained(*typed, "checkpoint.resume=auto", folder=folder)
    typed.append("data.changed=accept")
    again = runs.trained(*typed, "checkpoint.resume=auto", folder=folder)
    assert again.metrics == first.metrics and len(runs.rows(folder, "test")) == 1
    longer = "training.steps=28", "checkpoint.resume=auto"
    changed = runs.trained(*typed, *longer, folder=folder)
    assert changed.tested["samples"] == 1 and len(runs.rows(folder, "test")) == 1


def test_a_run_that_is_interrupted_in_its_test_is_tested_when_it_continues(tmp_path: Path) -> None:
    typed, folder = files(tmp_path), tmp_path / "run"
    whole = runs.trained(*typed, folder=tmp_path / "whole")
    with runs.opened(*typed, folder=folder) as run:
        assert run.test is not None

        def interrupted(step: int) -> Iterator[Any]:
            os.kill(os.getpid(), signal.SIGINT)
            return iter(())

        run.test.batches = interrupted  # type: ignore[method-assign]
        with pytest.raises(Interrupted, match="at step 24 of 24; a checkpoint is written"):
            train(run)
    assert not runs.rows(folder, "test")
    resumed = runs.trained(*typed, "checkpoint.resume=auto", folder=folder)
    assert resumed.metrics == whole.metrics and resumed.status == "done"
    assert runs.rows(folder, "test") == runs.rows(tmp_path / "whole", "test")


def test_rows_of_training_in_a_validation_file_are_named(tmp_path: Path) -> None:
    typed = files(tmp_path)
    lines = (tmp_path / "train.csv").read_text().splitlines()
    with (tmp_path / "validation.csv").open("a") as file:
        file.writelines(f"{line}\n" for line in lines[4:16])
    with runs.opened(*typed) as run:
        report = next(hook for hook in run.hooks if hasattr(hook, "findings"))
        (reason,) = report.findings.reasons
    assert "12 of 72 validation rows (16.7%) are also in training" in reason.evidence
    assert "such as line 62 of data.validation_path, equal to line 5" in reason.evidence
    with runs.opened(*typed, "checks.table.shared=drop") as run:
        assert len(run.validation.fetch.order.indices) == 60 and run.test is not None


def test_a_column_that_is_left_out_is_left_out_of_each_part(tmp_path: Path) -> None:
    typed = files(tmp_path)
    for name in ("train", *FIELDS):
        lines = (tmp_path / f"{name}.csv").read_text().splitlines()
        rows = [f"{line},{'c' if place == 0 else 7}" for place, line in enumerate(lines)]
        (tmp_path / f"{name}.csv").write_text("\n".join(rows) + "\n")
    summary = runs.trained(*typed, "checks.table.constant=drop", folder=tmp_path / "run")
    assert [column["name"] for column in known(tmp_path / "run")["columns"]] == ["a", "b"]
    assert {"val/accuracy", "test/accuracy"} <= summary.metrics.keys()


def test_other_jobs_do_not_open_the_test_set(tmp_path: Path) -> None:
    typed, folder = files(tmp_path), tmp_path / "run"
    runs.trained(*typed, folder=folder)
    for name in FIELDS:
        (tmp_path / f"{name}.csv").unlink()
    new = [*typed, f"data.path={write(tmp_path, 'new.csv', 40)}"]
    assert "loss" in evaluated(folder, tmp_path / "evaluated", *new)


@pytest.mark.parametrize("part", FIELDS)
def test_a_part_that_does_not_fit_is_refused_with_its_key(tmp_path: Path, part: str) -> None:
    key, train = f"data.{part}_path", f"data.path={write(tmp_path, 'train.csv', 90)}"
    write(tmp_path, "test.csv", 40)
    (tmp_path / "lacks.csv").write_text("a,y\n1,yes\n2,no\n")
    (tmp_path / "other.csv").write_text("a,b,y\n1,1,yes\n2,1,maybe\n")
    for name, message in (
        ("tets.csv", r"^{}: .*tets.csv does not exist; did you mean .test.csv."),
        ("train.csv", "^{}: .*train.csv is data.path; use"),
        ("", r"^{}: .* contains data.path; use"),
        ("lacks.csv", "lacks.csv lacks 'b', which the model was trained on"),
        ("other.csv", "^{}: .*1 of 2 samples have a class .*: 'maybe'"),
    ):
        with pytest.raises((ConfigError, DataError), match=message.format(key)):
            runs.opened(*TABLE, train, f"{key}={tmp_path / name}").__enter__()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.split=random", "data.validation_path=v"), "data.split: splits data.path"),
        (("data.folds=2", "data.fold=0", "data.validation_path=v"), "data.folds: splits"),
        (("data._target_=my_package.Noisy", "data.test_path=t"), "data.[a-z_]*: belongs to an"),
    ],
)
def test_parts_that_exclude_each_other(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runs.config(*TABLE, "data.path=x", *overrides)


def test_arrays_and_tokens_have_parts(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, n in (("train", 80), ("validation", 30), ("test", 20)):
        x = rng.normal(size=(n, 4)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x=x, y=(x[:, 0] > 0).astype(np.int64))
        rng.integers(0, 50, 40 * n).astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    keys = [f"data.{part}_path={tmp_path / part}" for part in FIELDS]
    short = "training.steps=4", "training.batch_size=8", "optimization=none"
    arrays = [f"data.path={tmp_path}/train.npz", *(f"{key}.npz" for key in keys)]
    summary = runs.trained("data=arrays", *short, *arrays)
    assert summary.tested["samples"] == 20 and "test/accuracy" in summary.metrics

    gpt = ("model=gpt", "model.width=16", "model.depth=1", "model.heads=2")
    typed = ["data=tokens", "data.vocab=50", "data.sequence=8", *gpt, *short]
    tokens = [f"data.path={tmp_path}/train.bin", *(f"{key}.bin" for key in keys)]
    folder = [f"data.path={tmp_path}"]
    shutil.copy(tmp_path / "validation.bin", tmp_path / "val.bin")  # a folder of three files
    for paths in (tokens, folder):
        with runs.opened(*typed, *paths) as run:
            assert run.test is not None and len(run.test.fetch.order.indices) == (800 - 1) // 8
            assert [c.value for c in run.choices if c.key == "data.test_path"] or paths is tokens
    for part, message in (
        ("test", "bin is data.validation_path; use"),
        ("validation", "has a val.bin; leave it out"),
    ):
        with pytest.raises(ConfigError, match=rf"data.{part}_path: .*{message}"):
            runs.opened(*typed, *folder, f"data.{part}_path={tmp_path}/val.bin").__enter__()
