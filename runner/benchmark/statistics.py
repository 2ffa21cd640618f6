"""How much faster, and how sure that is: order statistics within processes, t between them.

docs/benchmarking.md explains why; probabilities of ranks are counted exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from runner.benchmark.result import SAME

CONFIDENCE = 0.95
ONE_PROCESS = 0.07
"""Where each arm had one process nothing within this is claimed: processes that differ by 2 %
(standard deviation) have ratios that differ by 2.8 %, and 99 % of those lie within it."""
LARGEST_LOG = 700.0  # whose exponential is still a float
COARSE = 0.05  # a noise floor above this says that the machine is noisy, not that arms are alike


@dataclass(frozen=True)
class Estimate:
    """A ratio and the interval around it; above 1 is faster than the reference."""

    ratio: float
    low: float
    high: float
    processes: int = 1  # of each arm; of one, how processes differ is not in the interval

    @property
    def interval(self) -> tuple[float, float]:
        """Both of its ends."""
        return self.low, self.high

    @property
    def half_width(self) -> float:
        """Half of the interval, as a share of the ratio (on the log scale); inf where open."""
        if self.low <= 0 or math.isinf(self.high):
            return math.inf
        return math.sqrt(self.high / self.low) - 1


def contrast(
    above: Sequence[Sequence[float]],
    below: Sequence[Sequence[float]],
    alpha: float,
    starts: Sequence[int] = (),
    between: float | None = None,
) -> Estimate:
    """The product of the series `above` over that of those `below`, block by block.

    Any ratio of ratios is one: an interaction, or two speed-ups compared with each other. The truth
    is the median of the ratio, which half of all blocks exceed; the interval misses it with chance
    `alpha`. Where so few blocks cannot give so small an `alpha` (5 % takes six) it is (0, inf).
    Blocks that not all have are left out.

    `starts` are the blocks at which all arms began in new processes. Where these are two or more,
    their log-ratios have a t interval, which misses with chance `between` (default `alpha`),
    however unequal their noise is (Ibragimov, Müller 2010). The result is never narrower than the
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
    rest = np.concatenate([part - mid for part, mid in zip(parts, centers, strict=True)]).tolist()
    low, high = median_interval(rest, alpha, lag1_rank_autocorrelation(rest))
    if (count := len(parts)) > 1:
        spread = float(np.std(centers, ddof=1)) / math.sqrt(count)
        half = spread * t_quantile(count - 1, alpha if between is None else between)
        low, high = min(low, -half), max(high, half)
    return Estimate(math.exp(center), _exp(center + low), _exp(center + high), count)


def _exp(value: float) -> float:
    return math.exp(value) if value < LARGEST_LOG else math.inf


@lru_cache(maxsize=256)
def t_quantile(degrees: int, alpha: float) -> float:
    """What Student's t exceeds in size with chance `alpha` (two-sided); inf for an alpha of 0.

    By bisection of the exact distribution (Abramowitz, Stegun 26.7.3 and 26.7.4).
    """
    if alpha <= 0:
        return math.inf
    low, high = 0.0, math.pi / 2
    while (angle := (low + high) / 2) not in (low, high):
        low, high = (angle, high) if _t_within(angle, degrees) < 1 - alpha else (low, angle)
    return math.sqrt(degrees) * math.tan(angle)


def _t_within(angle: float, degrees: int) -> float:
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
    """An interval for the median, from order statistics; (-inf, inf) where values are too few.

    Values with lag-1 autocorrelation r tell as much as (1 - r) / (1 + r) times as many independent
    ones: the interval is wider, or open.
    """
    rank = int(np.searchsorted(np.multiply(2, _tails(len(values))), alpha, side="right"))
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

    Of few values it is biased low; the interval that it widens makes up for that, as the number of
    values below a median is less correlated than their sum.
    """
    if len(values) < 3:
        return 0.0
    # what differs in the last digits is rounding, which has a rhythm of its own
    _, which, counts = np.unique(np.round(values, 9), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - counts / 2)[which] - len(values) / 2
    spread = float(ranks @ ranks)
    return max(0.0, float(ranks[1:] @ ranks[:-1]) / spread) if spread else 0.0


def unpaired(reference: Sequence[float], other: Sequence[float], alpha: float) -> Estimate:
    """The same ratio for measurements that were not taken side by side.

    The median of all ratios of one of each (Hodges, Lehmann 1963), and the Mann-Whitney test turned
    into an interval, by the normal distribution, which errs by up to one rank to the wide side. It
    holds for independent measurements that scatter alike.
    """
    a, b = (np.log(np.asarray(values, dtype=np.float64)) for values in (reference, other))
    if not len(a) or not len(b):
        return Estimate(math.nan, 0.0, math.inf)
    shifts = np.sort(np.subtract.outer(a, b), axis=None)
    deviation = math.sqrt(len(shifts) * (len(a) + len(b) + 1) / 12)
    rank = max(0, math.floor((len(shifts) + 1) / 2 + NormalDist().inv_cdf(alpha / 2) * deviation))
    low, high = (shifts[rank - 1], shifts[-rank]) if rank else (-math.inf, math.inf)
    return Estimate(math.exp(float(np.median(shifts))), math.exp(low), math.exp(high))


class Spending:
    """The chance with which the intervals of all looks so far have missed, counted exactly.

    An interval for a median misses when too few, or too many, of the blocks lie below the truth:
    as tails of a fair coin. So the chance that a look misses where none before it has can be
    counted for any numbers of blocks, and a look takes the narrowest interval with which all looks
    together stay within what they may (alpha spending: Lan, DeMets 1983).
    """

    def __init__(self, alpha: float = 1 - CONFIDENCE) -> None:
        self.alpha = alpha
        self.spent = 0.0
        self.blocks = 0
        self._unmissed = np.ones(1)  # the chance of so many tails, no look having missed

    def interim_alpha(self, blocks: int, share: float = 1.0) -> float:
        """What the intervals of this look may miss with by themselves, the `alpha` of `contrast`.

        The look may spend `share` of what is left; 1 for the last one. 0.0 where so few blocks have
        no interval for so little: then nothing is spent.
        """
        for _ in range(blocks - self.blocks):
            self._unmissed = (np.append(self._unmissed, 0) + np.append(0, self._unmissed)) / 2
        self.blocks = blocks
        allowed = (self.alpha - self.spent) * share * (1 + 1e-9)  # the last digit is rounding
        missing = 2 * np.cumsum(self._unmissed[: (blocks + 1) // 2])
        rank = int(np.searchsorted(missing, allowed, side="right"))
        if not rank:
            return 0.0
        self.spent += float(missing[rank - 1])
        self._unmissed[:rank] = self._unmissed[blocks + 1 - rank :] = 0.0
        return 2 * _tails(blocks)[rank - 1]

    def last(self, blocks: int) -> float:
        """The same, spending all that is left, for one arm that ends while others continue."""
        return deepcopy(self).interim_alpha(blocks)


def each_alpha(count: int) -> float:
    """What each of so many intervals may miss with, so that all hold together (Bonferroni)."""
    return (1 - CONFIDENCE) / max(1, count)


def fewest_blocks(alpha: float) -> int:
    """The fewest for which `contrast` gives an interval at all."""
    return 1 + math.ceil(-math.log2(alpha))


def noise_floor(control: Estimate | None) -> float:
    """What the reference against itself differs by at most: nothing within it is claimed.

    As a share: 0.03 is anything between 1/1.03 and 1.03. inf, so that nothing at all is claimed,
    for a control that was not measured or has no interval; at least `ONE_PROCESS` for one of a
    single process, which does not show how processes differ.
    """
    if control is None or control.low <= 0 or math.isnan(control.low):
        return math.inf
    least = ONE_PROCESS if control.processes == 1 else 0.0
    return max(control.high - 1, 1 / control.low - 1, least)


def claim(estimate: Estimate, floor: float) -> str:
    """`faster` or `slower` where the interval lies wholly beyond 1 and the ratio beyond the floor,
    and beyond 2 % in any case.
    `same` where the interval lies within the floor, or within 2 %; else `""`: not known.

    A floor above 5 % makes nothing the same: there the machine is noisy; nor does one process of
    each arm. A floor of inf claims nothing.
    """
    if math.isinf(floor):
        return ""
    beyond = 1 + max(floor, SAME)
    if estimate.low > 1 and estimate.ratio > beyond:
        return "faster"
    if estimate.high < 1 and estimate.ratio < 1 / beyond:
        return "slower"
    alike = max(floor, SAME) if floor <= COARSE else SAME
    if estimate.processes > 1 and 1 / (1 + alike) <= estimate.low and estimate.high <= 1 + alike:
        return "same"
    return ""


@lru_cache(maxsize=64)
def _tails(count: int) -> list[float]:
    """P(tails of so many fair tosses <= 0, 1, 2 …), up to half of them, from whole numbers."""
    ways, total, chances = 1, 0, []
    for tails in range((count + 1) // 2):
        total += ways
        chances.append(total / 2**count)
        ways = ways * (count - tails) // (tails + 1)
    return chances
