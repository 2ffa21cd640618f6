"""A leak is found; a saw-tooth, a jump, a warm-up and noise are none."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from runner.device.leaks import LeakDetector, Trend, describe_leaks, judge

MIB = 2**20
BASE = 300 * MIB
EVERY = 10  # steps between two samples


def found(curve: Callable[[int], float], steps: int = 5000, **options: float) -> list[int]:
    """The steps at which a leak is found."""
    detector, told = LeakDetector(**options), []  # type: ignore[arg-type]
    for step in range(EVERY, steps + 1, EVERY):
        leak = detector.add(step, BASE + int(curve(step)))
        if detector.suspects:
            leak = detector.cleaned(step, BASE + int(curve(step))) or leak
        if leak:
            told.append(step)
    return told


def described(curve: Callable[[int], float], steps: int) -> str:
    """What the detector says of such a run at its end."""
    detector = LeakDetector()
    for step in range(EVERY, steps + 1, EVERY):
        detector.add(step, BASE + int(curve(step)))
        if detector.suspects:
            detector.cleaned(step, BASE + int(curve(step)))
    return detector.describe()


def noise(size: float) -> Callable[[int], float]:
    source = random.Random(0)
    return lambda step: source.uniform(-size, size)


def test_50_kb_a_step_are_found_within_500_steps_and_told_exactly() -> None:
    detector, trend = LeakDetector(), None
    for step in range(EVERY, 501, EVERY):
        trend = detector.add(step, BASE + 50_000 * step) or trend
    assert trend is not None and trend.last < 500 and detector.leaking
    assert trend.slope == pytest.approx(50_000) and trend.low <= 50_000 <= trend.high
    assert trend.grown == pytest.approx(50_000 * (trend.last - trend.first))


LINE: Callable[[int], float] = lambda s: 2_800_000 * s  # noqa: E731
FEW = "too few samples for a leak verdict"


@pytest.mark.parametrize(
    ("steps", "said"),
    [(10, f"{FEW} (0 of 40)"), (30, f"{FEW} (0 of 40)"),
     (40, f"{FEW} (0 of 40): growing 2.8 MB a step so far"),
     (60, f"{FEW} (1 of 40): growing 2.8 MB a step so far"),
     (420, f"{FEW} (37 of 40): growing 2.8 MB a step so far"),
     (450, "a leak: growing 2.8 MB a step")],
)  # fmt: skip
def test_before_there_are_enough_samples_the_growth_so_far_is_stated(steps: int, said: str) -> None:
    assert described(LINE, steps) == said


def test_growth_that_began_too_late_for_a_verdict_is_stated_with_its_first_step() -> None:
    said = described(lambda s: max(0, s - 800) * 400_000, 900)
    assert said == "no leak confirmed in 85 samples, but growing 400.0 KB a step since step 800"


def test_a_device_that_grows_is_told_from_a_process_that_does_not() -> None:
    process, device = LeakDetector(), LeakDetector()
    for step in range(EVERY, 201, EVERY):
        process.add(step, BASE)
        device.add(step, BASE + int(LINE(step)))
    few = f"{FEW} (15 of 40)"
    assert describe_leaks({"process": process, "device": device}) == (
        f"process: {few}: no growth beyond noise so far; "
        f"device: {few}: growing 2.8 MB a step so far"
    )
    assert describe_leaks({"process": process, "device": process}) == process.describe()


def test_the_same_leak_is_found_under_noise_and_page_sized_steps() -> None:
    rough = noise(1 * MIB)
    assert found(lambda s: (50_000 * s // 4096) * 4096 + rough(s), 1000)


def test_the_same_leak_is_found_under_a_saw_tooth() -> None:
    assert found(lambda s: 50_000 * s + (s % 100) / 100 * 6 * MIB, 1000)


def test_a_slow_leak_is_found_late_and_said_once_a_window() -> None:
    steps = found(lambda s: 3_000 * s, 40_000)
    assert steps and steps[0] > 1000 and len(steps) < 5


def test_a_leak_that_begins_late_is_found_from_there_on() -> None:
    steps = found(lambda s: max(0, s - 10_000) * 50_000, 12_000)
    assert steps and 10_000 < steps[0] < 11_000


HEALTHY: dict[str, Callable[[int], float]] = {
    "flat": lambda s: 0,
    "noise": noise(20 * MIB),
    "saw-tooth": lambda s: s % 350 / 350 * 60 * MIB,
    "short saw-tooth": lambda s: s % 130 / 130 * 60 * MIB,
    "slow saw-tooth": lambda s: (s % 90 + s % 170 + s % 230) * 0.1 * MIB,
    "one jump": lambda s: 500 * MIB if s > 1000 else 0,
    "three jumps": lambda s: 100 * MIB * sum(s > at for at in (300, 900, 2500)),
    "warm-up": lambda s: 80 * MIB * (1 - math.exp(-s / 150)),
    "slow warm-up": lambda s: 40 * MIB * (1 - math.exp(-s / 300)),
    "logarithm": lambda s: 12 * MIB * math.log(s),
    "falling": lambda s: -20_000 * s,
    "a peak at each validation": lambda s: 200 * MIB if s % 500 == 0 else 0,
    "a little a step": lambda s: 300 * s,
}


RISING = [HEALTHY[name] for name in HEALTHY if "saw-tooth" in name or "warm-up" in name]
RISING += [HEALTHY["logarithm"]]  # all of them do grow in the first 100 steps


@pytest.mark.parametrize("curve", HEALTHY.values(), ids=HEALTHY)
def test_what_is_no_leak_raises_nothing(curve: Callable[[int], float]) -> None:
    assert found(curve) == []
    assert described(curve, 5000) == "no leak found in 495 samples"
    assert "growing" not in described(curve, 100) or curve in RISING


def test_a_leak_is_found_though_cleaning_makes_a_step_down() -> None:
    detector, slack, leak = LeakDetector(), 0, None
    for step in range(EVERY, 501, EVERY):
        slack += 25_000 * EVERY
        leak = detector.add(step, BASE + 50_000 * step + slack) or leak
        if detector.suspects:
            slack = 0
            leak = detector.cleaned(step, BASE + 50_000 * step) or leak
    assert leak is not None and leak.slope == pytest.approx(50_000) and detector.trend is leak


def test_garbage_that_is_collected_when_a_leak_is_suspected_is_none() -> None:
    detector, held, leaks, collected = LeakDetector(), 0, 0, 0
    for step in range(EVERY, 5001, EVERY):
        held += 500_000
        leaks += detector.add(step, BASE + held) is not None
        if detector.suspects:
            held, collected = 0, collected + 1
            leaks += detector.cleaned(step, BASE) is not None
    assert collected and not leaks and not detector.leaking


def test_the_interval_of_a_straight_line_is_a_point_and_that_of_noise_holds_zero() -> None:
    straight = judge([(step, 7 * step) for step in range(64)])
    assert straight.low == straight.slope == straight.high == 7
    rough = noise(MIB)
    trend: Trend = judge([(step, int(rough(step))) for step in range(64)])
    assert trend.low < 0 < trend.high and not trend.leaking


def test_a_resumed_run_begins_to_watch_where_it_goes_on() -> None:
    detector = LeakDetector(warm_up=100)
    for step in range(7000, 7100, EVERY):
        detector.add(step, BASE * step)
    assert not detector.levels
    detector.add(7100, BASE)
    assert detector.levels


@pytest.mark.parametrize("window", [8, 15, 20])
def test_a_window_has_blocks_of_two_samples_or_more(window: int) -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        LeakDetector(window=window)
    if window < 16:
        with pytest.raises(ValueError, match="too few"):
            judge([(s, s) for s in range(window)])


def test_memory_that_a_compiler_freed_hides_no_growth() -> None:
    said = described(lambda s: 200 * MIB * (s == EVERY) + LINE(s), 60)
    assert said == f"{FEW} (1 of 40): growing 2.8 MB a step so far"


def test_no_leak_is_found_only_in_as_many_samples_as_a_verdict_takes() -> None:
    rough = noise(4 * MIB)
    assert described(rough, 440) == f"{FEW} (39 of 40): no growth beyond noise so far"
    assert described(rough, 450) == "no leak found in 40 samples"
