"""`python -m runner.report RUN… --tables` and `--plots`: files from the records of runs alone."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from pyarrow import parquet

from runner import report
from runner.core.record import plots
from tests import runs

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


LAYERS = ("layers.0.weight", "layers.2.weight")


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """Records of a run that was killed: no summary, a half line, two bad steps."""
    folder = tmp_path / "run"
    (folder / "debug").mkdir(parents=True)
    rows = [
        {"step": i, "split": "train", "loss": 1 / i, "grad_norm": 0.5 * i}
        for i in range(10, 60, 10)
    ]
    (folder / "metrics.jsonl").write_text("\n".join([json.dumps(row) for row in rows]) + '\n{"step')
    bad = [
        {"step": 12, "kind": "non_finite", "loss": None, "grad_norm": None, "loss_limit": None},
        {"step": 31, "kind": "spike", "loss": 7.0, "grad_norm": 9.0, "loss_limit": 2.0},
    ]
    (folder / "debug/anomalies.json").write_text(json.dumps({"anomalies": bad}))
    layers = [
        {"step": step, "layer": layer, "norm": step * 0.1} for step in (20, 40) for layer in LAYERS
    ]
    (folder / "debug/gradients.json").write_text(json.dumps({"layers": layers}))
    return folder


def test_a_killed_run_is_plotted_from_its_records_and_missing_data_is_reported(
    crashed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(crashed), "--plots"]) == 0
    folder = crashed / "debug/plots"
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sorted(files) == ["distribution.svg", "gradient_norms.svg", "timeline.svg"]
    for svg in files.values():
        assert ElementTree.fromstring(svg).tag.endswith("svg")  # noqa: S314  # our own file
    out = capsys.readouterr().out.replace("\n", "")  # folded at 80 columns
    assert "memory: not drawn, fewer than two points are recorded" in out
    assert "metrics.jsonl: 1 damaged line" in out
    assert report.main([str(crashed), "--plots"]) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_lines_and_marks_are_the_recorded_values(
    crashed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    histograms: dict[str, Mapping[str, Sequence[float]]] = {}

    def draw_lines(axes: Any, title: str, lines: Any, marks: Any, from_zero: bool) -> None:
        drawn[title] = drawn.get(title, (lines, marks))

    def draw_histogram(axes: Any, title: str, groups: Any) -> None:
        histograms[title] = groups

    monkeypatch.setattr(plots, "draw_lines", draw_lines)
    monkeypatch.setattr(plots, "draw_histogram", draw_histogram)
    assert report.main([str(crashed), "--plots"]) == 0
    lines, marks = drawn["loss"]
    assert lines == {"loss": [(i, 1 / i) for i in range(10, 60, 10)]}
    assert marks == {"non_finite": [(12, float("inf"))], "spike": [(31, 7.0)]}
    assert histograms["gradient norm"] == {"good": [5.0, 10.0, 15.0, 20.0, 25.0], "bad": [9.0]}


def test_a_run_with_a_debug_tool_leaves_the_plots_also_in_tensorboard(tmp_path: Path) -> None:
    typed = ("training.steps=40", "monitoring.every=10", "checkpoint=off", "debug=gradients")
    runs.trained(*runs.TABLE, *typed, "debug.every=10", folder=tmp_path)
    names = {path.name for path in (tmp_path / "debug/plots").iterdir()}
    assert names >= {"timeline.svg", "gradient_norms.svg", "distribution.svg"}
    (events,) = tmp_path.glob("events.out.*")
    for name in ("timeline", "gradient_norms", "distribution"):
        assert f"watch_plots/{name}".encode() in events.read_bytes()


def test_all_runs_in_a_folder_are_drawn(crashed: Path) -> None:
    crashed.rename(crashed.parent / "0")
    assert report.main([str(crashed.parent), "--plots"]) == 0
    assert (crashed.parent / "0/debug/plots/timeline.svg").is_file()
    assert b"mathdefault" not in (crashed.parent / "0/debug/plots/distribution.svg").read_bytes()


@pytest.mark.parametrize(("name", "code"), [("none", 2), ("empty", 2), ("linked", 3)])
def test_a_folder_that_is_no_run_or_has_a_link_is_refused(
    crashed: Path, name: str, code: int
) -> None:
    (crashed.parent / "empty").mkdir()
    (crashed / "debug/plots").symlink_to(crashed.parent / "empty")
    crashed.rename(crashed.parent / "linked")
    assert report.main([str(crashed.parent / name), "--plots"]) == code
    assert not list((crashed.parent / "empty").iterdir())
