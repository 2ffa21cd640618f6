import json
import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from runner.measure import figures, page
from runner.measure.columns import BEST_KEY, select_columns
from runner.measure.comparison import Comparison, as_json
from runner.measure.discover import compare_folders
from runner.measure.table import ComparisonScreen
from tests.measure.planted import run, sweep, texts

BEST = {"lr=1": [0.80, 0.82, 0.90], "lr=0.1": [0.70, 0.71, 0.72]}
T = 4.3027  # Student's t, 2 degrees of freedom, 97.5 %
SECTION = re.compile("<h2>(Speed|Configurations|Validation)")


def planted(folder: Path, best: dict[str, list[float]], key: str = "seed") -> Comparison:
    """A sweep of those overrides over that key, whose runs ended with those best values."""
    jobs = []
    for shared, values in best.items():
        for place, value in enumerate(values):
            overrides = [f"optimizer.{shared}", f"{key}={place}"]
            number = str(len(jobs))
            run(folder / number, overrides, best=value, metrics={"val/accuracy": value - 0.1})
            jobs.append({"overrides": overrides, "folder": number, "status": "done"})
    return compare_folders([sweep(folder, jobs)])


def best_sentence(comparison: Comparison) -> str:
    (sentence,) = [text for text in texts(comparison) if text.startswith("Best")]
    return sentence


def test_seeds_are_mean_spread_and_interval_of_each_configuration(tmp_path: Path) -> None:
    comparison = planted(tmp_path, BEST)
    assert comparison.compares_learning
    assert select_columns(comparison)[0].key == BEST_KEY
    rows = json.loads(as_json(comparison))["rows"]
    assert rows[0]["replicates"] == rows[2]["replicates"] != rows[3]["replicates"]
    for row, values in ((rows[0], BEST["lr=1"]), (rows[3], BEST["lr=0.1"])):
        found = row["replicates"]
        assert (found["over"], found["runs"]) == ("3 seeds", 3)
        best, spread = found["metrics"]["best"], np.std(values, ddof=1)
        assert (best["mean"], best["spread"]) == pytest.approx((np.mean(values), spread))
        half_width = (best["interval"][1] - best["interval"][0]) / 2
        assert half_width == pytest.approx(T * spread / np.sqrt(3), rel=1e-3)
        assert found["metrics"]["val/accuracy"]["mean"] == pytest.approx(np.mean(values) - 0.1)
    assert best_sentence(comparison) == (
        "Best val/accuracy over 3 seeds each: from 0.7100 ± 0.0100 (95 %: 0.6852 to 0.7348, "
        "lr=0.1) to 0.8400 ± 0.0529 (95 %: 0.7086 to 0.9714, lr=1); their intervals overlap."
    )
    text = page.render_html(comparison)
    assert SECTION.findall(text) == ["Configurations"] and "±?" not in text
    table = text[text.index("<h2>Configurations") : text.index("<h2>All numbers")]
    assert re.findall(r'data-sort="(3 seeds[^"]*)"', table) == ["3 seeds", "3 seeds"]


LEVELS = {
    "none": (1000.0, 2000.0, 4000.0),
    "basic": (2000.0, 4100.0, 7900.0),
    "amp": (900, 2900, 3300),
}


@pytest.fixture(scope="module")
def three_by_three(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Three levels, three seeds: basic is twice as fast at each seed, and seeds differ by more."""
    home, jobs = tmp_path_factory.mktemp("sweep"), []
    for level, rates in LEVELS.items():
        for seed, rate in enumerate(rates):
            number, overrides = str(len(jobs)), [f"optimization={level}", f"seed={seed}"]
            folder = run(home / number, overrides, rate, best=0.9 + seed / 100)
            lines = [
                {"step": step, "split": split, "accuracy": step / 100 + seed / 50, "loss": 1 / step}
                for step in (10, 20, 30)
                for split in ("train", "val")
            ]
            (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
            jobs.append({"overrides": overrides, "folder": number, "status": "done"})
    return compare_folders([sweep(home, jobs)])


def test_three_settings_by_three_seeds_are_three_rows_with_intervals_everywhere(
    three_by_three: Comparison,
) -> None:
    rows = json.loads(as_json(three_by_three))["rows"]
    assert len(rows) == 9 and {row["replicates"]["runs"] for row in rows} == {3}
    assert {row["speedup"] for row in rows} == {None} == {rows[3]["replicates"]["speedup"]}
    rate = rows[3]["replicates"]["speed"]["samples_per_second"]
    logs = np.log(LEVELS["basic"])
    half_width = T * np.std(logs, ddof=1) / np.sqrt(3)
    ends = np.exp([logs.mean() - half_width, logs.mean() + half_width])
    assert rate["mean"] == pytest.approx(np.exp(logs.mean()))
    assert rate["interval"] == pytest.approx(ends, rel=1e-3)
    assert set(rows[0]["replicates"]["speed"]) >= {"samples_per_second", "step_ms"}

    screen = StringIO()
    Console(file=screen, width=140).print(ComparisonScreen(three_by_three))
    printed = screen.getvalue()
    (header, *lines) = printed[printed.index("configuration ") :].splitlines()[:4]
    assert "val/accuracy (best)" in header and "step, ms" in header
    for line, level in zip(lines, LEVELS, strict=True):
        assert line.startswith(level) and "3 seeds" in line
        assert len(re.findall(r"\(\S+–\S+\)", line)) >= 1
        assert "±?" in line  # the seeds' rates differ so much that nothing is known
    assert "seed=" not in printed.partition("·")[0]

    text, document = page.render_html(three_by_three), page.render_markdown(three_by_three)
    assert SECTION.findall(text) == ["Configurations", "Validation"]
    table = text[text.index("<h2>Configurations") : text.index("<h2>All numbers")]
    part = document[document.index("## Configurations") : document.index("## All numbers")]
    assert table.count('<th scope="row"') == part.count("| 3 seeds") == 3
    for shown in (table, part):  # four columns
        assert len(re.findall(r"\(\S[^()]* to [^()]*\)|±\?", shown)) == 3 * 4


def test_curves_of_seeds_are_a_mean_in_a_band(three_by_three: Comparison) -> None:
    (figure,) = figures.build_figures(three_by_three)["validation"]
    drawing = figure.charts[0][2]
    assert drawing.count("<polygon") == drawing.count("<polyline") == 3
    assert "its band their range" in figure.about
    points, band = figures.average_curves([[(1, 2.0), (2, 4.0), (3, 1.0)], [(1, 4.0), (2, 4.0)]])
    assert points == [(1, 3.0), (2, 4.0)] and band == [(1, 2.0, 4.0), (2, 4.0, 4.0)]


def test_folds_are_one_figure_and_single_runs_are_compared_with_each_other(tmp_path: Path) -> None:
    folds = planted(tmp_path / "folds", {"lr=1": [0.8, 0.9]}, "data.fold")
    expected = "Best val/accuracy over 2 folds: 0.8500 ± 0.0707 (95 %: "
    assert best_sentence(folds).startswith(expected)
    single = planted(tmp_path / "single", {"lr=1": [0.8], "lr=0.1": [0.7]})
    assert best_sentence(single) == "Best val/accuracy: from 0.7000 (lr=0.1) to 0.8000 (lr=1)."
    assert not single.has_replicates
    close = planted(tmp_path / "close", {"lr=1": [0.7], "lr=0.1": [0.7000001]})
    assert best_sentence(close) == "Best val/accuracy: about 0.7000 in each."
    mixed = texts(planted(tmp_path / "mixed", {**BEST, "lr=9": [0.95]}))
    assert not [text for text in mixed if "0.95" in text]
    assert "With one run, and so not compared: lr=9." in mixed
