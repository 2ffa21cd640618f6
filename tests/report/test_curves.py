"""Which part of the training losses a chart shows."""

from __future__ import annotations

from pathlib import Path

from runner.report import curves
from runner.report.comparison import of_benchmark
from runner.report.page import html
from tests.report.planted_results import arm, reference, result


def test_a_diverged_arm_leaves_the_top_and_does_not_flatten_the_others(tmp_path: Path) -> None:
    wild = arm("wild", 1.1, losses=[2.3, 9.0, 5e28, 5e28, 2.0, 1.9])
    found = of_benchmark(result(reference(), arm("basic", 1.2), wild), tmp_path)
    losses = curves.read_losses(found)
    reach = curves.axis_top(found, losses)
    assert reach == 2.3
    assert curves.clip_curve(losses["wild"], reach) == [
        [(1, 2.3), (2, 2.3)], [(4, 2.3), (5, 2.0), (6, 1.9)]
    ]  # fmt: skip
    assert "wild went beyond" in html(found)
    calm = of_benchmark(result(reference(), arm("basic", 1.2)), tmp_path)
    assert curves.axis_top(calm, curves.read_losses(calm)) == float("inf")


def test_curves_that_end_apart_are_explained(tmp_path: Path) -> None:
    long = arm("fast", 2.0, losses=[2.3 - 0.01 * step for step in range(80)])
    said = html(of_benchmark(result(reference(), long), tmp_path))
    assert "the faster ones made more steps" in said
    assert "made more steps" not in html(of_benchmark(result(reference(), arm("a", 1.2)), tmp_path))
