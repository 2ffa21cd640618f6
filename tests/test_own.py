"""A user's own data and classes train with overrides alone."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from runner import Summary
from runner.errors import SecurityError
from tests import runs


def trained(*overrides: str) -> Summary:
    return runs.trained("training.batch_size=16", *overrides)


def test_a_csv_of_numbers_and_categories(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with (tmp_path / "houses.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["rooms", "area", "town", "price", "sold"])
        for _ in range(200):
            rooms, area, town = rng.integers(1, 6), rng.normal(80, 20), rng.choice(["Ulm", "Kiel"])
            price = 1000 * rooms + 10 * area + (500 if town == "Ulm" else 0)
            rows.writerow([rooms, f"{area:.1f}", town, f"{price:.2f}", price > 4000])
    path = f"data.path={tmp_path / 'houses.csv'}"
    sold = trained("data=tabular", path, "data.target=sold", "data.ignore=[price]",
                   "training.epochs=15")  # fmt: skip
    assert sold.metrics["val/accuracy"] > 0.85
    price = trained("data=tabular", path, "data.target=price", "data.ignore=[sold]",
                    "training.epochs=5", "optimizer.lr=0.1",
                    "stability.clip_norm=null")  # fmt: skip
    assert price.metrics["val/r2"] > 0.5


def test_a_folder_of_images_per_class(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for name, channel in (("red", 0), ("blue", 2)):
        (tmp_path / name).mkdir()
        for i in range(40):
            pixels = rng.integers(0, 80, (20, 24, 3), dtype=np.uint8)
            pixels[..., channel] += 120
            image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    summary = trained("data=images", f"data.path={tmp_path}", "data.image_size=16",
                      "data.augment=true", "data.workers=2", "model=cnn", "model.width=8",
                      "optimizer.lr=5e-3", "training.epochs=20")  # fmt: skip
    assert summary.metrics["val/accuracy"] > 0.9


def test_a_file_of_tokens(tmp_path: Path) -> None:
    tokens = np.tile(np.arange(50, dtype=np.uint16), 400)
    tokens.tofile(tmp_path / "train.bin")
    tokens[:2000].tofile(tmp_path / "val.bin")
    summary = trained("data=tokens", f"data.path={tmp_path}", "data.vocab=50", "data.sequence=16",
                      "model=gpt", "model.width=32", "model.heads=2", "model.depth=1",
                      "training.steps=120", "optimizer.lr=0.01")  # fmt: skip
    assert summary.metrics["val/loss"] < 0.5  # ln 50 is 3.9


def test_arrays_and_labelled_text(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 5)).astype(np.float32)
    np.savez(tmp_path / "own.npz", x=x, y=(x[:, 0] > 0).astype(np.int64))
    arrays = trained("data=arrays", f"data.path={tmp_path / 'own.npz'}", "training.epochs=20")
    assert arrays.metrics["val/accuracy"] > 0.85
    for name, word in (("cats", "meow"), ("dogs", "woof")):
        (tmp_path / "text" / name).mkdir(parents=True)
        for i in range(30):
            text = f"{word} {rng.integers(10)} " * 4
            (tmp_path / "text" / name / f"{i}.txt").write_text(text)
    text = trained("data=text", f"data.path={tmp_path / 'text'}", "data.sequence=32",
                   "model=classifier", "model.width=32", "model.depth=1",
                   "training.epochs=24")  # fmt: skip
    assert text.metrics["val/accuracy"] > 0.9


def test_a_model_of_another_folder_is_trusted_by_name_or_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_package").mkdir()
    (tmp_path / "their_package" / "__init__.py").write_text(
        "from pathlib import Path\n"
        "from torch import nn\n"
        f"Path({str(tmp_path / 'imported')!r}).touch()\n"
        "class Their(nn.Module):\n"
        "    def __init__(self, in_features, classes, width):\n"
        "        super().__init__()\n"
        "        self.a, self.b = nn.Linear(in_features, width), nn.Linear(width, classes)\n"
        "    def forward(self, x):\n"
        "        return self.b(self.a(x.flatten(1)).relu())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    theirs = ["model._target_=their_package.Their", "+model.width=64", "training.epochs=5"]
    with pytest.raises(SecurityError, match=r"security\.trusted=\[their_package\]"):
        trained(*theirs)
    assert not (tmp_path / "imported").exists()
    assert trained(*theirs, "security.trusted=[their_package]").metrics["val/accuracy"] > 0.85
