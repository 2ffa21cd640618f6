"""Pictures of a comparison for TensorBoard."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from numpy.typing import NDArray

from runner.benchmark.result import ArmResult, Attribution, BenchmarkResult, Effect
from runner.record.plots import BLUE, SIDE
from runner.report import figures
from runner.report.comparison import Comparison, Row, of_benchmark
from runner.report.tensorboard_export import draw_pictures

MIB = 2**20


def arm(name: str, speedup: float | None, **more: Any) -> ArmResult:
    given = {"status": "done", "peak_process_bytes": 100 * MIB, "losses": [2.0, 1.0, 0.5]} | more
    if speedup is not None:
        given.setdefault("claim", "faster")
    return ArmResult(name, [f"optimization={name}"], speedup=speedup, **given)


def benchmark(*arms: ArmResult, **more: Any) -> Comparison:
    return of_benchmark(BenchmarkResult("x", "none", list(arms), **more), None)


def bar_widths(picture: NDArray[np.uint8], colour: str) -> list[int]:
    """How wide each bar of that colour is, from the top."""
    wide, last = [], 0
    rgb = np.round(255 * np.array(to_rgb(colour)))
    for row in (np.abs(picture - rgb) < 3).all(axis=2).sum(axis=1):
        row = int(row) if row > 20 else 0
        if row and not last:
            wide.append(0)
        if row:
            wide[-1] = max(wide[-1], row)
        last = row
    return wide


def test_bars_are_as_long_as_their_values() -> None:
    compared = benchmark(arm("none", 1.0), arm("basic", 2.0), arm("ultra", 4.0))
    first, second = bar_widths(draw_pictures(compared)["speed"], BLUE)
    assert second / first == pytest.approx(2.0, rel=0.05)


def test_bars_say_the_ratio_and_its_interval_and_why_there_is_none() -> None:
    compared = benchmark(
        arm("none", 1.0),
        arm("ultra", 2.5, speedup_interval=(2.4, 2.6)),
        arm("few", 2.0, claim="", speedup_interval=(0.0, math.inf)),
        arm("full", None, status="oom"),
    )
    assert [(bar.value, bar.text) for bar in figures.speed_bars(compared)] == [
        (1.0, "1.00×, reference"), (2.5, "2.50× (2.40 to 2.60), faster"),
        (2.0, "2.00× (too few blocks), not known"), (None, "oom"),
    ]  # fmt: skip


def test_points_are_the_devices_memory_where_there_is_any() -> None:
    def found(compared: Comparison) -> list[tuple[str, float]]:
        return [(point.label, point.y) for point in figures.memory_points(compared)]

    fast = {"samples_per_second": 10.0}
    plain = benchmark(
        arm("none", 1.0, **fast), arm("ultra", 2.0, peak_process_bytes=50 * MIB, **fast)
    )
    assert found(plain) == [("none", 100.0), ("ultra", 50.0)]
    device = benchmark(arm("none", 1.0, peak_device_bytes=8 * MIB, **fast), arm("ultra", 2.0))
    assert found(device) == [("none", 8.0)]


def test_attribution_has_two_bars_for_each_technique() -> None:
    found = Attribution("ultra", [
        Effect("amp", 1.5, (1.4, 1.6), 1.2, (1.1, 1.3)),
        Effect("compile", 0.9, None, None, None, note="cannot be left out"),
    ])  # fmt: skip
    compared = benchmark(arm("none", 1.0), attribution=found)
    bars = {side: figures.effect_bars(compared, side) for side in ("added", "removed")}
    assert {side: [(b.label, b.value, b.ends) for b in own] for side, own in bars.items()} == {
        "added": [("amp", 1.5, (1.4, 1.6)), ("compile", 0.9, None)],
        "removed": [("amp", 1.2, (1.1, 1.3)), ("compile", None, None)],
    }
    assert bars["removed"][1].text == "cannot be left out"


def test_every_picture_is_as_wide_as_the_others_and_of_a_bounded_height() -> None:
    long = "training.batch_size=256 optimizer=sgd optimization=advanced model.width=64 seed=1"
    many = [arm(f"{i} {long}", 1.0 + i, speedup_interval=(0.5, 2.0 + i)) for i in range(40)]
    effects = [Effect("amp", 1.5, (1.4, 1.6), 1.2, (1.1, 1.3)), Effect("compile", 0.9, None)]
    compared = benchmark(*many, noise_floor=0.5, attribution=Attribution("ultra", effects))
    pictures = draw_pictures(compared)
    assert pictures.keys() == {"speed", "memory", "attribution", "loss"}
    assert all(p.shape[1] == SIDE and p.shape[0] < 1100 for p in pictures.values())


@pytest.mark.parametrize(
    "odd",
    [
        {"losses": [math.nan, 1.0], "peak_process_bytes": None},
        {"losses": [1e30, 1e-30, 5.0], "peak_process_bytes": 1},
        {"losses": [0.0, 0.0, 0.0], "speedup_interval": (3.0, 1e5)},
        {"losses": [-1.0, 2.0], "speedup_interval": (0.0, 0.0)},
    ],
)
@pytest.mark.parametrize("speedup", [None, 0.0, 1e9, math.inf])
def test_odd_numbers_are_no_hindrance(odd: dict[str, Any], speedup: float | None) -> None:
    effect = Effect("amp", speedup, None, speedup, None)
    compared = benchmark(
        arm("none", 1.0), arm("odd", speedup, **odd), attribution=Attribution("ultra", [effect])
    )
    assert all(picture.shape[1] == SIDE for picture in draw_pictures(compared).values())


def test_where_nothing_was_measured_nothing_is_drawn() -> None:
    rows = [Row([], "failed", name="a"), Row([], "killed")]
    assert draw_pictures(Comparison("x", rows)) == {}
