"""Cross-validation: each sample is held out by one fold, by the rule of data.split."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from runner.core.data.order import split
from runner.core.data.split import fold_times, split_groups
from runner.core.errors import ConfigError, DataError
from tests import runs
from tests.core.data.test_split import N, arguments, cells, opened, write

FOLDS = 4
FIRST = (f"data.folds={FOLDS}", "data.fold=1")


def folds(path: Path, *overrides: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """The training and validation rows of every fold."""
    keys = [(f"data.folds={FOLDS}", f"data.fold={fold}", *overrides) for fold in range(FOLDS)]
    data = [opened(path, *key)[0] for key in keys]
    return [(one.train, one.validation) for one in data]


@pytest.mark.parametrize(
    "rule", [("data.split=random",), (), ("data.split=group", "data.split_by=patient")]
)
def test_every_row_is_held_out_once(tmp_path: Path, rule: tuple[str, ...]) -> None:
    path = write(tmp_path)
    labels, patients = cells(path, "y"), cells(path, "patient")
    parts = folds(path, "data.ignore=[day]", *rule)
    assert sorted(np.concatenate([held_out for _, held_out in parts])) == list(range(N))
    for train, held_out in parts:
        assert sorted([*train, *held_out]) == list(range(N)) and len(held_out) == N // FOLDS
        if not rule:  # by class, as ever where there are classes
            for label in "abc":
                share = (labels == label).sum() / FOLDS
                assert abs((labels[held_out] == label).sum() - share) < 1
        if "data.split=group" in rule:
            assert not set(patients[train]) & set(patients[held_out])


def test_groups_of_all_sizes_make_folds_of_one_size() -> None:
    sizes = np.random.default_rng(0).integers(1, 30, 60)
    groups = np.repeat(np.arange(60), sizes)
    held_out = [split_groups(groups, 0.2, 0, fold=(fold, 5))[1] for fold in range(5)]
    assert sorted(np.concatenate(held_out)) == list(range(len(groups)))
    assert np.ptp([len(part) for part in held_out]) <= 2
    others = split_groups(groups, 0.2, 1, fold=(0, 5))[1]
    assert not np.array_equal(others, held_out[0]), "data.split_seed changes nothing"
    with pytest.raises(DataError, match=r"3 values are too few for data\.folds=4"):
        split_groups(np.arange(9) % 3, 0.2, 0, fold=(0, 4))


def test_a_fold_of_time_is_trained_on_earlier_rows_alone(tmp_path: Path) -> None:
    path = write(tmp_path)
    days = cells(path, "day")
    by = "data.split=time", "data.split_by=day", "data.ignore=[day]"
    parts = folds(path, *by)
    for number, (train, held_out) in enumerate(parts):
        assert max(days[train]) < min(days[held_out])
        if number:  # what was held out before is trained on now
            assert set(train) == {*parts[number - 1][0], *parts[number - 1][1]}
    assert max(days[parts[-1][1]]) == max(days)
    (chosen,) = [c for c in opened(path, *by, *FIRST)[1] if c.key == "data.folds"]
    assert chosen.value == "expanding window" and " later ones not used" in chosen.reason
    with pytest.raises(DataError, match="too few values"):
        fold_times(np.array([1, 1, 1, 2]), (0, 3))


def test_a_resumed_run_holds_the_same_fold_out(tmp_path: Path) -> None:
    path, folder = write(tmp_path), tmp_path / "run"
    runs.trained(*arguments(path, 4), "data.folds=3", "data.fold=1", folder=folder)
    known = json.loads((folder / "checkpoints/last/preprocessing.json").read_text())
    assert (known["folds"], known["fold"]) == (3, 1)
    # without its keys, as the checkpoint says
    held_out = opened(path, "data.folds=3", "data.fold=1", "data.ignore=[day]")[0].validation
    with runs.opened(*arguments(path, 8), "checkpoint.resume=auto", folder=folder) as run:
        choice = next(c for c in run.choices if c.key == "data.folds")
        assert choice.value == 3 and "data.fold=1" in choice.reason
        assert np.array_equal(run.validation.fetch.source.validation, held_out)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.folds=3", "data.fold=3"), r"data\.fold: must be 0 to 2 with data\.folds=3, got 3"),
        (("data.folds=3",), r"data\.fold: .*got null; to train with each: -m data\.fold=0,1,2$"),
        (("data.fold=1",), r"data\.folds: is required by data\.fold=1"),
        (("data.folds=1", "data.fold=0"), r"data\.folds: must be ≥ 2, got 1"),
    ],
)
def test_a_fold_that_there_is_not_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runs.config("data=digits", *overrides)


def test_folds_of_other_data() -> None:
    with runs.opened("data=digits", "data.folds=5", "data.fold=4") as run:
        data = run.validation.fetch.source
    assert np.array_equal(data.validation, split(1797, 0.2, 0, fold=(4, 5))[1])
    with pytest.raises(DataError, match=r"the data: 3 samples are too few for data\.folds=4"):
        split(3, 0.2, 0, fold=(0, 4))
    with pytest.raises(ConfigError, match="has its own split"):
        runs.config("data=stdlib_text", "model=gpt", "data.folds=2", "data.fold=0")
