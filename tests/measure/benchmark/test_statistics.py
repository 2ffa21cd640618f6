import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from runner.measure.benchmark.blocks import StoppingRule
from runner.measure.benchmark.statistics import (
    ONE_PROCESS_NOISE,
    AlphaSpending,
    Estimate,
    classify_ratio,
    median_interval,
    min_blocks,
    noise_floor,
    paired_ratio,
    t_quantile,
    unpaired_ratio,
)
from tests.measure.benchmark.simulated_machine import (
    BASE,
    NOISES,
    PROCESSES,
    Noise,
    claimed,
    measure,
)


def test_arms_that_differ_by_the_same_in_every_block_have_an_interval_of_one_point() -> None:
    reference = np.linspace(1, 5, 12)
    estimate = paired_ratio([reference.tolist()], [(reference / 1.3).tolist()], 0.05)
    assert [estimate.ratio, estimate.low, estimate.high] == pytest.approx([1.3] * 3)
    assert estimate.half_width == pytest.approx(0)


def test_six_blocks_give_an_interval_at_5_percent_and_five_do_not() -> None:
    times = [1.0, 1.1, 0.9, 1.2, 0.95, 1.05]
    six = paired_ratio([times], [[1.0] * 6], 0.05)
    assert (six.low, six.high) == pytest.approx((0.9, 1.2))
    five = paired_ratio([times[:5]], [[1.0] * 5], 0.05)
    assert (five.low, five.high, five.half_width) == (0.0, math.inf, math.inf)
    assert five.ratio == pytest.approx(1.0)
    assert min_blocks(0.05) == 6


@pytest.mark.parametrize(
    ("count", "rank"), [(5, 0), (6, 1), (9, 2), (12, 3), (20, 6), (50, 18), (100, 40)]
)
def test_intervals_of_medians_end_at_the_tabulated_ranks(count: int, rank: int) -> None:
    ends = (rank - 1.0, float(count - rank)) if rank else (-math.inf, math.inf)
    assert median_interval(range(count), 0.05) == ends


def test_values_that_are_alike_are_worth_fewer() -> None:
    assert median_interval(range(100), 0.05, 0.0) == (39.0, 60.0)
    assert median_interval(range(100), 0.05, 0.6) == (29.0, 70.0)  # as much as 25 would know
    assert median_interval(range(8), 0.05, 0.6) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("fewer", "more", "rank"), [(4, 4, 1), (5, 5, 3), (8, 8, 14), (10, 20, 56)]
)
def test_unpaired_intervals_end_at_the_tabulated_ranks(fewer: int, more: int, rank: int) -> None:
    """Or one rank farther out, by the normal distribution."""
    a, b = 1.0 + np.arange(fewer), 1.0 + np.sqrt(np.arange(more))
    shifts = np.sort(np.divide.outer(a, b), axis=None)
    estimate = unpaired_ratio(a.tolist(), b.tolist(), 0.05)
    ends = [(shifts[r - 1], shifts[-r]) for r in (rank, max(1, rank - 1))]
    assert (estimate.low, estimate.high) in [pytest.approx(end) for end in ends]


def test_unpaired_intervals_cover_a_known_difference() -> None:
    draw = np.random.default_rng(0)
    a, b = np.exp(draw.normal(0, 0.05, (1000, 16))), np.exp(draw.normal(0, 0.05, (1000, 24))) / 1.3
    estimates = [unpaired_ratio(x.tolist(), y.tolist(), 0.05) for x, y in zip(a, b, strict=True)]
    assert sum(e.low <= 1.3 <= e.high for e in estimates) >= 940
    assert np.median([e.ratio for e in estimates]) == pytest.approx(1.3, rel=0.005)
    assert np.median([e.half_width for e in estimates]) < 0.05


def test_two_speed_ups_can_be_held_against_each_other() -> None:
    base, fast, faster = [1.0] * 8, [0.5] * 8, [0.25] * 8
    assert paired_ratio([base, fast], [faster, base], 0.05).ratio == pytest.approx(2.0)


def test_processes_that_differ_have_a_t_interval_over_them() -> None:
    times = np.exp(np.repeat([0.01, 0.03, 0.05], [4, 6, 5])).tolist()
    estimate = paired_ratio([times], [[1.0] * 15], 0.01, starts=[0, 4, 10], between_alpha=0.05)
    half = 4.3027 * 0.02 / math.sqrt(3)
    assert estimate.processes == 3
    assert np.log([estimate.ratio, estimate.low, estimate.high]) == pytest.approx(
        [0.03, 0.03 - half, 0.03 + half], abs=1e-5
    )
    alike = paired_ratio([[1.0, 1.1] * 12], [[1.0] * 24], 0.05, starts=[0, 12])
    assert (alike.low, alike.high) == pytest.approx((1.0, 1.1))  # as within processes


def test_quantiles_of_t_are_those_of_tables() -> None:
    found = [t_quantile(*at) for at in ((1, 0.05), (4, 0.05), (5, 0.01), (30, 0.1))]
    assert found == pytest.approx([12.7062, 2.7764, 4.0321, 1.6973], abs=1e-4)


def test_no_sequence_of_tosses_is_forgotten_in_what_looks_spend() -> None:
    """All 4,096 of 12 blocks, and whether one of three looks misses."""
    looks, spending = (6, 9, 12), AlphaSpending()
    alphas = [
        spending.interim_alpha(n, share) for n, share in zip(looks, (0.7, 0.3, 1.0), strict=True)
    ]
    signs = np.array(list(itertools.product((-1.0, 1.0), repeat=12)))
    missed = 0
    for row in signs:
        intervals = [
            median_interval(row[:n].tolist(), a) for n, a in zip(looks, alphas, strict=True)
        ]
        missed += any(low > 0 or high < 0 for low, high in intervals)
    assert missed / len(signs) == pytest.approx(spending.spent_alpha)
    assert 0.02 < spending.spent_alpha <= 0.05


def test_however_many_looks_there_are_they_miss_at_most_once_in_twenty() -> None:
    looks = [8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    spending = AlphaSpending()
    alphas = [spending.interim_alpha(n, 1 / 6 if n < looks[-1] else 1.0) for n in looks]
    tails = np.cumsum(np.random.default_rng(0).random((10_000, looks[-1])) < 0.5, axis=1)
    missed = np.zeros(len(tails), dtype=bool)
    for blocks, alpha in zip(looks, alphas, strict=True):
        rank = median_interval(range(blocks), alpha)[0] + 1
        below = tails[:, blocks - 1]
        missed |= (below < rank) | (below > blocks - rank)
    assert missed.mean() == pytest.approx(spending.spent_alpha, abs=0.005)
    assert 0.04 < spending.spent_alpha <= 0.05


@pytest.mark.parametrize(
    ("control", "floor"),
    [
        (None, math.inf),
        (Estimate(1.0, 0.98, 1.01, processes=5), 1 / 0.98 - 1),
        (Estimate(1.0, 0.99, 1.03), ONE_PROCESS_NOISE),  # how processes differ is not in it
        (Estimate(1.0, 0.0, math.inf), math.inf),
        (Estimate(math.nan, math.nan, math.nan), math.inf),
    ],
)
def test_the_noise_floor_is_the_farther_end_of_the_control(
    control: Estimate | None, floor: float
) -> None:
    assert noise_floor(control) == pytest.approx(floor)


@pytest.mark.parametrize(
    ("estimate", "floor", "expected"),
    [
        (Estimate(1.10, 1.08, 1.12), 0.02, "faster"),
        (Estimate(0.90, 0.88, 0.92), 0.02, "slower"),
        (Estimate(1.10, 0.99, 1.20), 0.02, ""),  # may be nothing
        (Estimate(1.10, 1.08, 1.12), 0.12, ""),  # the reference against itself differs by as much
        (Estimate(1.03, 1.02, 1.04), 0.04, "same"),
        (Estimate(1.01, 1.005, 1.015), 0.0, "same"),  # certain, and as little as processes differ
        (Estimate(1.019, 1.01, 1.028), 0.0, ""),
        (Estimate(1.30, 1.25, 1.35), 0.5, ""),  # nothing is "the same" on such a machine
        (Estimate(1.00, 0.0, math.inf), 0.0, ""),
        (Estimate(1.50, 1.4, 1.6), math.inf, ""),  # nothing is known of the noise
        (Estimate(1.50, math.nan, math.nan), 0.0, ""),
    ],
)
def test_a_claim_needs_the_interval_and_the_floor(
    estimate: Estimate, floor: float, expected: str
) -> None:
    assert classify_ratio(replace(estimate, processes=5), floor) == expected
    if expected == "same":
        assert classify_ratio(estimate, floor) == ""  # in one process each


@pytest.mark.parametrize(
    ("noise", "processes", "arms"),
    [
        (NOISES["each turn resembles the last (0.5)"], 1, 1),
        (PROCESSES["2 % from process to process"], 1, 4),
        (PROCESSES["2 % from process to process"], 5, 4),
    ],
)
def test_equal_arms_are_not_claimed_to_differ(noise: Noise, processes: int, arms: int) -> None:
    assert claimed(noise, StoppingRule(0.02, 60, processes=processes), runs=80, arms=arms) <= 0.05


def test_10_percent_at_2_percent_noise_are_claimed() -> None:
    effects = {BASE: 1.0, "control": 1.0, "fast": 1.1, "slow": 1 / 1.1}
    right = 0
    for seed in range(60):
        estimates = measure(Noise(0.02), seed, StoppingRule(0.02, 30), effects).estimates
        floor = noise_floor(estimates["control"])
        claims = [classify_ratio(estimates[arm], floor) for arm in ("fast", "slow")]
        right += claims == ["faster", "slower"]
    assert right >= 57
