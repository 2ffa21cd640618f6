"""Whether steps become slower, wait longer or hold more memory as a run goes on.

Medians of long stretches are compared with that of the first one, and a change has to last for
two of them: validation, other tools or a busy neighbour for a moment are no drift.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from runner.device.memory import process_bytes
from runner.hook import Report
from runner.run import Run

FEWEST = 12  # reports in a stretch
SETTLING = 3  # reports at the start of a run that say nothing: compiling, allocating
WAIT = 0.1  # share of a step's time by which waiting must have grown
NOISE = 3.0  # median deviations of the first stretch, within which nothing has changed
GROWN_BYTES = 64 * 2**20  # memory below this growth is nobody's trouble
MIB = 2**20


@dataclass(frozen=True)
class Level:
    """What a stretch of the run is like: seconds a step, and bytes."""

    compute: float  # without the wait for data
    wait: float
    memory: int
    compute_noise: float  # median distance of a report from the median
    wait_noise: float


@dataclass(frozen=True)
class Change:
    """Something that became worse, in words."""

    kind: str  # slower | waiting_more | more_memory
    message: str


class Drift:
    """Fed with each report; answers with what has drifted. Two subtractions a report."""

    def __init__(
        self, factor: float, seconds: float, held: Callable[[], int] = process_bytes
    ) -> None:
        """A stretch is `seconds` of steps; what is `factor` times the first one's is a drift."""
        self.factor, self.seconds, self.held = factor, seconds, held
        self.reports = 0
        self.spent: dict[str, float] | None = None  # of the run's watch, at the last report
        self.waited = 0.0
        self.rows: list[tuple[float, float]] = []  # of this stretch: compute and wait, a step
        self.took = 0.0
        self.base: Level | None = None
        self.suspects: set[str] = set()  # kinds that were worse in the stretch before

    def look(self, run: Run, report: Report) -> list[Change]:
        """Add a report, with what `run.watch` says of the waiting meanwhile."""
        spent = run.watch.spent
        if spent is not self.spent:  # the watch begins anew after its first steps
            self.spent, self.waited = spent, 0.0
        waiting, self.waited = spent["data"] - self.waited, spent["data"]
        return list(self.add(len(report.loss), report.seconds, waiting))

    def add(self, steps: int, seconds: float, waiting: float) -> Iterator[Change]:
        """Add so many steps that took `seconds`, `waiting` for data among them."""
        self.reports += 1
        if self.reports <= SETTLING or seconds <= 0:
            return
        self.rows.append((max(0.0, seconds - waiting) / steps, waiting / steps))
        self.took += seconds
        if len(self.rows) < FEWEST or self.took < self.seconds:
            return
        (compute, compute_noise), (wait, wait_noise) = map(_typical, zip(*self.rows, strict=True))
        now = Level(compute, wait, self.held(), compute_noise, wait_noise)
        self.rows, self.took = [], 0.0
        if self.base is None:
            self.base = now
            return
        changes = {change.kind: change for change in self._compare(self.base, now)}
        lasting = [changes[kind] for kind in changes if kind in self.suspects]
        self.suspects = set(changes)
        for change in lasting:  # from here on what is worse than this is news
            self.suspects.discard(change.kind)
            if change.kind == "slower":
                noise = now.compute_noise
                self.base = replace(self.base, compute=now.compute, compute_noise=noise)
            elif change.kind == "waiting_more":
                self.base = replace(self.base, wait=now.wait, wait_noise=now.wait_noise)
            else:
                self.base = replace(self.base, memory=now.memory)
            yield change

    def _compare(self, base: Level, now: Level) -> Iterator[Change]:
        beyond = base.compute + NOISE * base.compute_noise
        if now.compute > max(self.factor * base.compute, beyond):
            yield Change(
                "slower",
                f"a step takes {_ms(now.compute)}, waiting for data left out; it was "
                f"{_ms(base.compute)} before: other programs, heat, or work that grows with the "
                "run",
            )
        step = base.compute + base.wait
        beyond = base.wait + max(WAIT * step, NOISE * base.wait_noise)
        if now.wait > max(self.factor * base.wait, beyond):
            yield Change(
                "waiting_more",
                f"a step waits {_ms(now.wait)} for data; it was {_ms(base.wait)} before: raise "
                "data.workers, or look at the storage",
            )
        grown = now.memory - base.memory
        if now.memory > self.factor * base.memory and grown > GROWN_BYTES:
            yield Change(
                "more_memory",
                f"the process holds {now.memory / MIB:,.0f} MiB; it was {base.memory / MIB:,.0f} "
                "before: debug=memory says where",
            )


def _typical(values: Sequence[float]) -> tuple[float, float]:
    """Median and median deviation from it."""
    middle = median(values)
    return middle, median(abs(value - middle) for value in values)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
