from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from runner.core.device.leaks import LeakDetector, Trend, describe_leaks

MIB = 2**20
BASE = 300 * MIB
EVERY = 10  # steps between two samples
Curve = Callable[[int], float]


def watch(curve: Curve, steps: int) -> tuple[LeakDetector, list[Trend]]:
    """The detector of a run of so many steps, and the leaks that it found."""
    detector, leaks = LeakDetector(), []
    for step in range(EVERY, steps + 1, EVERY):
        size = BASE + int(curve(step))
        leak = detector.add_after_cleaning(step, size) if detector.add(step, size) else None
        leaks += [leak] if leak else []
    return detector, leaks


def noise(size: float) -> Curve:
    source = random.Random(0)
    return lambda step: source.uniform(-size, size)


def test_50_kb_a_step_are_found_within_500_steps_and_told_exactly() -> None:
    detector, (leak,) = watch(lambda step: 50_000 * step, 500)
    assert leak.last < 500 and detector.leaking
    assert leak.slope == pytest.approx(50_000) and leak.low <= 50_000 <= leak.high
    assert detector.describe() == "a leak: growing 50.0 KB a step"


ROUGH = noise(MIB)


@pytest.mark.parametrize(
    ("curve", "first", "last"),
    [
        (lambda s: (50_000 * s // 4096) * 4096 + ROUGH(s), 0, 1000),
        (lambda s: 50_000 * s + (s % 100) / 100 * 6 * MIB, 0, 1000),
        (lambda s: 3_000 * s, 1000, 40_000),
        (lambda s: max(0, s - 10_000) * 50_000, 10_000, 11_000),
    ],
    ids=["noise", "saw-tooth", "slow", "late"],
)
def test_a_leak_is_found_and_said_once_a_window(curve: Curve, first: int, last: int) -> None:
    detector, leaks = watch(curve, last)
    assert leaks and first < leaks[0].last and len(leaks) < 5
    assert detector.leaking and detector.plateau is None


HEALTHY: dict[str, Curve] = {
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


@pytest.mark.parametrize("curve", HEALTHY.values(), ids=HEALTHY)
def test_steady_memory_is_no_leak(curve: Curve) -> None:
    detector, leaks = watch(curve, 5000)
    assert leaks == [] and not detector.leaking
    assert detector.describe() == "no leak found in 495 samples"


@pytest.mark.parametrize("jitter", [0, MIB], ids=["exact", "noise"])
def test_growth_that_has_stopped_is_no_leak_any_more_and_a_later_leak_is_one(jitter: int) -> None:
    rough = noise(jitter)
    filled: Curve = lambda s: 50_000 * min(s, 1000) + rough(s)  # noqa: E731
    assert watch(filled, 1000)[0].leaking, "until then it cannot be told apart"
    detector, leaks = watch(filled, 2000)
    assert leaks and not detector.leaking
    assert detector.plateau is not None and 900 <= detector.plateau <= 1200
    stopped = f"no leak found in 195 samples; growth stopped at step {detector.plateau:,}"
    assert detector.describe() == stopped
    detector, _ = watch(lambda s: filled(s) + 50_000 * max(0, s - 2000), 3000)
    assert detector.leaking and "a leak: growing" in detector.describe()


def test_a_leak_is_found_though_cleaning_makes_a_step_down() -> None:
    detector, slack, leak = LeakDetector(), 0, None
    for step in range(EVERY, 501, EVERY):
        slack += 25_000 * EVERY
        if detector.add(step, BASE + 50_000 * step + slack):
            slack = 0
            leak = detector.add_after_cleaning(step, BASE + 50_000 * step) or leak
    assert leak is not None and leak.slope == pytest.approx(50_000) and detector.trend is leak


def test_garbage_that_is_collected_when_a_leak_is_suspected_is_none() -> None:
    detector, size, collected = LeakDetector(), 0, 0
    for step in range(EVERY, 5001, EVERY):
        size += 500_000
        if detector.add(step, BASE + size):
            size, collected = 0, collected + 1
            assert detector.add_after_cleaning(step, BASE) is None
    assert collected and not detector.leaking


LINE: Curve = lambda s: 2_800_000 * s  # noqa: E731
FEW = "too few samples for a leak verdict"


def test_the_verdicts_on_process_and_device_are_stated_once_where_they_agree() -> None:
    few, leak = watch(LINE, 420)[0], watch(LINE, 450)[0]
    texts = f"{FEW} (37 of 40)", "a leak: growing 2.8 MB a step"
    assert (few.describe(), leak.describe()) == texts
    assert describe_leaks({"process": few, "device": few}) == texts[0]
    both = describe_leaks({"process": few, "device": leak})
    assert both == f"process: {texts[0]}; device: {texts[1]}"


def test_leak_detection_of_a_resumed_run_settles_from_its_first_step() -> None:
    detector = LeakDetector()
    for step in range(7000, 7050, EVERY):
        detector.add(step, BASE * step)
    assert detector.samples == 0
    detector.add(7050, BASE)
    assert detector.samples == 1
