"""Folders that the real `datasets` package wrote by save_to_disk, read by pyarrow alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner import train
from runner.core.data.open import open_data
from runner.core.errors import ConfigError, DataError, SecurityError
from tests import runs

datasets = pytest.importorskip("datasets")
SHORT = ("optimization=none", "training.batch_size=8", "training.steps=6", "data.workers=0")


def opened(*overrides: str) -> Any:
    return open_data(runs.config(*overrides).data, lambda *_: None)


def texts(count: int) -> Any:
    rows = {"text": [f"text {n}" for n in range(count)], "label": [n % 2 for n in range(count)]}
    classes = datasets.ClassLabel(names=["negative", "positive"])
    features = datasets.Features({"text": datasets.Value("string"), "label": classes})
    return datasets.Dataset.from_dict(rows, features=features)


def numbers(count: int) -> Any:
    draw = np.random.default_rng(0)
    x = draw.normal(size=count)
    rows = {"x": x, "kind": [["a", "b"][n % 2] for n in range(count)], "y": 3 * x + 1}
    return datasets.Dataset.from_dict(rows)


def images(count: int) -> Any:
    from PIL import Image

    grey = [Image.fromarray(np.full((8, 8, 3), 20 * n, np.uint8)) for n in range(count)]
    classes = datasets.ClassLabel(names=["even", "odd"])
    features = datasets.Features({"image": datasets.Image(), "label": classes})
    rows = {"image": grey, "label": [n % 2 for n in range(count)]}
    return datasets.Dataset.from_dict(rows, features=features)


def test_shuffled_texts_in_several_files_are_those_of_the_package(tmp_path: Path) -> None:
    saved = texts(20).shuffle(seed=1)
    saved.save_to_disk(str(tmp_path / "texts"), num_shards=3)
    data = opened("data=text", "model=classifier", f"data.path={tmp_path}/texts")
    inputs, labels = data.fetch(np.arange(20), None)
    own = [bytes(row[row < 256].tolist()).decode() for row in inputs["input_ids"]]
    assert own == list(saved["text"])
    names = [data.sizes.class_names[label] for label in labels]
    assert names == [["negative", "positive"][label] for label in saved["label"]]
    assert data.rows(0) == "row 1"


def test_splits_are_the_parts_of_a_run_and_another_one_is_predicted(tmp_path: Path) -> None:
    sizes = {"train": 24, "validation": 10, "test": 6, "extra": 4}
    parts = datasets.DatasetDict({name: texts(count) for name, count in sizes.items()})
    parts.save_to_disk(str(tmp_path / "all"))
    typed = ["data=text", "model=classifier", f"data.path={tmp_path}/all", *SHORT]
    with runs.opened(*typed, folder=tmp_path / "run") as run:
        assert run.test is not None
        loaders = (run.train, run.validation, run.test)
        assert [len(loader.fetch.order.indices) for loader in loaders] == [24, 10, 6]
        reasons = [choice.reason for choice in run.choices if choice.key == "data.path"]
        assert any("not used: extra" in reason for reason in reasons)
        train(run)
    resumed = [*typed, "job=predict", f"checkpoint.resume={tmp_path}/run"]
    with pytest.raises(ConfigError, match="has the splits train, validation, test, extra; name"):
        runs.opened(*resumed).__enter__()


def test_columns_of_numbers_and_texts_are_a_table(tmp_path: Path) -> None:
    saved = numbers(30)
    saved.save_to_disk(str(tmp_path / "table"))
    data = opened("data=tabular", f"data.path={tmp_path}/table", "data.target=y")
    assert data.sizes.task == "regression" and [c.name for c in data.columns] == ["x", "kind"]
    x, y = data.fetch(np.arange(30), None)
    column = data.columns[0]
    np.testing.assert_allclose(x[:, 0] * column.deviation + column.mean, saved["x"], rtol=1e-5)
    np.testing.assert_allclose(y.flatten(), saved["y"], rtol=1e-5)


def test_images_are_decoded_from_the_arrow_file_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images(10).save_to_disk(str(tmp_path / "images"))
    path = f"data.path={tmp_path}/images"
    monkeypatch.setitem(sys.modules, "datasets", None)  # an import of it fails
    data = opened("data=images", "model=cnn", path, "data.image_size=8")
    inputs, labels = data.fetch(np.array([3, 0, 7]), None)
    assert data.sizes.class_names == ("even", "odd") and labels.tolist() == [1, 0, 1]
    expected = torch.tensor([60, 0, 140]) / 255
    assert torch.equal(inputs, expected[:, None, None, None].expand(3, 3, 8, 8))


def test_damaged_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    texts(6).save_to_disk(str(tmp_path / "texts"))
    typed = ["data=text", "model=classifier", f"data.path={tmp_path}/texts"]
    file = next((tmp_path / "texts").glob("*.arrow"))
    whole, state = file.read_bytes(), tmp_path / "texts/state.json"
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="not a save_to_disk dataset"):
        opened(*typed)
    file.unlink()
    (tmp_path / "elsewhere.arrow").write_bytes(whole)
    file.symlink_to(tmp_path / "elsewhere.arrow")
    with pytest.raises(SecurityError, match="symlink to .* outside"):
        opened(*typed)
    content = json.loads(state.read_text())
    content["_data_files"] = [{"filename": "../elsewhere.arrow"}]
    state.write_text(json.dumps(content))
    with pytest.raises(DataError, match="lists no files in its folder"):
        opened(*typed)
