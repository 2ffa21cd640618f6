"""Speedup estimates: order statistics within processes, a t interval between processes.

See docs/explanation/statistics.md. Probabilities of ranks are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from runner.measure.benchmark.result import NEGLIGIBLE

CONFIDENCE = 0.95
# noise floor where each arm had one process: if processes differ by 2 % (standard deviation),
# their ratios differ by 2.8 %, and 99 % of those lie within this
ONE_PROCESS_NOISE = 0.07
LARGEST_LOG = 700.0  # largest argument whose exp is a finite float
COARSE_NOISE = 0.05  # above this noise floor the machine is too noisy to call arms the same


@dataclass(frozen=True)
class Estimate:
    """A ratio and the interval around it; above 1 is faster than the reference."""

    ratio: float
    low: float
    high: float
    processes: int = 1  # per arm; with one, the interval omits variance between processes

    @property
    def interval(self) -> tuple[float, float]:
        """The interval as (low, high)."""
        return self.low, self.high

    @property
    def half_width(self) -> float:
        """Half the interval's width on the log scale, as a share of the ratio; inf if unbounded."""
        if self.low <= 0 or math.isinf(self.high):
            return math.inf
        return math.sqrt(self.high / self.low) - 1


def paired_ratio(
    above: Sequence[Sequence[float]],
    below: Sequence[Sequence[float]],
    alpha: float,
    starts: Sequence[int] = (),
    between_alpha: float | None = None,
) -> Estimate:
    """Estimate the product of the series `above` over that of the series `below`, block by block.

    With more than two series it estimates interactions or ratios of speedups. The estimand is the
    median of the ratio; the interval misses it with probability `alpha`, and is (0, inf) with too
    few blocks for that `alpha` (5 % takes six). Only blocks that all series have are used.

    `starts` are the blocks at which all arms began in new processes. If there are two or more,
    their mean log-ratio has a t interval with miss probability `between_alpha` (default `alpha`),
    valid for unequal variances (Ibragimov, Müller 2010). The result is never narrower than the
    interval of the blocks within processes.
    """
    series = [*above, *below]
    blocks = min(len(values) for values in series)
    if not blocks:
        return Estimate(math.nan, 0.0, math.inf)
    logs = np.log(np.asarray([values[:blocks] for values in series], dtype=np.float64))
    ratios = logs[: len(above)].sum(0) - logs[len(above) :].sum(0)
    parts = [part for part in np.split(ratios, [n for n in starts if n < blocks]) if len(part)]
    centers = [float(np.median(part)) for part in parts]
    center = float(np.mean(centers))
    centered = [part - mid for part, mid in zip(parts, centers, strict=True)]
    residuals = np.concatenate(centered).tolist()
    low, high = median_interval(residuals, alpha, lag1_rank_autocorrelation(residuals))
    if (count := len(parts)) > 1:
        standard_error = float(np.std(centers, ddof=1)) / math.sqrt(count)
        t_alpha = alpha if between_alpha is None else between_alpha
        margin = standard_error * t_quantile(count - 1, t_alpha)
        low, high = min(low, -margin), max(high, margin)
    return Estimate(math.exp(center), _exp(center + low), _exp(center + high), count)


def _exp(value: float) -> float:
    return math.exp(value) if value < LARGEST_LOG else math.inf


@lru_cache(maxsize=256)
def t_quantile(degrees: int, alpha: float) -> float:
    """Return the two-sided quantile of Student's t: P(|t| > q) = `alpha`; inf for `alpha` <= 0.

    By bisection of the exact distribution (Abramowitz, Stegun 26.7.3 and 26.7.4).
    """
    if alpha <= 0:
        return math.inf
    low, high = 0.0, math.pi / 2
    while (angle := (low + high) / 2) not in (low, high):
        low, high = (angle, high) if _t_probability(angle, degrees) < 1 - alpha else (low, angle)
    return math.sqrt(degrees) * math.tan(angle)


def _t_probability(angle: float, degrees: int) -> float:
    """P(|t| < sqrt(degrees) tan(angle))."""
    odd, total = degrees % 2, 0.0
    term = math.cos(angle) if odd else 1.0
    for number in range(2 + odd, degrees + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (number - 1) / number
    inner = math.sin(angle) * total
    return 2 / math.pi * (angle + inner) if odd else inner


def median_interval(
    values: Sequence[float], alpha: float, autocorrelation: float = 0.0
) -> tuple[float, float]:
    """Return a confidence interval for the median, by order statistics; (-inf, inf) if too few.

    With lag-1 autocorrelation r the effective sample size is (1 - r) / (1 + r) times as large, so
    the interval is wider, or unbounded.
    """
    two_sided = np.multiply(2, _tail_probabilities(len(values)))
    rank = int(np.searchsorted(two_sided, alpha, side="right"))
    if rank and autocorrelation > 0:
        middle = len(values) / 2
        factor = math.sqrt((1 + autocorrelation) / (1 - autocorrelation))
        rank = max(0, round(middle - (middle - rank) * factor))
    if not rank:
        return -math.inf, math.inf
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    return float(ordered[rank - 1]), float(ordered[-rank])


def lag1_rank_autocorrelation(values: Sequence[float]) -> float:
    """Spearman lag-1 autocorrelation, clipped to [0, 1). Rank-based: one stall weighs as one value.

    Biased low for few values; that is compensated, since the number of values below a median is
    less correlated than their sum.
    """
    if len(values) < 3:
        return 0.0
    # differences in the last digits are rounding errors, which are autocorrelated
    _, inverse, counts = np.unique(np.round(values, 9), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - counts / 2)[inverse] - len(values) / 2
    squares = float(ranks @ ranks)
    return max(0.0, float(ranks[1:] @ ranks[:-1]) / squares) if squares else 0.0


def unpaired_ratio(reference: Sequence[float], other: Sequence[float], alpha: float) -> Estimate:
    """Estimate the ratio `reference` / `other` from unpaired measurements.

    The Hodges-Lehmann (1963) estimator on logs, with the interval of the Mann-Whitney test by the
    normal approximation, at most one rank too wide, for independent samples of equal spread.
    """
    a, b = (np.log(np.asarray(values, dtype=np.float64)) for values in (reference, other))
    if not len(a) or not len(b):
        return Estimate(math.nan, 0.0, math.inf)
    shifts = np.sort(np.subtract.outer(a, b), axis=None)
    deviation = math.sqrt(len(shifts) * (len(a) + len(b) + 1) / 12)
    rank = max(0, math.floor((len(shifts) + 1) / 2 + NormalDist().inv_cdf(alpha / 2) * deviation))
    low, high = (shifts[rank - 1], shifts[-rank]) if rank else (-math.inf, math.inf)
    return Estimate(math.exp(float(np.median(shifts))), math.exp(low), math.exp(high))


class AlphaSpending:
    """Exact alpha spending over interim analyses (Lan, DeMets 1983).

    The interval for a median misses when too few or too many blocks lie below the true value, as
    with tosses of a fair coin. So the probability that an analysis is the first to miss is exact,
    and each takes the narrowest interval that keeps all of them within their total alpha.
    """

    def __init__(self, alpha: float = 1 - CONFIDENCE) -> None:
        self.alpha = alpha
        self.spent_alpha = 0.0
        self.blocks = 0
        self._unmissed = np.ones(1)  # P(number of tails, and no analysis has missed yet)

    def interim_alpha(self, blocks: int, share: float = 1.0) -> float:
        """Return the marginal miss probability of an analysis: `alpha` of `paired_ratio`.

        It may spend `share` of the alpha left (1: the last one). 0.0, unspent, for too few
        `blocks`.
        """
        for _ in range(blocks - self.blocks):
            self._unmissed = (np.append(self._unmissed, 0) + np.append(0, self._unmissed)) / 2
        self.blocks = blocks
        available_alpha = (self.alpha - self.spent_alpha) * share * (1 + 1e-9)  # 1e-9: rounding
        miss_probability = 2 * np.cumsum(self._unmissed[: (blocks + 1) // 2])
        rank = int(np.searchsorted(miss_probability, available_alpha, side="right"))
        if not rank:
            return 0.0
        self.spent_alpha += float(miss_probability[rank - 1])
        self._unmissed[:rank] = self._unmissed[blocks + 1 - rank :] = 0.0
        return 2 * _tail_probabilities(blocks)[rank - 1]

    def final_alpha(self, blocks: int) -> float:
        """Return the alpha of one arm's last analysis; the state for the others is unchanged."""
        return deepcopy(self).interim_alpha(blocks)


def bonferroni_alpha(count: int) -> float:
    """Return the alpha of each of `count` intervals so that all hold jointly (Bonferroni)."""
    return (1 - CONFIDENCE) / max(1, count)


def min_blocks(alpha: float) -> int:
    """Return the fewest blocks for which `paired_ratio` gives an interval."""
    return 1 + math.ceil(-math.log2(alpha))


def noise_floor(control: Estimate | None) -> float:
    """Return the largest deviation of the control's interval from 1, as a share.

    A floor of 0.03 covers 1/1.03 to 1.03. It is inf, so that nothing is claimed, without an
    interval of the control; and at least `ONE_PROCESS_NOISE` if the control had one process.
    """
    if control is None or control.low <= 0 or math.isnan(control.low):
        return math.inf
    least = ONE_PROCESS_NOISE if control.processes == 1 else 0.0
    return max(control.high - 1, 1 / control.low - 1, least)


def classify_ratio(estimate: Estimate, floor: float) -> str:
    """Return `faster`, `slower`, `same`, or "" where no claim can be made.

    `faster` or `slower`: the interval excludes 1 and the ratio is beyond both `floor` and 2 %.
    `same`: the interval lies within `floor` or 2 %, whichever is larger. A floor above 5 % (noise)
    counts as 2 % there, and one process per arm is never `same`. An infinite floor claims nothing.
    """
    if math.isinf(floor):
        return ""
    limit = 1 + max(floor, NEGLIGIBLE)
    if estimate.low > 1 and estimate.ratio > limit:
        return "faster"
    if estimate.high < 1 and estimate.ratio < 1 / limit:
        return "slower"
    same = 1 + (max(floor, NEGLIGIBLE) if floor <= COARSE_NOISE else NEGLIGIBLE)
    if estimate.processes > 1 and 1 / same <= estimate.low and estimate.high <= same:
        return "same"
    return ""


@lru_cache(maxsize=64)
def _tail_probabilities(count: int) -> list[float]:
    """Return P(tails of `count` fair tosses <= 0, 1, 2 …) up to half of them, exactly."""
    combinations, total, probabilities = 1, 0, []
    for tails in range((count + 1) // 2):
        total += combinations
        probabilities.append(total / 2**count)
        combinations = combinations * (count - tails) // (tails + 1)
    return probabilities
