"""Folders train, val and test are parts of the data; hidden and empty folders are no classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from runner.core.data.preprocessing import OpenOptions
from runner.core.errors import ConfigError, DataError, SecurityError
from runner.core.jobs import evaluate
from runner.core.schemas.data import Text
from runner.datasets import predict
from runner.datasets.text import text
from tests import runs

IMAGES = ("data=images", "data.image_size=4", "model=mlp", "model.width=4", "data.workers=0")
TEXTS = ("data=text", "data.sequence=8", "model=classifier", "model.width=8", "model.depth=1")
SHORT = ("optimization=none", "training.steps=2", "training.batch_size=8")
COLOURS = {"blue": (0, 0, 200), "red": (200, 0, 0)}


def images(folder: Path, count: int, **classes: tuple[int, int, int]) -> Path:
    """So many images in a folder for each class."""
    for name, colour in (classes or COLOURS).items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (4, 4), colour).save(folder / name / f"{number}.png")
    return folder


def texts(folder: Path, count: int) -> Path:
    """So many texts in a folder for each class."""
    for name in ("good", "poor"):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            (folder / name / f"{number}.txt").write_text(f"{name} {number}")
    return folder


def opened(root: Path, *overrides: str, kind: tuple[str, ...] = IMAGES) -> tuple[Any, list[str]]:
    """The run's data, and what was chosen about them."""
    with runs.opened(*kind, *SHORT, f"data.path={root}", *overrides) as run:
        said = [f"{choice.key}={choice.value}: {choice.reason}" for choice in run.choices]
        return run, [text for text in said if text.startswith("data.")]


def sizes(run: Any) -> tuple[int, ...]:
    """Samples of training, validation and test."""
    loaders = (run.train, run.validation, run.test)
    return tuple(0 if one is None else len(one.fetch.order.indices) for one in loaders)


@pytest.mark.parametrize("names", [("train", "val", "test"), ("Training", "valid", "testing")])
def test_folders_train_val_and_test_are_parts(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name, count in zip(names, (5, 3, 2), strict=True):
        images(tmp_path / name, count)
        texts(tmp_path / "texts" / name, count)
    run, chosen = opened(tmp_path, f"data.path={tmp_path}")
    assert sizes(run) == (10, 6, 4) and run.sizes.class_names == ("blue", "red")
    (line,) = [text for text in chosen if text.startswith("data.split_folders")]
    assert line.startswith(f"data.split_folders={', '.join(names)}: split folders of ")
    assert "no split with class folders): texts" in line
    assert sizes(opened(tmp_path / "texts", kind=TEXTS)[0]) == (10, 6, 4)


def test_all_files_of_such_folders_are_predicted_and_none_evaluated(tmp_path: Path) -> None:
    root, folder = tmp_path / "photos", tmp_path / "run"
    for name, count in (("train", 8), ("dev", 3), ("test", 2)):
        images(root / name, count)
    typed = [*IMAGES, *SHORT, f"data.path={root}"]
    summary = runs.trained(*typed, folder=folder)
    assert summary.tested["samples"] == 4 and "test/accuracy" in summary.metrics
    resumed = [*typed, f"checkpoint.resume={folder}", f"data.path={tmp_path}/others"]
    root.rename(tmp_path / "others")
    with pytest.raises(ConfigError, match=r"others has the folders dev, test, train; name one of"):
        evaluate.main(runs.config(*resumed, "job=evaluate"), tmp_path / "x")
    predict.main(runs.config(*resumed, "job=predict"), tmp_path / "predicted")
    lines = (tmp_path / "predicted/predictions.csv").read_text().splitlines()
    assert len(lines) == 1 + 16 + 6 + 4


def test_train_and_test_alone_leave_validation_to_the_split(tmp_path: Path) -> None:
    images(tmp_path / "train", 10)
    (tmp_path / "test").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "test/unlabelled.png")
    run, chosen = opened(tmp_path)
    assert sizes(run) == (16, 4, 0)
    assert any("no split with class folders): test" in line for line in chosen)
    images(tmp_path / "test", 3)
    run, chosen = opened(tmp_path, "data.split=random")
    assert sizes(run) == (16, 4, 6)
    elsewhere = images(tmp_path / "elsewhere", 1)
    assert sizes(opened(tmp_path, f"data.test_path={elsewhere}")[0]) == (16, 4, 2)
    assert sizes(opened(tmp_path, f"data.validation_path={elsewhere}")[0]) == (20, 2, 6)


def test_folders_of_these_names_may_be_classes(tmp_path: Path) -> None:
    images(tmp_path / "flat", 5, train=(9, 9, 9), test=(99, 9, 9))
    assert opened(tmp_path / "flat")[0].sizes.class_names == ("test", "train")
    for name in ("train", "val"):
        images(tmp_path / "nested" / name, 5)
    run, chosen = opened(tmp_path / "nested", "data.split_folders=false")
    assert run.sizes.class_names == ("train", "val")
    assert not [line for line in chosen if "split_folders" in line]


def test_parts_that_are_not_clear_are_refused(tmp_path: Path) -> None:
    for name in ("train", "val"):
        images(tmp_path / name, 2)
    for typed, message in (
        (["data.split=random"], "^data.split: .*val is the validation set; leave it"),
        (["data.folds=2", "data.fold=0"], "^data.folds: .*name data.path=.*/train"),
        ([f"data.test_path={tmp_path}/val/red"], "^data.test_path: .*lies in data.validation_pa"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(tmp_path, *typed)
    images(tmp_path / "valid", 2)
    with pytest.raises(ConfigError, match=r"^data.validation_path: .* has val and valid; name"):
        opened(tmp_path)
    other = images(tmp_path / "other", 2, red=(9, 9, 9), green=(9, 9, 9))
    with pytest.raises(DataError, match=r"2 of 4 samples have a class .*: 'green'; its classes"):
        opened(tmp_path / "train", f"data.test_path={other}")
    (tmp_path / "parts").mkdir()
    for name in ("train", "val"):
        (tmp_path / "parts" / name).symlink_to(tmp_path / name)
    with pytest.raises(SecurityError, match="is refused: symlink to"):
        opened(tmp_path / "parts")


def test_hidden_and_empty_folders_are_not_classes_and_are_named(tmp_path: Path) -> None:
    images(tmp_path, 5)
    (tmp_path / "green").mkdir()
    (tmp_path / "green/notes.md").write_text("none yet")
    images(tmp_path / ".cache", 1)
    run, chosen = opened(tmp_path)
    assert run.sizes.class_names == ("blue", "red") and sizes(run)[0] == 8
    note = "left out: folders that are not classes: .cache (hidden), green (has no images"
    assert any(note in line for line in chosen), chosen
    root = texts(tmp_path / "texts", 3)
    (root / "neither").mkdir()
    data = text(Text(path=str(root)), OpenOptions())
    assert data.sizes.class_names == ("good", "poor")
    assert "neither (has no texts)" in data.choices[0].reason
    assert np.bincount(data.labels()).tolist() == [3, 3]
