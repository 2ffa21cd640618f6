"""A user's own token files and arrays are learned with overrides alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from runner import Summary
from tests import runs


def trained(*overrides: str) -> Summary:
    return runs.trained("training.batch_size=16", *overrides)


def test_a_file_of_tokens(tmp_path: Path) -> None:
    tokens = np.tile(np.arange(50, dtype=np.uint16), 400)
    tokens.tofile(tmp_path / "train.bin")
    tokens[:2000].tofile(tmp_path / "val.bin")
    summary = trained("data=tokens", f"data.path={tmp_path}", "data.vocab=50", "data.sequence=16",
                      "model=gpt", "model.width=32", "model.heads=2", "model.depth=1",
                      "training.steps=120", "optimizer.lr=0.01")  # fmt: skip
    assert summary.metrics["val/loss"] < 0.5  # ln 50 is 3.9


def test_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 5)).astype(np.float32)
    np.savez(tmp_path / "own.npz", x=x, y=(x[:, 0] > 0).astype(np.int64))
    arrays = trained("data=arrays", f"data.path={tmp_path / 'own.npz'}", "training.epochs=20")
    assert arrays.metrics["val/accuracy"] > 0.85
