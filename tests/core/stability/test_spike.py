"""What is usual for a number, and from where on it is a spike."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest

from runner.core.schemas.stability import SpikeConfig, SpikeQuantity
from runner.core.stability.spike import RollingBaseline, SpikeDetector

EVERY = 10


def config(**more: float) -> SpikeConfig:
    usual = {"window": 50, "at_least": 20, "threshold": 8, "ratio": 3, "floor": 0}
    return SpikeConfig(**{**usual, **more})  # type: ignore[arg-type]


def noise(count: int, level: float = 1.0, seed: int = 0) -> list[float]:
    draw = random.Random(seed)  # noqa: S311
    return [level * math.exp(draw.gauss(0, 0.2)) for _ in range(count)]


def watched(spikes: SpikeDetector, losses: Iterable[float], start: int = 0) -> list[int]:
    """The steps that are spikes, as a run would see them: a stretch late."""
    found, stretch = [], []
    for step, loss in enumerate(losses, start + 1):
        if loss > spikes.limits_at(step).loss:
            found.append(step)
        stretch.append((step, loss))
        if step % EVERY == 0:
            for number, value in stretch:
                spikes.add(number, {"loss": value, "grad_norm": value})
            spikes.update_limits(step, step + EVERY)
            stretch = []
    return found


def test_an_outlier_is_a_spike_and_usual_values_are_not() -> None:
    losses = noise(300)
    losses[149] = 50.0
    assert watched(SpikeDetector(config(), True), losses) == [150]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_bad_value_moves_no_limit(bad: float) -> None:
    clean, poisoned = RollingBaseline(config()), RollingBaseline(config())
    for value in noise(100):
        clean.add(value, clean.limit())
        poisoned.add(value, poisoned.limit())
    before = poisoned.limit()
    for _ in range(3):
        poisoned.add(bad, poisoned.limit())
    assert before <= poisoned.limit() <= (before * 2 if bad == 1e30 else before)
    for value in noise(50, seed=1):
        clean.add(value, clean.limit())
        poisoned.add(value, poisoned.limit())
    assert poisoned.limit() == pytest.approx(clean.limit(), rel=0.3)


def test_a_lasting_change_is_accepted_after_a_while() -> None:
    losses = noise(200) + noise(400, level=30.0)
    spikes = watched(SpikeDetector(config(), True), losses)
    assert spikes[0] == 201
    assert 60 < len(spikes) < 150  # each moves the limit by no more than the limit itself
    assert max(spikes) < 400


def test_the_limit_is_the_highest_of_three() -> None:
    values = [0.9, 1.0, 1.1] * 10  # median 1, median distance 0.1

    def limit(**more: float) -> float:
        usual = RollingBaseline(config(**{"threshold": 0.001, "ratio": 1.0, **more}))
        for value in values:
            usual.add(value, math.inf)
        return usual.limit()

    assert limit(threshold=10) == pytest.approx(1 + 10 * 1.4826 * 0.1)
    assert limit(ratio=7) == pytest.approx(7)
    assert limit(floor=9) == pytest.approx(9 * 1.1)


def test_a_negative_loss_and_one_that_never_changes_are_no_spikes() -> None:
    falling = [-10.0 - 0.1 * i for i in range(200)]
    assert watched(SpikeDetector(config(), True), falling) == []
    assert watched(SpikeDetector(config(), True), [*falling, 500.0]) == [201]
    assert watched(SpikeDetector(config(), True), [0.0] * 100 + [1e-3]) == []


def test_only_what_is_watched_has_a_limit() -> None:
    for watch, finite in ((SpikeQuantity.loss, "loss"), (SpikeQuantity.grad_norm, "grad_norm")):
        spikes = SpikeDetector(SpikeConfig(watch=watch), True)
        for step, value in enumerate(noise(60), 1):
            spikes.add(step, {"loss": value, "grad_norm": value})
        spikes.update_limits(60, 70)
        limits = vars(spikes.limits_at(71))
        assert [k for k in ("loss", "grad_norm") if limits[k] < math.inf] == [finite]
    assert not SpikeDetector(SpikeConfig(enabled=False), True).baselines
    assert not SpikeDetector(SpikeConfig(), False).baselines


@pytest.mark.parametrize("cut", [30, 60, 100])
def test_limits_go_on_from_their_state(cut: int) -> None:
    losses = noise(200)
    losses[140] = 99.0
    whole, first, second = (SpikeDetector(config(), True) for _ in range(3))
    watched(whole, losses)
    watched(first, losses[:cut])
    second.load(first.state())
    assert watched(second, losses[cut:], cut) == [141]
    assert second.state() == whole.state()
