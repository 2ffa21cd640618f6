"""How much faster, and how sure that is: intervals that hold through the stopping rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A ratio and the interval around it; above 1 is faster than the reference."""

    ratio: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Half of the interval, as a share of the ratio (on the log scale)."""
        raise NotImplementedError


def paired(reference: Sequence[float], other: Sequence[float], alpha: float) -> Estimate:
    """`reference / other`, block by block; the interval misses the truth with chance `alpha`.

    Where so few blocks cannot give so small an `alpha`, the interval is (0, inf).
    """
    raise NotImplementedError


def unpaired(reference: Sequence[float], other: Sequence[float], alpha: float) -> Estimate:
    """The same for measurements that were not taken side by side."""
    raise NotImplementedError


def median_interval(values: Sequence[float], alpha: float) -> tuple[float, float]:
    """An interval for the median, from order statistics."""
    raise NotImplementedError


def noise_floor(control: Estimate | None) -> float:
    """What the reference against itself differs by at most: nothing within it is claimed."""
    raise NotImplementedError


def claim(estimate: Estimate, floor: float) -> str:
    """`faster` or `slower` where the interval lies wholly beyond 1 and the ratio beyond the floor;
    `same` where the interval lies within the floor, or within 2 %; else `""`: not known.
    """
    raise NotImplementedError
