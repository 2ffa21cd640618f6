"""`python -m runner.report RUN --plots`: plots from a run's records alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from runner import report
from runner.core.record import plots
from tests import runs

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
