"""The record as tables."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from runner.record.config import TableKind
from runner.record.export import export


def recorded(folder: Path) -> None:
    (folder / "debug").mkdir()
    rows = [{"step": 10, "split": "train", "loss": 0.5}, {"step": 20, "split": "val", "top": 1}]
    text = "\n".join(json.dumps(row) for row in rows) + '\n{"step": 30, "los'
    (folder / "metrics.jsonl").write_text(text)
    history = {"counts": {"spike": 2}, "faults": [{"kind": "spike", "steps": [3, 9], "count": 2}]}
    (folder / "debug" / "history.json").write_text(json.dumps(history))
    looks = [{"step": 50, "layer": {"name": "a,b", "norm": 1.5}}]
    (folder / "debug" / "gradients.json").write_text(json.dumps(looks))


def test_each_list_of_rows_is_a_csv_with_dotted_columns(tmp_path: Path) -> None:
    recorded(tmp_path)
    written = export(tmp_path, [TableKind.csv])
    assert [p.name for p in written] == ["metrics.csv", "gradients.csv", "history_faults.csv"]
    tables = {}
    for path in written:
        with path.open(newline="") as file:
            tables[path.stem] = list(csv.DictReader(file))
    assert tables["metrics"] == [
        {"step": "10", "split": "train", "loss": "0.5", "top": ""},
        {"step": "20", "split": "val", "loss": "", "top": "1"},
    ]
    assert tables["gradients"] == [{"step": "50", "layer.name": "a,b", "layer.norm": "1.5"}]
    assert tables["history_faults"] == [{"kind": "spike", "steps": "[3, 9]", "count": "2"}]


def test_parquet_says_the_same(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    recorded(tmp_path)
    written = export(tmp_path, [TableKind.parquet])
    found = parquet.read_table(written[0]).to_pylist()
    assert found == [
        {"step": 10, "split": "train", "loss": 0.5, "top": None},
        {"step": 20, "split": "val", "loss": None, "top": 1},
    ]
