"""A trained model on other data: prepared as in training, and equal to a computation in numpy."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from runner.errors import CheckpointError, ConfigError, DataError, RunnerError
from runner.jobs import evaluate, predict
from tests import runs
from tests.data.strangers import CITIES, Rows, people, table_probabilities, write_csv


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
    with (folder / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("shift", "cities", "columns"),
    [
        (0, CITIES, ("age", "income", "city", "buys")),
        (25, CITIES, ("age", "income", "city", "buys")),  # shifted: nothing is fitted again
        (5, CITIES[2:], ("city", "buys", "income", "age")),  # another order, fewer categories
        (5, ("Cairo", *CITIES[1:]), ("income", "city", "age", "buys")),  # one in another's place
    ],
)
def test_other_data_are_prepared_as_in_training(
    trained: Path, tmp_path: Path, shift: float, cities: tuple[str, ...], columns: tuple[str, ...]
) -> None:
    rows = people(90, shift, cities)
    path = write_csv(tmp_path / "new.csv", rows, *columns)
    expected = table_probabilities(trained / "run", rows)
    summary = evaluate.main(asked(trained, "evaluate", path), tmp_path / "evaluated")
    labels = np.array([row["buys"] == "yes" for row in rows])
    assert summary.metrics["val/accuracy"] == np.mean((expected.argmax(1) == 1) == labels)
    unlabelled = write_csv(tmp_path / "new.csv", rows, *(c for c in columns if c != "buys"))
    answers = predicted(trained, unlabelled, tmp_path / "predicted")
    assert [row["prediction"] for row in answers] == [
        "no yes".split()[i] for i in expected.argmax(1)
    ]
    for place, name in enumerate(("no", "yes")):
        shares = [float(row[f"probability {name}"]) for row in answers]
        np.testing.assert_allclose(shares, expected[:, place], atol=1e-5)
    assert [row["line"] for row in answers] == [str(2 + i) for i in range(90)]
    unknown = [c for c in summary.choices if c.key == "data.unknown_categories"]
    if "Cairo" in cities:
        count = sum(row["city"] == "Cairo" for row in rows)
        assert unknown[0].value == f"{count} of 90 rows" and "'Cairo'" in unknown[0].reason
    else:
        assert not unknown


def test_a_single_row_and_parquet_are_predicted(trained: Path, tmp_path: Path) -> None:
    rows = people(40)
    path = write_csv(tmp_path / "one.csv", rows[:1])
    assert len(predicted(trained, path, tmp_path / "one")) == 1
    config = asked(
        trained, "predict", write_csv(tmp_path / "all.csv", rows), "predict.format=parquet"
    )
    summary = predict.main(config, tmp_path / "all")
    table = parquet.read_table(tmp_path / "all" / "predictions.parquet")
    assert summary.export["rows"] == len(table) == 40
    np.testing.assert_allclose(
        table["probability yes"], table_probabilities(trained / "run", rows)[:, 1], atol=1e-5
    )


def refused(trained: Path, path: str, job: str, folder: Path, *more: str) -> RunnerError:
    main = evaluate.main if job == "evaluate" else predict.main
    with pytest.raises((ConfigError, DataError, CheckpointError)) as error:
        main(asked(trained, job, path, *more), folder)
    return error.value


def test_what_does_not_fit_the_training_is_named(trained: Path, tmp_path: Path) -> None:
    rows, folder = people(30), tmp_path / "job"
    path = write_csv(tmp_path / "lacks.csv", rows, "age")
    text = str(refused(trained, path, "evaluate", folder))
    assert "lacks 'income', 'city', 'buys', which the model was trained on" in text
    other = [{**row, "buys": "maybe" if i % 3 else row["buys"]} for i, row in enumerate(rows)]
    text = str(refused(trained, write_csv(tmp_path / "other.csv", other), "evaluate", folder))
    assert "20 of 30 samples have a class that the model was not trained on: 'maybe'" in text
    words = [{**row, "age": "old" if i == 4 else row["age"]} for i, row in enumerate(rows)]
    text = str(refused(trained, write_csv(tmp_path / "words.csv", words), "predict", folder))
    assert "line 6, column 'age': old is not a finite number" in text
    table = f"data.path={path}", "data.target=buys", "model=mlp", "job=predict"
    with pytest.raises(
        ConfigError, match="the model was trained on data=tabular, and this is text"
    ):
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
        assert "preprocessing.json: damaged: its sha256 is not the manifest's" in text
    finally:
        for path in paths:
            path.write_bytes(whole)


def test_rows_of_the_training_file_stay_held_out(trained: Path, tmp_path: Path) -> None:
    config = asked(trained, "evaluate", trained / "people.csv")
    summary = evaluate.main(config, tmp_path)
    assert summary.metrics == pytest.approx(runs_metrics(trained), abs=1e-6)
    assert not [choice for choice in summary.choices if choice.key == "data.validation"]


def runs_metrics(trained: Path) -> dict[str, float]:
    metrics: dict[str, float] = json.loads((trained / "run/summary.json").read_text())["metrics"]
    return metrics
