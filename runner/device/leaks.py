"""Detection of memory leaks: a robust slope over windows of several lengths."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from math import sqrt
from statistics import median

MIB = 2**20
WARM_UP = 50  # first steps, whose samples are ignored
WINDOW, QUARTER = 32, 8  # samples
NEEDED = WINDOW + QUARTER  # samples for a window and the cleanings that confirm it
BLOCK = 4  # samples, of which only the smallest counts
LEAST_SLOPE = 1024.0  # bytes per step that count as growth
Z = 2.576  # of a normal distribution, both tails of 1 %
LARGEST_RISE = 0.4  # share of the growth that may lie between two consecutive blocks
LASTING = 0.75  # least slope of the second half relative to the first: a warm-up slows down
SHARE = 0.02  # least growth relative to the size: long windows detect tiny growth
AFTER_CLEANING = 0.5  # least slope between two cleanings relative to the window's

Sample = tuple[int, int]  # step and bytes


@dataclass(frozen=True)
class Trend:
    """The slope of a window of samples in bytes per step, with a 99 % interval."""

    leaking: bool
    slope: float
    low: float
    high: float
    first: int  # step at which the window begins
    last: int
    size: int  # bytes, at its end


class LeakDetector:
    """Detects steady growth in (step, bytes) samples; `add` returns whether to clean memory.

    A window has eight blocks, of which only the minimum counts, to ignore the saw-tooth of garbage
    collection; the slope is a Theil-Sen estimate with Sen's interval (1968). After significant
    growth without a single jump or slowing down, memory is cleaned, and again a quarter of a
    window later; growth between the two cleanings is a leak. For slow leaks, each longer window
    takes the minima of pairs of samples of the previous one. A sample takes 1 µs.
    """

    def __init__(self, least: int = 8 * MIB) -> None:
        """`least` is the smallest growth of a leak, in bytes."""
        self.least = least
        self.windows: list[_Window] = []
        self.start: int | None = None
        self.trend: Trend | None = None  # the newest confirmed leak, else the newest trend
        self.leaking = False  # whether a leak was confirmed
        self._suspicious: list[_Window] = []

    @property
    def samples(self) -> int:
        """Number of samples after the warm-up; a verdict needs `NEEDED`."""
        return self.windows[0].count if self.windows else 0

    def add(self, step: int, size: int) -> bool:
        """Add a sample; True: clean the memory, and call `cleaned` with the new size."""
        self.start = step if self.start is None else self.start
        self._suspicious = []
        if step < self.start + WARM_UP:
            return False
        sample = (step, size)
        for window in self.windows:
            smaller = window.add(sample)
            self._judge(window)
            if smaller is None:
                break
            sample = smaller
        else:
            self.windows.append(_Window())
            self.windows[-1].add(sample)
        return bool(self._suspicious)

    def _judge(self, window: _Window) -> None:
        if len(window.samples) < WINDOW or window.count % QUARTER:
            return
        trend = judge(window.samples, self.least)
        if not self.leaking:
            self.trend = trend
        if trend.leaking:
            window.suspected = window.suspected or trend
        if window.suspected is not None and not window.confirmed:
            self._suspicious.append(window)

    def cleaned(self, step: int, size: int) -> Trend | None:
        """Add the size after a cleaning; return the trend if it confirms a leak, else None."""
        confirmed: Trend | None = None
        for window in self._suspicious:
            suspected, before = window.suspected, window.clean
            if suspected is None or before is None:
                window.clean = step, size
                continue
            window.suspected = window.clean = None
            slope = (size - before[1]) / (step - before[0])
            if slope > max(LEAST_SLOPE, AFTER_CLEANING * suspected.slope):
                window.confirmed = self.leaking = True
                low, high = sorted((slope, suspected.slope))  # the suspected one may count garbage
                confirmed = replace(suspected, slope=low, low=low, high=high, last=step, size=size)
                self.trend = confirmed
        self._suspicious = []
        return confirmed

    def describe(self) -> str:
        """Return the verdict, or the number of samples so far."""
        if self.leaking and self.trend is not None:
            return f"a leak: growing {_rate(self.trend.slope)} a step"
        if self.samples >= NEEDED:
            return f"no leak found in {self.samples:,} samples"
        return f"too few samples for a leak verdict ({self.samples} of {NEEDED})"


@dataclass
class _Window:
    """The newest samples of one window length."""

    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=WINDOW))
    count: int = 0
    confirmed: bool = False
    suspected: Trend | None = None
    clean: Sample | None = None  # after the first cleaning
    half: Sample | None = None

    def add(self, sample: Sample) -> Sample | None:
        self.samples.append(sample)
        self.count += 1
        if self.half is None:
            self.half = sample
            return None
        smaller, self.half = min(self.half, sample, key=lambda s: s[1]), None
        return smaller


def describe_leaks(detectors: Mapping[str, LeakDetector]) -> str:
    """Return the verdicts on process and device as text, once if they are the same."""
    texts = {name: detector.describe() for name, detector in detectors.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{name}: {text}" for name, text in texts.items())


def judge(window: Sequence[Sample], least: int) -> Trend:
    """Return the trend of a window, oldest sample first; `least` as in LeakDetector."""
    samples = list(window)
    blocks = [samples[i : i + BLOCK] for i in range(0, len(samples), BLOCK)]
    floors = [min(block, key=lambda s: s[1]) for block in blocks]
    slope, low, high = _sen(floors)
    leaking = _is_steady(floors, low, least)
    return Trend(leaking, slope, low, high, samples[0][0], samples[-1][0], floors[-1][1])


def _sen(points: list[Sample]) -> tuple[float, float, float]:
    """Return the median slope of all pairs of points, and Sen's interval by ranks."""
    slopes = sorted((b - a) / (t - s) for (s, a), (t, b) in combinations(points, 2) if t > s)
    count, pairs = len(points), len(slopes)
    if not pairs:
        return 0.0, 0.0, 0.0
    width = Z * sqrt(count * (count - 1) * (2 * count + 5) / 18)
    lower, upper = int((pairs - width) / 2), int((pairs + width) / 2) + 1
    return median(slopes), slopes[max(0, lower)], slopes[min(pairs - 1, upper)]


def _is_steady(points: list[Sample], low: float, least: int) -> bool:
    """Return whether memory grew enough and significantly, not in one jump nor slowing down."""
    values = [size for _, size in points]
    grown = values[-1] - values[0]
    if grown < max(least, SHARE * values[-1]) or low <= LEAST_SLOPE:
        return False
    if max(b - a for a, b in pairwise(values)) > LARGEST_RISE * grown:
        return False
    (start, first), (middle, half), (end, last) = points[0], points[len(points) // 2], points[-1]
    return (last - half) / (end - middle) >= LASTING * (half - first) / (middle - start)


def _rate(slope: float) -> str:
    return f"{slope / 1e6:,.1f} MB" if slope >= 1e6 else f"{slope / 1e3:,.1f} KB"
