"""A trained model on other data: prepared as in training, and equal to a computation in numpy."""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from rich.console import Console

from runner.core.checkpoint import manifest
from runner.core.errors import CheckpointError, ConfigError, RunnerError
from runner.core.jobs import evaluate
from runner.core.jobs.evaluate import build_trained
from runner.core.jobs.run_report import RunSummaryTable
from runner.core.record.storage import write_file
from runner.datasets import predict
from tests import runs
from tests.core.data.foreign_files import (
    CITIES,
    STRANGERS,
    Rows,
    known,
    people,
    table_probabilities,
    write_csv,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run on `people.csv`."""
    folder = tmp_path_factory.mktemp("people")
    write_csv(folder / "people.csv", people(300))
    runs.trained(*data(folder / "people.csv"), "training.steps=60", folder=folder / "run")
    yield folder


def data(path: Path | str) -> list[str]:
    return [
        f"data.path={path}", "data=tabular", "data.target=buys", "model=mlp", "data.workers=0",
        "optimization=none", "training.batch_size=32", "checkpoint.every=60",
    ]  # fmt: skip


def asked(trained: Path, job: str, path: Path | str, *more: str) -> Any:
    resume = f"checkpoint.resume={trained / 'run'}"
    return runs.config(*data(path), f"job={job}", resume, *more)


def predicted(trained: Path, path: Path | str, folder: Path, *more: str) -> Rows:
    predict.main(asked(trained, "predict", path, *more), folder)
    return answers(folder)


def test_data_without_a_key_for_their_target_are_predicted(tmp_path: Path) -> None:
    typed = ("data=cancer", "model=mlp", "training.steps=4")
    runs.trained(*typed, folder=tmp_path / "run")
    resumed = runs.config(*typed, "job=predict", f"checkpoint.resume={tmp_path / 'run'}")
    predict.main(resumed, tmp_path / "answers")
    rows = answers(tmp_path / "answers")  # of the samples of validation
    assert len(rows) == 114 and {row["prediction"] for row in rows} == {"malignant", "benign"}


def test_a_single_row_and_parquet_are_predicted(trained: Path, tmp_path: Path) -> None:
    rows = people(40)
    path = write_csv(tmp_path / "one.csv", rows[:1])
    (row,) = predicted(trained, path, tmp_path / "one")
    assert row["line"] == "2"
    path = write_csv(tmp_path / "all.csv", rows)
    config = asked(trained, "predict", path, "predict.format=parquet")
    summary = predict.main(config, tmp_path / "all")
    table = parquet.read_table(tmp_path / "all" / "predictions.parquet")
    assert summary.export["rows"] == len(table) == 40
    expected = table_probabilities(trained / "run", rows)[:, 1]
    np.testing.assert_allclose(table["probability yes"], expected, atol=1e-5)


def test_the_summary_is_about_the_prediction_and_not_about_the_training(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = predict.build_trained

    def faulty(*arguments: Any) -> Any:
        run = build(*arguments)
        run.history.add("loss_spike", "of the training", step=3, category="numerics")
        return run

    monkeypatch.setattr(predict, "build_trained", faulty)
    path = write_csv(tmp_path / "new.csv", people(30, 3, ("Cairo", *CITIES)))
    summary = predict.main(asked(trained, "predict", path), tmp_path / "job")
    assert summary.faults == {} and not (tmp_path / "job/debug").exists()
    assert {choice.key.partition(".")[0] for choice in summary.choices} == {"data"}
    (unknown,) = [c.value for c in summary.choices if c.key == "data.unknown_categories"]
    assert str(unknown).startswith("city: ") and str(unknown).endswith(" of 30 rows")
    console = Console(width=200, file=StringIO(), color_system=None)
    console.print(RunSummaryTable(summary, tmp_path / "job"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "categories not in training: 'Cairo'" in text
    assert "TensorBoard" not in text and "techniques" not in text and "steps" not in text
    assert "## Columns" not in (tmp_path / "job/report.md").read_text()


def test_a_batch_that_does_not_fit_is_predicted_in_parts(trained: Path, tmp_path: Path) -> None:
    rows = people(40)
    config = asked(trained, "predict", write_csv(tmp_path / "new.csv", rows))
    with build_trained(config, None) as run:
        forward = run.forward

        def starved(x: torch.Tensor) -> Any:
            if len(x) > 5:
                raise MemoryError
            return forward(x)

        run.forward = starved  # type: ignore[assignment]
        columns = [*predict.predict_batches(run)]
        assert run.evaluation_batch == 4 and run.history.counts["out_of_memory"] == 3
    shares = np.concatenate([part["probability yes"] for part in columns])
    expected = table_probabilities(trained / "run", rows)[:, 1]
    np.testing.assert_allclose(shares, expected, atol=1e-5)


def refused(trained: Path, path: str, job: str, folder: Path, *more: str) -> RunnerError:
    main = evaluate.main if job == "evaluate" else predict.main
    with pytest.raises(RunnerError) as error:
        main(asked(trained, job, path, *more), folder)
    return error.value


def test_what_does_not_fit_the_training_is_named(trained: Path, tmp_path: Path) -> None:
    rows, folder = people(30), tmp_path / "job"
    path = write_csv(tmp_path / "lacks.csv", rows, "age")
    other = [{**row, "buys": "maybe" if i % 3 else row["buys"]} for i, row in enumerate(rows)]
    words = [{**row, "age": "old" if i == 4 else row["age"]} for i, row in enumerate(rows)]
    lacking = "lacks 'income', 'city' and 'buys', which .*; job=predict needs no target"
    for file, job, problem in (
        (path, "evaluate", lacking),
        (write_csv(tmp_path / "other.csv", other), "evaluate", "^data.path: .*20 of .*: 'maybe'"),
        (write_csv(tmp_path / "words.csv", words), "predict", "line 6, column 'age': old is no"),
    ):
        text = str(refused(trained, file, job, folder))
        assert re.search(problem, text)
        assert "data.ignore" not in text and "did you mean" not in text  # 'age' is needed itself
    with pytest.raises(ConfigError, match=r"data\.target: 'age' is an input of the model"):
        evaluate.main(asked(trained, "evaluate", trained / "people.csv", "data.target=age"), folder)
    table = f"data.path={path}", "data.target=buys", "model=mlp", "job=predict"
    with pytest.raises(ConfigError, match="the model was trained on data=tabular, got text"):
        resume = f"checkpoint.resume={trained / 'run'}"
        predict.main(runs.config("data=text", *table, resume, "model=classifier"), folder)


def test_a_damaged_preprocessing_is_noticed(trained: Path, tmp_path: Path) -> None:
    paths = [*trained.glob("run/checkpoints/step_*/preprocessing.json")]
    whole = paths[0].read_bytes()
    try:
        for path in paths:
            path.write_bytes(whole.replace(b"Oslo", b"Rome"))
        new = write_csv(tmp_path / "new.csv", people(10))
        text = str(refused(trained, new, "predict", tmp_path / "job"))
        assert "preprocessing.json: damaged: its" in text and "the recorded sha256" in text
    finally:
        for path in paths:
            path.write_bytes(whole)


def test_rows_of_the_training_file_stay_held_out(trained: Path, tmp_path: Path) -> None:
    config = asked(trained, "evaluate", trained / "people.csv")
    config.checkpoint.resume += "/checkpoints/last"
    summary = evaluate.main(config, tmp_path)
    assert summary.metrics == pytest.approx(runs_metrics(trained), abs=1e-6)
    assert not [choice for choice in summary.choices if choice.key == "data.validation"]


def runs_metrics(trained: Path) -> Any:
    return runs.read(trained / "run")["metrics"]


def answers(folder: Path) -> Rows:
    with (folder / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


SHORT = (
    "data.workers=0", "optimization=none", "training.batch_size=8", "training.steps=4",
    "checkpoint.every=4",
)  # fmt: skip


def predicted_by(run: Path, path: Path, folder: Path, *usual: str) -> Rows:
    resume = f"checkpoint.resume={run}"
    predict.main(runs.config(*usual, f"data.path={path}", resume, "job=predict"), folder)
    return answers(folder)


def test_images_are_predicted_from_a_folder_and_from_a_single_file(tmp_path: Path) -> None:
    for number in range(24):
        path = tmp_path / "train" / ("dark", "light")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (number + 150 * (number % 2),) * 3).save(path)
    (tmp_path / "new" / "day").mkdir(parents=True)
    for name, value in (("a.png", 30), ("day/b.png", 220)):
        Image.new("RGB", (8, 8), (value,) * 3).save(tmp_path / "new" / name)
    usual = "data=images", "data.image_size=8", "model=mlp", "optimizer.lr=1e-2", *SHORT
    run = tmp_path / "run"
    runs.trained(f"data.path={tmp_path / 'train'}", *usual, folder=run)
    both = predicted_by(run, tmp_path / "new", tmp_path / "both", *usual)
    assert [row["file"] for row in both] == ["a.png", "day/b.png"]
    dark = [float(row["probability dark"]) for row in both]
    (one,) = predicted_by(run, tmp_path / "new" / "day" / "b.png", tmp_path / "one", *usual)
    assert one["file"] == "b.png" and abs(dark[0] - dark[1]) > 1e-3
    assert float(one["probability dark"]) == pytest.approx(dark[1], abs=1e-5)


def test_texts_are_predicted_from_files_and_from_a_table_without_labels(tmp_path: Path) -> None:
    stranger = next(stranger for stranger in STRANGERS if stranger.name == "reviews")
    usual = *stranger.overrides, *SHORT
    run, files = tmp_path / "run", tmp_path / "files" / "more"
    runs.trained(*usual, f"data.path={stranger.write(tmp_path, 'train')}", folder=run)
    files.mkdir(parents=True)
    for number, row in enumerate(stranger.rows("new")):
        (files / f"{number:02d}.txt").write_text(row["text"])
    table = write_csv(tmp_path / "new.csv", stranger.rows("new"), "text")
    of_table = predicted_by(run, table, tmp_path / "job0", *usual)
    of_files = predicted_by(run, files.parent, tmp_path / "job1", *usual)
    of_one = predicted_by(run, files / "07.txt", tmp_path / "job2", *usual)
    good, again, alone = (
        [float(row["probability good"]) for row in rows] for rows in (of_table, of_files, of_one)
    )
    assert len({*good}) > 1 and again == pytest.approx(good, abs=1e-5)
    assert alone == pytest.approx([good[7]], abs=1e-5)
    assert of_files[3]["file"] == "more/03.txt" and of_one[0]["file"] == "07.txt"


@pytest.mark.usefixtures("my_package")
def test_data_of_the_users_own_class_are_predicted_in_the_targets_unit(tmp_path: Path) -> None:
    usual = *runs.OURS, "data._target_=my_package.Line", "model._target_=my_package.Net", *SHORT
    run = tmp_path / "run"
    runs.trained(*usual, folder=run)
    resume = f"checkpoint.resume={run}"
    predict.main(runs.config(*usual, resume, "job=predict"), tmp_path / "job")
    rows, sizes = answers(tmp_path / "job"), known(run)["sizes"]
    assert [row["sample"] for row in rows] == [str(i) for i in range(200)]
    with runs.opened(*usual, resume, "job=predict") as trained, torch.no_grad():
        x = torch.stack([trained.validation.fetch.source.dataset[i][0] for i in range(200)])
        outputs = trained.model.eval()(x)[:, 0].numpy().astype(float)
    values = outputs * sizes["target_deviation"] + sizes["target_mean"]
    np.testing.assert_allclose([float(r["prediction"]) for r in rows], values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_ids_stand_beside_the_predictions(tmp_path: Path, suffix: str) -> None:
    names = {"customer": [f"c-{i:03d}" for i in range(60)], "prediction": [*range(7, 67)]}
    table = zip(people(60), *names.values(), strict=True)
    rows = [{**row, "customer": c, "prediction": p} for row, c, p in table]
    path = tmp_path / f"people.{suffix}"
    if suffix == "csv":
        write_csv(path, rows)
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    as_id = "+data.types={prediction: id}"
    runs.trained(*data(path), as_id, "training.steps=1", folder=tmp_path / "run")
    found = predicted(tmp_path, path, tmp_path / "job")
    assert [row["customer"] for row in found] == names["customer"]
    assert [row["id prediction"] for row in found] == [*map(str, names["prediction"])]
    assert {row["prediction"] for row in found} <= {"no", "yes"}


def test_a_model_that_answers_no_sample_is_refused_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = "data=synthetic", "data.form=tokens", "data.samples=32", "data.sequence=8", *SHORT
    usual = *usual, "model=gpt", "model.depth=1", "model.width=8", "model.heads=1"
    runs.trained(*usual, folder=tmp_path / "run")

    def opens(*_: Any) -> None:
        pytest.fail("the data are opened")

    monkeypatch.setattr(sys.modules["runner.core.build.data"], "open_data", opens)
    config = runs.config(*usual, f"checkpoint.resume={tmp_path / 'run'}", "job=predict")
    with pytest.raises(ConfigError, match="predict needs classification or regression, got"):
        predict.main(config, tmp_path / "job")


def test_a_checkpoint_without_preprocessing_is_for_its_data(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run, symlinks=True)
    for step in run.glob("checkpoints/step_*"):
        (step / "preprocessing.json").unlink()
        facts = manifest.read_manifest(step)
        del facts.files[manifest.PREPROCESSING]
        (step / manifest.NAME).unlink()
        write_file(step / manifest.NAME, facts.write)
    resume = f"checkpoint.resume={run}/checkpoints/last"
    own, new = trained / "people.csv", write_csv(tmp_path / "new.csv", people(30))
    config = runs.config(*data(own), "training.steps=60", "job=evaluate", resume)
    summary = evaluate.main(config, tmp_path / "job")
    assert summary.metrics == pytest.approx(runs_metrics(trained), abs=1e-6)
    says = "does not contain preprocessing.*train again or evaluate on its own data"
    for job, path in ((evaluate, new), (predict, own)):
        config = runs.config(*data(path), f"job={job.__name__.rpartition('.')[2]}", resume)
        with pytest.raises(CheckpointError, match=says):
            job.main(config, tmp_path / "refused")


@pytest.mark.slow
@pytest.mark.usefixtures("my_package")
def test_an_interrupted_prediction_leaves_no_file(tmp_path: Path) -> None:
    runs.trained(*runs.NOISY, *SHORT, folder=tmp_path / "run")
    folder = tmp_path / "job"
    typed = [
        sys.executable, "-m", "runner", *runs.NOISY, *SHORT, "job=predict", "+data.seconds=0.05",
        f"checkpoint.resume={tmp_path / 'run'}", f"hydra.run.dir={folder}", "device.threads=1",
    ]  # fmt: skip
    path = os.pathsep.join(map(str, (runs.TESTS.parent, runs.TESTS)))
    process = subprocess.Popen(
        typed, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    runs.wait_until((folder / ".predictions.csv.tmp").exists, process, 60)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert not [*folder.glob("*predictions*")]


def test_weights_beside_exported_preprocessing_use_it(trained: Path, tmp_path: Path) -> None:
    rows = people(30, 25)
    path = write_csv(tmp_path / "new.csv", rows)
    exports = tmp_path / "exports"
    exports.mkdir()
    for name in ("model.safetensors", "preprocessing.json"):
        shutil.copy(trained / "run" / "checkpoints" / "best" / name, exports)
    weights = f"model.weights={exports / 'model.safetensors'}"
    shares = table_probabilities(trained / "run", rows)
    for job in (evaluate, predict):
        kind = job.__name__.rpartition(".")[2]
        job.main(runs.config(*data(path), weights, f"job={kind}"), tmp_path / kind)
    got = [float(row["probability yes"]) for row in answers(tmp_path / "predict")]
    np.testing.assert_allclose(got, shares[:, 1], atol=1e-5)
    labels = [row["buys"] == "yes" for row in rows]
    evaluated = runs.read(tmp_path / "evaluate")["metrics"]
    assert evaluated["val/accuracy"] == np.mean((shares[:, 1] > 0.5) == labels)
    whole = f"model.weights={trained / 'run' / 'checkpoints/best'}"  # with its preprocessing
    predict.main(runs.config(*data(path), whole, "job=predict"), tmp_path / "whole")
    assert answers(tmp_path / "whole") == answers(tmp_path / "predict")
    (exports / "preprocessing.json").unlink()
    with pytest.raises(ConfigError, match="predict needs a trained model with its preprocessing"):
        predict.main(runs.config(*data(path), weights, "job=predict"), tmp_path / "again")
