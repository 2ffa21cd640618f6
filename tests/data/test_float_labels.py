"""Labels that come as floats or texts: what is made of them is said, with what makes classes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner import build, compose
from runner.data.arrays import arrays
from runner.data.config import AS_INTEGERS, Arrays, Digits, Tabular
from runner.errors import ConfigError, DataError

X = np.random.default_rng(0).standard_normal((40, 5)).astype(np.float32)
LABELS = (X[:, 0] > 0).astype(np.float32)


def saved(folder: Path, y: Any) -> str:
    np.savez(folder / "data.npz", x=X, y=y)
    return str(folder / "data.npz")


@pytest.mark.parametrize("y", [LABELS, LABELS[:, None], LABELS * 2 - 1])
def test_float_labels_are_a_regression_and_it_says_at_once_what_makes_classes(
    y: np.ndarray, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "runner"):
        source = arrays(Arrays(path=saved(tmp_path, y)))
    assert source.sizes.task == "regression"
    (said,) = caplog.messages
    assert "array 'y': the targets are 2 different whole numbers" in said
    assert said.endswith("use data.task=classification")


@pytest.mark.parametrize(
    ("y", "task"),
    [
        (X[:, 1], "auto"),
        (np.ones(40, np.float32), "auto"),
        (np.eye(2, dtype=np.float32)[LABELS.astype(int)], "auto"),
        (LABELS, "regression"),
        (LABELS, "classification"),
    ],
    ids=["quantities", "one value", "several targets", "asked for", "classes"],
)
def test_where_floats_are_quantities_or_the_task_is_typed_nothing_is_said(
    y: np.ndarray, task: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "runner"):
        arrays(Arrays(path=saved(tmp_path, y), task=task))
    assert caplog.messages == []


def test_classification_of_float_labels_names_the_key_that_makes_it_work(tmp_path: Path) -> None:
    asked = ["data=arrays", f"data.path={saved(tmp_path, LABELS)}"]
    objective = "objective=classification"
    with pytest.raises(ConfigError, match="are classes, use data.task=classification"):
        build(compose([*asked, objective])).close()
    with build(compose([*asked, objective, "data.task=classification"])) as run:
        assert run.sizes.classes == 2


def test_the_way_to_classes_is_a_key_only_where_there_is_that_key() -> None:
    for config in (Arrays(path="a.npz"), Tabular(path="a.csv", target="y")):
        assert config.as_classes == "use data.task=classification"
    assert Arrays(path="a.npz", _target_="mine.Data").as_classes == AS_INTEGERS
    assert Digits().as_classes == AS_INTEGERS


def test_labels_that_are_texts_name_the_call_that_numbers_them(tmp_path: Path) -> None:
    texts = np.array(["a", "b"])[LABELS.astype(int)]
    call = r"no number; for classes save np\.unique\(y, return_inverse=True\)\[1\]"
    with pytest.raises(DataError, match=call):
        arrays(Arrays(path=saved(tmp_path, texts)))
    numbered = np.unique(texts, return_inverse=True)[1]
    assert arrays(Arrays(path=saved(tmp_path, numbered))).sizes.classes == 2
