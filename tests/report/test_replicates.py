from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from runner.report.comparison import Comparison, as_json
from runner.report.discover import of_folders
from runner.report.replicates import by_configuration, find_replicates, t_quantile
from tests.report.planted_runs import run, sweep, texts

BEST = {"lr=1": [0.80, 0.82, 0.90], "lr=0.1": [0.70, 0.71, 0.72]}
T = 4.3027  # Student's t, 2 degrees of freedom, 97.5 %


def planted(folder: Path, best: dict[str, list[float]], key: str = "seed") -> Comparison:
    """A sweep of those overrides over that key, whose runs ended with those best values."""
    jobs = []
    for shared, values in best.items():
        for place, value in enumerate(values):
            overrides = [f"optimizer.{shared}", f"{key}={place}"]
            number = str(len(jobs))
            run(folder / number, overrides, best=value, metrics={"val/accuracy": value - 0.1})
            jobs.append({"overrides": overrides, "folder": number, "status": "done"})
    return of_folders([sweep(folder, jobs)])


def test_seeds_are_mean_spread_and_interval_of_each_configuration(tmp_path: Path) -> None:
    comparison = planted(tmp_path, BEST)
    first, second = find_replicates(comparison)
    assert first.overrides == ("optimizer.lr=1",) and first.over == second.over == "3 seeds"
    for found, values in ((first, BEST["lr=1"]), (second, BEST["lr=0.1"])):
        best, final = found.metrics["best"], found.metrics["val/accuracy"]
        spread = np.std(values, ddof=1)
        assert best.mean == pytest.approx(np.mean(values)) and best.spread == pytest.approx(spread)
        half_width = (best.interval[1] - best.interval[0]) / 2
        assert half_width == pytest.approx(T * spread / np.sqrt(3), rel=1e-3)
        assert final.mean == pytest.approx(np.mean(values) - 0.1)
    (sentence,) = [text for text in texts(comparison) if text.startswith("Best")]
    assert sentence == (
        "Best val/accuracy over 3 seeds each: from 0.7100 ± 0.0100 (95 %: 0.6852 to 0.7348, "
        "lr=0.1) to 0.8400 ± 0.0529 (95 %: 0.7086 to 0.9714, lr=1); their intervals overlap."
    )
    written = [row["replicates"] for row in json.loads(as_json(comparison))["rows"]]
    assert written[0] == written[2] != written[3] and written[0]["runs"] == 3
    assert written[0]["metrics"]["best"]["mean"] == pytest.approx(0.84)


def test_folds_of_one_configuration_are_one_figure(tmp_path: Path) -> None:
    comparison = planted(tmp_path, {"lr=1": [0.8, 0.9]}, "data.fold")
    (sentence,) = [text for text in texts(comparison) if text.startswith("Best")]
    assert sentence.startswith("Best val/accuracy over 2 folds: 0.8500 ± 0.0707 (95 %: ")


def test_runs_without_a_replicate_are_told_apart_by_themselves(tmp_path: Path) -> None:
    comparison = planted(tmp_path, {"lr=1": [0.8], "lr=0.1": [0.7]})
    (sentence,) = [text for text in texts(comparison) if text.startswith("Best")]
    assert sentence == "Best val/accuracy: from 0.7000 (lr=0.1) to 0.8000 (lr=1)."
    assert not find_replicates(comparison) and by_configuration(comparison) is None


def test_a_single_run_is_not_compared_with_means(tmp_path: Path) -> None:
    said = texts(planted(tmp_path, {**BEST, "lr=9": [0.95]}))
    assert not [text for text in said if "0.95" in text]
    assert "With one run, and so not compared: lr=9." in said


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062), (4, 2.7764), (5, 2.5706), (9, 2.2622), (30, 2.0423)]
)
def test_the_quantile_is_that_of_tables(degrees: int, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, rel=2e-3)
