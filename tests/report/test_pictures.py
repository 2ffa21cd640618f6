from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runner.benchmark.result import ArmResult, Attribution, BenchmarkResult, Effect
from runner.record.drawing import BLUE, INK, SIDE
from runner.report import drawing
from runner.report.comparison import Comparison, Row, of_benchmark
from runner.report.pictures import Bar, Point, effects, memory, pictures, speeds

MIB = 2**20


def arm(name: str, speedup: float | None, **more: Any) -> ArmResult:
    given = {"status": "done", "peak_process_bytes": 100 * MIB, "losses": [2.0, 1.0, 0.5]} | more
    return ArmResult(name, [f"optimization={name}"], speedup=speedup, **given)


def benchmark(*arms: ArmResult, **more: Any) -> Comparison:
    return of_benchmark(BenchmarkResult("x", "none", list(arms), **more), None)


def runs(picture: NDArray[np.uint8], colour: tuple[int, int, int]) -> list[int]:
    """How wide each bar of that colour is, from the top."""
    wide, last = [], 0
    for row in (picture == np.array(colour, np.uint8)).all(axis=2).sum(axis=1):
        if row and not last:
            wide.append(0)
        if row:
            wide[-1] = max(wide[-1], int(row))
        last = row
    return wide


def test_bars_say_the_ratio_and_its_interval_and_why_there_is_none() -> None:
    compared = benchmark(
        arm("none", 1.0),
        arm("ultra", 2.5, speedup_interval=(2.4, 2.6)),
        arm("few", 2.0, speedup_interval=(0.0, math.inf)),
        arm("full", None, status="oom"),
    )
    assert speeds(compared) == [
        Bar("none", 1.0, told="1.00×"),
        Bar("ultra", 2.5, 2.4, 2.6, told="2.50× (2.40 to 2.60)"),
        Bar("few", 2.0, told="2.00× (too few blocks)"),
        Bar("full", None, told="oom"),
    ]


def test_bars_are_as_long_as_their_values() -> None:
    picture = pictures(benchmark(arm("none", 1.0), arm("basic", 2.0), arm("ultra", 4.0)))["speed"]
    first, second, third = runs(picture, BLUE)
    assert second / first == pytest.approx(2.0, rel=0.05)
    assert third / first == pytest.approx(4.0, rel=0.05)


def test_a_whisker_covers_the_interval() -> None:
    picture = pictures(benchmark(arm("none", 1.0), arm("ultra", 4.0, speedup_interval=(2.0, 4.2))))[
        "speed"
    ]
    unit = runs(picture, BLUE)[0]
    line = (picture == np.array(INK, np.uint8)).all(axis=2)
    longest = max(max(map(len, "".join("x" if p else " " for p in row).split()), default=0)
                  for row in line)  # fmt: skip
    assert longest == pytest.approx(2.2 * unit, rel=0.1)


def test_points_are_the_devices_memory_where_there_is_any() -> None:
    plain = benchmark(arm("none", 1.0), arm("ultra", 2.0, peak_process_bytes=50 * MIB))
    assert memory(plain) == [Point("none", 1.0, 100.0), Point("ultra", 2.0, 50.0)]
    device = benchmark(arm("none", 1.0, peak_device_bytes=8 * MIB), arm("ultra", 2.0))
    assert memory(device) == [Point("none", 1.0, 8.0)]


def test_attribution_has_two_bars_for_each_technique() -> None:
    found = Attribution("ultra", [
        Effect("amp", 1.5, (1.4, 1.6), 1.2, (1.1, 1.3)),
        Effect("compile", 0.9, None, None, None, note="cannot be left out"),
    ])  # fmt: skip
    compared = benchmark(arm("none", 1.0), attribution=found)
    assert [(bar.name, bar.value, bar.low, bar.second) for bar in effects(compared)] == [
        ("amp", 1.5, 1.4, False), ("amp", 1.2, 1.1, True),
        ("compile", 0.9, None, False), ("compile", None, None, True),
    ]  # fmt: skip
    assert "attribution" in pictures(compared)


def test_every_picture_can_be_read_in_a_thumbnail_of_half_its_size() -> None:
    long = "training.batch_size=256 optimizer=sgd optimization=advanced model.width=64 seed=1"
    many = [arm(f"{i} {long}", 1.0 + i, speedup_interval=(0.5, 2.0 + i)) for i in range(40)]
    made = pictures(benchmark(*many, noise_floor=0.5))
    assert made.keys() == {"speed", "memory", "loss"}
    assert all(picture.shape[1] == SIDE and picture.shape[0] < 1100 for picture in made.values())


def test_long_names_below_a_picture_keep_what_sets_them_apart() -> None:
    names = [f"optimization=advanced optimizer.weight_decay={x}" for x in (0.125, 0.25)]
    shown = drawing.scatter([Point(name, 1.0, 100.0) for name in names], "× as fast", 2)
    first, second = (shown[y : y + 30, 60:] for y in (len(shown) - 88, len(shown) - 52))
    assert (first < 128).any() and not np.array_equal(first, second)


@pytest.mark.parametrize(
    "odd",
    [
        {"losses": [math.nan, 1.0], "peak_process_bytes": None},
        {"losses": [1e30, 1e-30, 5.0], "peak_process_bytes": 1},
        {"losses": [0.0, 0.0, 0.0], "speedup_interval": (3.0, 1e5)},
        {"losses": [-1.0, 2.0], "speedup_interval": (0.0, 0.0)},
    ],
)
@pytest.mark.parametrize("speedup", [None, 0.0, 1e-9, 1.0, 1e9, math.nan, math.inf])
def test_odd_numbers_are_no_hindrance(odd: dict[str, Any], speedup: float | None) -> None:
    effect = Effect("amp", speedup, None, speedup, None)
    compared = benchmark(
        arm("none", 1.0), arm("odd", speedup, **odd), attribution=Attribution("ultra", [effect])
    )
    for picture in pictures(compared).values():
        assert picture.shape[1] == SIDE


def test_where_nothing_was_measured_nothing_is_drawn() -> None:
    assert pictures(Comparison("x", [Row([], "failed", name="a"), Row([], "killed")])) == {}
