"""Which samples are held out: by class, by group, by time; and again when a run is resumed."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.core.build.setup import Components
from runner.core.captures.manifest import list_captures
from runner.core.checkpoint.folder import read_manifest
from runner.core.checkpoint.manifest import PREPROCESSING, to_checksummed_json
from runner.core.data.dataset import TensorsDataset
from runner.core.data.order import split
from runner.core.data.split import split_classes, split_groups, split_times
from runner.core.errors import ConfigError, DataError
from runner.core.jobs import evaluate
from runner.core.record import storage
from runner.diagnose.replay.reopen import open_capture, reopen_run
from tests import runs

TABLE = ("data=tabular", "data.target=y", "model=mlp", "model.width=8", "optimization=none")
N = 120


def test_a_stratified_split_has_the_share_of_each_class_and_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat(np.arange(9), (400, 300, 101, 52, 7, 2, 1, 1, 1)))
    train, validation = split_classes(labels, 0.2, 0)
    assert sorted([*train, *validation]) == list(range(len(labels)))
    assert abs(len(validation) - 0.2 * len(labels)) < 1.5  # the class of two is in both parts
    for label, size in enumerate(np.bincount(labels)[:5]):
        assert abs((labels[validation] == label).sum() - 0.2 * size) <= 1
    assert set(labels[train]) >= set(range(6)) and set(labels[validation]) >= set(range(6))
    assert [part.tolist() for part in split_classes(np.zeros(20), 0.2, 3)] == [
        part.tolist() for part in split(20, 0.2, 3)
    ]
    alone = split_classes(np.arange(50), 0.2, 0)  # no class of two: as without classes
    assert np.array_equal(alone[1], split(50, 0.2, 0)[1])


@pytest.mark.parametrize("sizes", [(5,) * 40, (1, 1, 98), (60, 30, 5, 5), (3, 1)])
def test_groups_stay_together_near_the_share(sizes: tuple[int, ...]) -> None:
    groups = np.random.default_rng(1).permutation(np.repeat(np.arange(len(sizes)), sizes))
    train, validation = split_groups(groups, 0.2, 0)
    assert sorted([*train, *validation]) == list(range(len(groups)))
    assert len(train) and len(validation)
    assert not set(groups[train]) & set(groups[validation])
    if max(sizes) == 5:
        assert len(validation) == 40
    with pytest.raises(DataError, match=r"table.csv: column 'x': has one value"):
        split_groups(np.zeros(9), 0.2, 0, "table.csv: column 'x'")


def test_the_last_times_are_held_out_and_none_is_in_both_parts() -> None:
    times = np.random.default_rng(0).permutation(100)
    train, validation = split_times(times, 0.25)
    assert sorted(times[validation]) == list(range(75, 100)) and len(train) == 75
    days = np.array([3, 1, 1, 2, 2, 2, 2, 3, 3, 3])
    assert split_times(days, 0.5)[1].tolist() == [0, 3, 4, 5, 6, 7, 8, 9]
    assert split_times(np.array([1, 1, 1, 1, 2]), 0.6)[1].tolist() == [4]
    with pytest.raises(DataError, match="one value"):
        split_times(np.ones(5), 0.2)


def write(folder: Path, name: str = "table.csv") -> Path:
    """Rows of 3 classes, of 24 patients, each of a later day."""
    rng = np.random.default_rng(0)
    path = folder / name
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("x", "patient", "day", "y"))
        for i, x in enumerate(rng.normal(size=N)):
            day = f"20{20 + i * 7 % N // 12:02}-{1 + i * 7 % 12:02}-05"
            rows.writerow((x, f"p{i % 24}", day, "abb"[i % 3] if i % 10 else "c"))
    return path


def opened(path: Path, *overrides: str) -> Any:
    with runs.opened(*TABLE, f"data.path={path}", *overrides) as run:
        return run.validation.fetch.source, run.choices


def cells(path: Path, column: str) -> np.ndarray:
    with path.open(newline="") as file:
        return np.array([row[column] for row in csv.DictReader(file)])


def test_classes_of_a_table_are_stratified_unless_told_otherwise(tmp_path: Path) -> None:
    path = write(tmp_path)
    data, choices = opened(path)
    labels = cells(path, "y")
    for label in "abc":
        share = (labels[data.validation] == label).sum() / (labels == label).sum()
        assert abs(share - 0.2) < 0.05
    chosen = next(choice for choice in choices if choice.key == "data.split")
    assert chosen.value == "stratified" and "same class shares" in chosen.reason
    for typed in (["data.split=random"], ["data.target=x", "data.ignore=[y,day]"]):
        data, choices = opened(path, *typed)
        assert np.array_equal(data.validation, split(N, 0.2, 0)[1])
        assert not [choice for choice in choices if choice.key == "data.split"]


def test_rows_of_a_group_stay_together_and_it_is_no_input(tmp_path: Path) -> None:
    path = write(tmp_path)
    by = "data.split=group", "data.split_by=patient", "data.ignore=[day]"
    data, choices = opened(path, *by)
    patients = cells(path, "patient")
    assert len(data.validation) == 25  # of 24 groups of five
    assert not set(patients[data.validation]) & set(patients[data.train])
    assert [column.name for column in data.columns] == ["x"]
    assert [c.value for c in choices if c.key == "data.split_by"] == ["patient"]
    data, choices = opened(path, *by[:2], "data.ignore=[day,patient]")
    assert not set(patients[data.validation]) & set(patients[data.train])
    assert not [c for c in choices if c.key == "data.split_by"]


def test_the_last_rows_by_time_are_held_out(tmp_path: Path) -> None:
    path = write(tmp_path)
    days = cells(path, "day")
    by = "data.split=time", "data.split_by=day"
    data, _ = opened(path, *by)
    assert len(data.validation) == 24 and min(days[data.validation]) > max(days[data.train])
    assert "day" in [column.name for column in data.columns]
    data, _ = opened(path, *by, "data.ignore=[day]")
    assert min(days[data.validation]) > max(days[data.train])
    assert [column.name for column in data.columns] == ["x", "patient"]
    with pytest.raises(DataError, match=r"data.split_by: .*'patient' holds 'p\d+', no number or"):
        opened(path, "data.split=time", "data.split_by=patient", "data.ignore=[day]")


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (("data.split=group",), "data.split_by", "is required by"),
        (("data.split_by=patient",), "data.split_by", "add data.split=group or data.split=time"),
        (("data.split=time", "data.split_by=y"), "data.split_by", "is the target"),
        (("data.split=group", "data.split_by=pat"), "data.split_by", "did you mean 'patient'"),
        (("data.split=stratified", "data.target=x", "data.ignore=[y]"), "data.split", "use random"),
    ],
)
def test_a_split_that_cannot_be_made_is_refused(
    tmp_path: Path, overrides: tuple[str, ...], key: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        opened(write(tmp_path), *overrides)
    assert error.value.key == key


def test_other_data_refuse_a_split_by_column() -> None:
    with pytest.raises(ConfigError, match="a table with columns; use stratified or random"):
        runs.config("data=digits", "data.split=group")
    with pytest.raises(ConfigError, match="has its own split"):
        runs.config("data=stdlib_text", "model=gpt", "data.split=random")


def test_text_is_split_by_a_column_of_its_table(tmp_path: Path) -> None:
    path = write(tmp_path)
    typed = f"data.path={path}", "data.text=x", "data.target=y", "data.sequence=8"
    model = "data=text", "model=classifier", "model.width=8", "model.depth=1"
    with runs.opened(*model, *typed, "data.split=group", "data.split_by=patient") as run:
        data, patients = run.validation.fetch.source, cells(path, "patient")
    assert not set(patients[data.validation]) & set(patients[data.train])


def arguments(path: Path, steps: int) -> list[str]:
    length = ("schedule=constant", "checkpoint.every=4", "training.batch_size=16")
    path_and_steps = f"data.path={path}", f"training.steps={steps}"
    return [*TABLE, *path_and_steps, "data.ignore=[day]", "data.workers=0", *length]


@pytest.mark.parametrize("preprocessing", [True, False])
def test_a_run_of_before_is_resumed_with_its_held_out_rows(
    tmp_path: Path, preprocessing: bool
) -> None:
    """Checkpoints that lack the rule were split at random; the oldest lack preprocessing, too."""
    path, folder = write(tmp_path), tmp_path / "run"
    runs.trained(*arguments(path, 4), "data.split=random", folder=folder)
    for step in folder.glob("checkpoints/step_*"):
        content = json.loads((step / PREPROCESSING).read_text())
        assert content.pop("split") == "random"
        _replace(step, json.dumps(content).encode() if preprocessing else None)
    with runs.opened(*arguments(path, 8), "checkpoint.resume=auto", folder=folder) as run:
        source = run.validation.fetch.source
        assert np.array_equal(source.validation, split(N, 0.2, 0)[1])
        assert isinstance(source, TensorsDataset)
        chosen = [c for c in run.choices if c.key == "data.split"]
        assert chosen[0].value == "random" and "resumed" in chosen[0].reason


def _replace(step: Path, data: bytes | None) -> None:
    """Put another preprocessing into a checkpoint, or none and no choices; the manifest agrees."""
    facts = read_manifest(step)
    (step / PREPROCESSING).unlink()
    (step / "manifest.json").unlink()
    files = {name: entry for name, entry in facts.files.items() if name != PREPROCESSING}
    if data is not None:
        files[PREPROCESSING] = storage.write_file(step / PREPROCESSING, lambda f: f.write(data))
    choices = {} if data is None else facts.choices
    storage.write_file(step / "manifest.json", replace(facts, files=files, choices=choices).write)


def test_a_capture_of_before_is_reopened_with_the_rows_that_it_held_out(tmp_path: Path) -> None:
    path, folder = write(tmp_path), tmp_path / "run"
    earlier = Components(choices={"data.split": "random"})
    with runs.opened(*arguments(path, 4), folder=folder, given=earlier) as run:
        run.recorder.open(0)
        assert run.captures is not None
        run.captures.take(run, 1, "non_finite", "stated")
    (capture,) = list_captures(folder)
    body = json.loads((capture / "manifest.json").read_text())
    assert body.pop("digest") and body["choices"].pop("data.split") == "random"
    (capture / "manifest.json").write_bytes(to_checksummed_json(body))
    with reopen_run(open_capture(capture)) as (again, _):
        source = again.validation.fetch.source
        assert np.array_equal(source.validation, split(N, 0.2, 0)[1])


def test_a_resumed_and_an_evaluated_run_hold_the_same_rows_out(tmp_path: Path) -> None:
    path, folder = write(tmp_path), tmp_path / "run"
    by = "data.split=group", "data.split_by=patient"
    whole = runs.trained(*arguments(path, 8), *by, folder=tmp_path / "whole")
    runs.trained(*arguments(path, 4), *by, folder=folder)
    resumed = runs.trained(*arguments(path, 8), *by, "checkpoint.resume=auto", folder=folder)
    assert resumed.metrics == whole.metrics
    asked = *arguments(path, 8), *by, "job=evaluate", f"checkpoint.resume={folder}/checkpoints/last"
    summary = evaluate.main(runs.config(*asked), tmp_path / "evaluated")
    assert summary.metrics == pytest.approx(whole.metrics, abs=1e-6)
    new = write(tmp_path, "new.csv")
    asked = *arguments(new, 8), *by, "job=evaluate", f"checkpoint.resume={folder}"
    summary = evaluate.main(runs.config(*asked), tmp_path / "other")
    (reason,) = [c.reason for c in summary.choices if c.key == "data.validation"]
    assert "all 120 are evaluated" in reason
