"""Memory leak detection: a robust slope over windows of several lengths."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from math import sqrt
from statistics import median

MIB = 2**20
WARM_UP_STEPS = 50  # first steps, whose samples are ignored
WINDOW, QUARTER = 32, 8  # samples
MIN_SAMPLES = WINDOW + QUARTER  # samples for a window and the cleaning that confirms it
BLOCK = 4  # samples per block; the smallest one counts
MIN_SLOPE = 1024.0  # bytes per step that count as growth
Z = 2.576  # of a normal distribution, two-sided 1 %
MAX_RISE_SHARE = 0.4  # largest share of the growth between two consecutive blocks
MIN_SLOPE_RATIO = 0.75  # of the second half's slope to the first's: a warm-up slows down
MIN_GROWTH_SHARE = 0.02  # of the growth to the size: long windows detect any small growth
MIN_CLEANED_RATIO = 0.5  # of the slope between two cleanings to that of the window
PLATEAU = WINDOW // 2  # samples of a leak's window without growth, after which it was none
MAX_PLATEAU_RATIO = 0.25  # of the growth in a plateau to that of the leak in as many steps

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
    """Finds steady growth in (step, bytes) samples; `add` returns when memory should be cleaned.

    A window is cut into eight blocks, and the smallest sample of each counts, which removes the
    saw-tooth of garbage collection; the Theil-Sen estimator with Sen's interval (1968) gives the
    slope. If growth is significant, without a single jump or slowing down, memory is cleaned, and
    again a quarter of a window later; growth between the two cleanings is a leak. Each longer
    window has minima of two samples of the one before, for slow leaks. A leak that stops growing
    was none: a cache that is full. A sample takes 1 µs.
    """

    def __init__(self, least: int = 8 * MIB) -> None:
        """`least` is the smallest growth, in bytes, that counts as a leak."""
        self.least = least
        self.windows: list[_Window] = []
        self.start: int | None = None
        self.trend: Trend | None = None  # the newest confirmed leak, else the newest trend
        self.plateau: int | None = None  # step at which growth taken for a leak stopped
        self._suspicious: list[_Window] = []

    @property
    def leaking(self) -> bool:
        """Whether a leak was confirmed, and still grows."""
        return any(window.confirmed for window in self.windows)

    @property
    def samples(self) -> int:
        """The number of samples after the warm-up; a verdict needs `MIN_SAMPLES`."""
        return self.windows[0].count if self.windows else 0

    def add(self, step: int, size: int) -> bool:
        """Add a sample; True asks to clean memory and to call `add_after_cleaning`, once it is."""
        self.start = step if self.start is None else self.start
        if step < self.start + WARM_UP_STEPS:
            return False
        sample = (step, size)
        for window in self.windows:
            smaller = window.add(sample)
            self._check_window(window)
            if smaller is None:
                break
            sample = smaller
        else:
            self.windows.append(_Window())
            self.windows[-1].add(sample)
        return bool(self._suspicious)

    def _check_window(self, window: _Window) -> None:
        if len(window.samples) < WINDOW or window.count % QUARTER:
            return
        trend = estimate_trend(window.samples, self.least)
        if window.has_stopped():
            window.confirmed, self.plateau = None, window.samples[-PLATEAU][0]
            for one in self.windows:  # which were suspected of the same growth
                one.suspected = one.after_first_cleaning = None
        if not self.leaking:
            self.trend = trend
        if window.confirmed is None:
            window.suspected = window.suspected or (trend if trend.leaking else None)
            if window.suspected is not None and window not in self._suspicious:
                self._suspicious.append(window)

    def add_after_cleaning(self, step: int, size: int) -> Trend | None:
        """Add the size right after a cleaning; return the trend if it confirms a leak."""
        confirmed: Trend | None = None
        for window in self._suspicious:
            suspected, before = window.suspected, window.after_first_cleaning
            if suspected is None or before is None:
                window.after_first_cleaning = step, size
                continue
            window.suspected = window.after_first_cleaning = None
            slope = (size - before[1]) / (step - before[0])
            if slope > max(MIN_SLOPE, MIN_CLEANED_RATIO * suspected.slope):
                low, high = sorted((slope, suspected.slope))  # the first cleaning removed garbage
                confirmed = replace(suspected, slope=low, low=low, high=high, last=step, size=size)
                window.confirmed = self.trend = confirmed
        self._suspicious = []
        return confirmed

    def describe(self) -> str:
        """Return the verdict, or the number of samples so far."""
        if self.leaking and self.trend is not None:
            return f"a leak: growing {_format_rate(self.trend.slope)} a step"
        if self.samples >= MIN_SAMPLES:
            stopped = "" if self.plateau is None else f"; growth stopped at step {self.plateau:,}"
            return f"no leak found in {self.samples:,} samples{stopped}"
        return f"too few samples for a leak verdict ({self.samples} of {MIN_SAMPLES})"


@dataclass(eq=False)
class _Window:
    """The newest samples; the smaller of each two goes to the next window."""

    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=WINDOW))
    count: int = 0
    confirmed: Trend | None = None  # a leak that still grows
    suspected: Trend | None = None
    after_first_cleaning: Sample | None = None
    pending: Sample | None = None  # first of two samples

    def add(self, sample: Sample) -> Sample | None:
        self.samples.append(sample)
        self.count += 1
        if self.pending is None:
            self.pending = sample
            return None
        smaller, self.pending = min(self.pending, sample, key=lambda s: s[1]), None
        return smaller

    def has_stopped(self) -> bool:
        """Whether the newest samples, all later than the confirmed leak, do not grow with it."""
        newest = list(self.samples)[-PLATEAU:]
        if self.confirmed is None or newest[0][0] < self.confirmed.last:
            return False
        (start, first), *later = _block_floors(newest)
        grown = max(size for _, size in later) - first
        return grown < MAX_PLATEAU_RATIO * self.confirmed.slope * (later[-1][0] - start)


def describe_leaks(detectors: Mapping[str, LeakDetector]) -> str:
    """Return the verdicts on process and device as text; one if they are the same."""
    texts = {name: detector.describe() for name, detector in detectors.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{name}: {text}" for name, text in texts.items())


def estimate_trend(window: Sequence[Sample], min_growth: int) -> Trend:
    """Return the trend of a window, oldest sample first."""
    samples = list(window)
    floors = _block_floors(samples)
    slope, low, high = _theil_sen(floors)
    leaking = _is_steady(floors, low, min_growth)
    return Trend(leaking, slope, low, high, samples[0][0], samples[-1][0], floors[-1][1])


def _block_floors(samples: list[Sample]) -> list[Sample]:
    blocks = [samples[i : i + BLOCK] for i in range(0, len(samples), BLOCK)]
    return [min(block, key=lambda s: s[1]) for block in blocks]


def _theil_sen(points: list[Sample]) -> tuple[float, float, float]:
    """Return the median of all pairwise slopes, and Sen's interval by ranks."""
    slopes = sorted((b - a) / (t - s) for (s, a), (t, b) in combinations(points, 2) if t > s)
    count, pairs = len(points), len(slopes)
    if not pairs:
        return 0.0, 0.0, 0.0
    width = Z * sqrt(count * (count - 1) * (2 * count + 5) / 18)
    lower, upper = int((pairs - width) / 2), int((pairs + width) / 2) + 1
    return median(slopes), slopes[max(0, lower)], slopes[min(pairs - 1, upper)]


def _is_steady(points: list[Sample], low: float, min_growth: int) -> bool:
    """Whether memory grew enough, significantly, without a single jump or slowing down."""
    values = [size for _, size in points]
    growth = values[-1] - values[0]
    if growth < max(min_growth, MIN_GROWTH_SHARE * values[-1]) or low <= MIN_SLOPE:
        return False
    if max(b - a for a, b in pairwise(values)) > MAX_RISE_SHARE * growth:
        return False
    (start, first), (middle, half), (end, last) = points[0], points[len(points) // 2], points[-1]
    return (last - half) / (end - middle) >= MIN_SLOPE_RATIO * (half - first) / (middle - start)


def _format_rate(slope: float) -> str:
    return f"{slope / 1e6:,.1f} MB" if slope >= 1e6 else f"{slope / 1e3:,.1f} KB"
