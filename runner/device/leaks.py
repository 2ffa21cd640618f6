"""Whether memory grows without end: a robust slope over windows of several lengths."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

MIB = 2**20
BLOCKS = 8  # of a window; each counts by its smallest sample
FEWEST = 4  # samples since the smallest one, for growth to be stated without a verdict
Z = 2.576  # of a normal distribution, both tails of 1 %
MOST_LEVELS = 24
EVEN = 0.4  # largest share of the growth that may come in one of the seven steps between blocks
LASTING = 0.75  # of the first half's slope, that the second must still have …
STILL = 0.6  # … and at the look that confirms it: the heap's own steps make slopes rough
SHARE = 0.02  # of what is held, that must have been added: long windows see every small thing
GROWS_ON = 0.5  # of the slope, that must be left between two cleanings


@dataclass(frozen=True)
class Trend:
    """What a window of samples says. Slopes in bytes a step, with a 99 % interval."""

    leaking: bool
    slope: float
    low: float
    high: float
    first: int  # step at which the window begins
    last: int
    held: int  # bytes, at its end
    reason: str  # why it is, or is not, called a leak

    @property
    def grown(self) -> int:
        """Bytes added over the window, by the slope."""
        return round(self.slope * (self.last - self.first))


class LeakDetector:
    """Told how many bytes are held at a step, says when they grow steadily.

    A window is cut into eight blocks, of which the smallest sample counts: a saw-tooth of garbage
    collection and the peaks of validations vanish. Over these, the Theil-Sen estimator (the median
    of the slopes between all pairs) with Sen's interval (Sen 1968) gives the slope. It is a leak
    if the interval's lower end is above `least_slope`, the window has grown by `least` bytes and
    by 2 % of what is held, no single jump makes up most of that, and the second half grows
    nearly as fast as the first, which a warm-up does not; twice in a row. When it `suspects` one,
    whoever asks may collect garbage and say by `cleaned` what is left. That makes a step down in
    the window, so where the second look no longer sees a leak it asks for another cleaning: what
    is held after both is free of garbage and of the heap's slack, and says whether it grew on.

    Windows of `window` samples, then of twice as many and so on, each made of the minima of the
    one before, so that slow leaks are found late rather than never. The first `warm_up` steps are
    left out. Telling it takes 1 µs, and at each fourth of a window 30 µs.
    """

    def __init__(
        self,
        window: int = 32,
        warm_up: int = 50,
        least: int = 8 * MIB,
        least_slope: float = 1024.0,
    ) -> None:
        if window < 2 * BLOCKS or window % BLOCKS:
            raise ValueError(f"a window of {window} samples; use a multiple of 8, from 16 on")
        self.window, self.warm_up = window, warm_up
        self.least, self.least_slope = least, least_slope
        self.levels: list[_Level] = []
        self.start: int | None = None
        self.trend: Trend | None = None  # the newest confirmed leak, else the newest trend
        self.leaking = False  # a leak was confirmed
        self.suspects = False  # garbage should be collected now, and `cleaned` be told
        self.recent: deque[tuple[int, int]] = deque(maxlen=window)  # the warm-up included
        self.highest = 0  # bytes, of the samples before those
        self._asking: list[_Level] = []

    @property
    def samples(self) -> int:
        """Samples after the warm-up; a verdict takes `needed` of them."""
        return self.levels[0].count if self.levels else 0

    @property
    def needed(self) -> int:
        """Samples for a window, and for the second one that confirms it."""
        return self.window + self.window // 4

    def growth(self) -> tuple[float, int] | None:
        """Bytes a step, and since which step, by the newest samples; None within noise.

        No verdict: it takes a few samples only. Once there are enough for one, what they grow to
        must be more than was ever held, so that the rise of a saw-tooth is none.
        """
        samples = list(self.recent)
        for size in (self.window, 2 * BLOCKS, BLOCKS):
            lowest = min(samples[-size:], key=lambda s: (s[1], -s[0]), default=(0, 0))
            points = [sample for sample in samples[-size:] if sample[0] >= lowest[0]]
            slope = _even_slope(points, self.least, self.least_slope)
            if slope is not None:
                older = [held for step, held in samples if step < lowest[0]]
                new = points[-1][1] > max([self.highest, *older])
                return (slope, lowest[0]) if new or self.samples < self.needed else None
        return None

    def describe(self) -> str:
        """What can be said of a leak, and by how many samples."""
        growth = self.growth()
        if self.leaking and self.trend is not None:
            return f"a leak: growing {_rate(self.trend.slope)} a step"
        if self.samples < self.needed:
            said = f"too few samples for a leak verdict ({self.samples} of {self.needed})"
            if growth is not None:
                return f"{said}: growing {_rate(growth[0])} a step so far"
            return said if len(self.recent) < FEWEST else f"{said}: no growth beyond noise so far"
        if growth is not None:
            slope, since = growth
            said = f"no leak confirmed in {self.samples:,} samples, but growing "
            return f"{said}{_rate(slope)} a step since step {since:,}"
        return f"no leak found in {self.samples:,} samples"

    def add(self, step: int, held: int) -> Trend | None:
        """Take a sample; the trend, if this is when a leak is found (again, at a longer window)."""
        self.suspects, self._asking = False, []
        if self.start is None:
            self.start = step
        if len(self.recent) == self.window:
            self.highest = max(self.highest, self.recent[0][1])
        self.recent.append((step, held))
        if step < self.start + self.warm_up:
            return None
        found: Trend | None = None
        sample: tuple[int, int] | None = (step, held)
        for depth in range(MOST_LEVELS):
            if sample is None:
                break
            if depth == len(self.levels):
                self.levels.append(_Level(self.window))
            level = self.levels[depth]
            sample = level.add(sample)
            if len(level.samples) == self.window and level.count % (self.window // 4) == 0:
                found = self._look(level) or found
        return found

    def _look(self, level: _Level) -> Trend | None:
        lasting = STILL if level.suspect else LASTING
        trend = judge(list(level.samples), self.least, self.least_slope, lasting)
        if not self.leaking:
            self.trend = trend
        before, level.suspect = level.suspect, trend.leaking
        if level.told:
            return None
        if before and trend.leaking:
            level.told = self.leaking = True
            self.trend = trend
            return trend
        if trend.leaking:
            level.slope, level.clean = trend.slope, None
        if trend.leaking or level.clean is not None:
            self.suspects = True
            self._asking.append(level)
        return None

    def cleaned(self, step: int, held: int) -> Trend | None:
        """Take what is held right after the cleaning that was asked for; the trend, if a leak."""
        found: Trend | None = None
        self.recent[-1] = step, held
        for level in self._asking:
            if level.clean is None:
                level.clean = step, held
                continue
            (since, was), level.clean = level.clean, None
            slope = (held - was) / (step - since)
            if slope > max(self.least_slope, GROWS_ON * level.slope):
                level.told = self.leaking = True
                reason = "it grows on between two cleanings"
                found = Trend(True, slope, slope, slope, since, step, held, reason)
                self.trend = found
        self._asking = []
        return found


class _Level:
    """A window, each of its samples the smaller one of two of the level below."""

    def __init__(self, window: int) -> None:
        self.samples: deque[tuple[int, int]] = deque(maxlen=window)
        self.count = 0
        self.suspect = self.told = False
        self.slope = 0.0  # when it was suspected
        self.clean: tuple[int, int] | None = None  # step and bytes after the cleaning then
        self.half: tuple[int, int] | None = None

    def add(self, sample: tuple[int, int]) -> tuple[int, int] | None:
        """Keep it; every second time, what goes on to the level above."""
        self.samples.append(sample)
        self.count += 1
        if self.half is None:
            self.half = sample
            return None
        lower, self.half = min(self.half, sample, key=lambda s: s[1]), None
        return lower


def describe_leaks(detectors: Mapping[str, LeakDetector]) -> str:
    """What the detectors of a process and of its device say, once where it is the same."""
    said = {name: detector.describe() for name, detector in detectors.items()}
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{name}: {text}" for name, text in said.items())


def judge(
    samples: list[tuple[int, int]],
    least: int = 8 * MIB,
    least_slope: float = 0.0,
    lasting: float = LASTING,
) -> Trend:
    """The trend of (step, bytes) samples, 16 or more of them, oldest first."""
    size = len(samples) // BLOCKS
    if size < 2:
        raise ValueError(f"{len(samples)} samples are too few; 16 or more")
    samples = samples[-BLOCKS * size :]
    floors = [min(samples[i : i + size], key=lambda s: s[1]) for i in range(0, len(samples), size)]
    slope, low, high = _sen(floors)
    first, last, held = samples[0][0], samples[-1][0], floors[-1][1]
    reason = _healthy(floors, low, max(least, SHARE * held), least_slope, lasting)
    told = reason or "it grows evenly, all through the window"
    return Trend(reason is None, slope, low, high, first, last, held, told)


def _even_slope(points: list[tuple[int, int]], least: int, least_slope: float) -> float | None:
    """The slope of samples that grow evenly; None where they do not, or are too few."""
    if len(points) < FEWEST:
        return None
    if len(points) >= 2 * BLOCKS:
        trend = judge(points, least, least_slope, STILL)
        return trend.slope if trend.leaking else None
    slope, low, _ = _sen(points)
    least = max(least, round(SHARE * points[-1][1]))
    return slope if _healthy(points, low, least, least_slope, STILL) is None else None


def _sen(points: list[tuple[int, int]]) -> tuple[float, float, float]:
    """The median of all pairs' slopes, and Sen's interval by ranks."""
    slopes = sorted(
        (b - a) / (t - s) for i, (s, a) in enumerate(points) for t, b in points[i + 1 :] if t > s
    )
    n, pairs = len(points), len(slopes)
    if not pairs:
        return 0.0, 0.0, 0.0
    width = Z * sqrt(n * (n - 1) * (2 * n + 5) / 18)
    lower = max(0, int((pairs - width) / 2))
    upper = min(pairs - 1, int((pairs + width) / 2) + 1)
    middle = pairs // 2
    median = slopes[middle] if pairs % 2 else (slopes[middle - 1] + slopes[middle]) / 2
    return median, slopes[lower], slopes[upper]


def _healthy(
    floors: list[tuple[int, int]], low: float, least: float, least_slope: float, lasting: float
) -> str | None:
    """What speaks against a leak; None if nothing does."""
    values = [value for _, value in floors]
    grown = values[-1] - values[0]
    if grown < least:
        return f"it grew by {grown / MIB:.1f} MiB, too little to tell"
    if low <= least_slope:
        return "the slope may be none"
    rises = [b - a for a, b in zip(values, values[1:], strict=False)]
    if max(rises) > EVEN * grown:
        return "most of the growth is one jump"
    (start, a), (middle, b), (end, c) = floors[0], floors[len(floors) // 2], floors[-1]
    early, late = (b - a) / (middle - start), (c - b) / (end - middle)
    if late < lasting * early:
        return "it slows down"
    return None


def _rate(slope: float) -> str:
    return f"{slope / 1e6:,.1f} MB" if slope >= 1e6 else f"{slope / 1e3:,.1f} KB"
