"""`python -m runner.report RUN… --tables`: the records of runs as csv or parquet files."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from runner import report

LOSSES = [0.1 + 0.2, 1 / 3, 2.2250738585072014e-308]  # of 17 digits
LAYER = {"step": 20, "layer": 'conv, "first"', "norm": 0.25, "state": "fine"}
FAULT = {"kind": "spike", "message": "line 1\nline 2", "steps": [3, 4], "count": 2}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Folder of a run with three train rows, one of them not finite, and a damaged last line."""
    folder = tmp_path / "outputs" / "run"
    (folder / "debug").mkdir(parents=True)
    rows: list[dict[str, Any]] = [
        {"step": i, "split": "train", "loss": loss} for i, loss in enumerate(LOSSES)
    ]
    rows.append({"step": 3, "split": "train", "loss": None, "nonfinite": {"loss": "-inf"}})
    rows.append({"step": 3, "split": "val", "by": {"class": {"a": 2**60}}})
    lines = [json.dumps(row) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "lo')
    _write(folder / "debug/gradients.json", {"finding": "", "layers": [LAYER]})
    _write(folder / "debug/history.json", {"counts": {}, "faults": [FAULT]})
    _write(folder / "debug/anomalies.json", {"count": 0, "anomalies": []})
    trace, modules = {"operators": [{"name": "mm", "calls": 5}]}, [{"module": "a.b", "calls": 2}]
    _write(folder / "debug/profile.json", {"trace": trace, "modules": modules})
    return folder


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def _read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_numbers_in_csv_are_the_recorded_ones_to_the_last_bit_and_a_damaged_line_is_counted(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(run), "--tables", "csv"]) == 0
    rows = _read_csv(run / "debug/tables/metrics.csv")
    assert [float(row["loss"]) for row in rows[:3]] == LOSSES
    assert rows[3]["loss"] == "-inf"
    assert rows[4] == {"step": "3", "split": "val", "loss": "", "by.class.a": str(2**60)}
    out = capsys.readouterr().out.replace("\n", "")  # folded at 80 columns
    assert "metrics.csv (5 rows)" in out
    assert "metrics.jsonl: 1 damaged line" in out
    assert "nothing recorded: anomalies, memory" in out
    assert not (run / "debug/tables/anomalies.csv").exists()


def test_texts_with_quotes_and_lines_and_lists_come_back_from_csv(run: Path) -> None:
    assert report.main([str(run), "--tables", "csv"]) == 0
    (layer,) = _read_csv(run / "debug/tables/gradients.csv")
    assert layer["layer"] == LAYER["layer"]
    (fault,) = _read_csv(run / "debug/tables/faults.csv")
    assert fault["message"] == FAULT["message"]
    assert json.loads(fault["steps"]) == [3, 4]
    assert _read_csv(run / "debug/tables/modules.csv") == [{"module": "a.b", "calls": "2"}]


def test_parquet_has_types_and_several_runs_are_told_apart(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "outputs" / "sweep" / "0"
    other.mkdir(parents=True)
    (other / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": 2}\n')
    arguments = [str(run), str(other.parent), "--tables", "parquet", "--out", "tables"]
    assert report.main(arguments) == 0
    table = parquet.read_table(tmp_path / "tables/metrics.parquet")
    assert [str(field.type) for field in table.schema] == [
        *("string", "int64", "string", "double", "int64"),
    ]
    assert table.column("loss").to_pylist() == [*LOSSES, -math.inf, None, 2.0]
    assert table.column("run").to_pylist() == ["outputs/run"] * 5 + ["outputs/sweep/0"]


@pytest.mark.parametrize("where", ["debug/tables", "debug", "metrics.jsonl"])
def test_a_link_is_refused(run: Path, tmp_path: Path, where: str) -> None:
    aside = tmp_path / "aside"
    if (run / where).exists():
        (run / where).rename(aside)
    else:
        aside.mkdir()
    (run / where).symlink_to(aside)
    assert report.main([str(run), "--tables", "csv"]) == 3
    assert not list(tmp_path.rglob("metrics.csv"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["{run}", "--tables", "xls"],
        ["{run}/none", "--tables", "csv"],
        ["{run}/debug", "--tables", "csv"],
        ["{run}", "--tables", "csv", "--tensorboard"],
        ["{run}", "--plots", "--tensorboard"],
        ["{run}", "--plots", "--out", "elsewhere"],
    ],
)
def test_bad_arguments_end_with_2(run: Path, arguments: list[str]) -> None:
    assert report.main([text.format(run=run) for text in arguments]) == 2


def test_tables_and_plots_are_written_by_one_call(run: Path, tmp_path: Path) -> None:
    arguments = [str(run), "--plots", "--tables", "csv", "--out", str(tmp_path / "tables")]
    assert report.main(arguments) == 0
    assert (tmp_path / "tables/metrics.csv").exists()
    assert (run / "debug/plots/timeline.svg").exists()
