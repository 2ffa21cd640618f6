"""What `optimization=auto` knows of each candidate, and which of them it prefers. Plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.benchmark.auto.space import COMPILING, NONE

ALIKE = 0.98  # of the best one's worth: the plainer one is taken
CLEAR = 1.05  # times as fast as `none`, where there is no interval
BUDGET = "optimization.auto.budget_s"
NO_TIME = "the budget leaves no time for it"


@dataclass
class Tried:
    """What is known of one candidate.

    `state`: not tried, running, out (and why), ended (by itself), ran up, chosen.
    """

    name: str
    techniques: list[str]
    state: str = "not tried"
    why: str = ""
    given_up: bool = False  # it looked faster, but there was no time to make sure, or no use
    samples_per_step: int = 0
    setup_seconds: float = 0.0  # from the start of its process to the end of the warm-up steps
    first_seconds: float = 0.0  # of these, the warm-up steps: compiling is in there
    extra_seconds: float = 0.0  # of setup_seconds, beyond what `none` takes
    heat_ms: list[float] = field(default_factory=list)  # a step, in each block of its last heat
    heat_ratio: float | None = None  # time of `none` in the same blocks by that
    final_ratio: float | None = None  # as fast as `none`, in blocks of the final alone
    final_interval: tuple[float, float] | None = None
    final_blocks: int = 0
    gain: float | None = None  # time of the whole run at `none` by that with it
    parity: str | None = None
    parity_reason: str = ""
    peak_bytes: int | None = None
    fell_back: list[str] = field(default_factory=list)
    data_wait: float | None = None  # share of a step, in the final

    @property
    def compiles(self) -> bool:
        """Whether it takes time before it saves any."""
        return not COMPILING.isdisjoint(self.techniques)

    def no_time(self) -> bool:
        """Whether the budget is why it was not tried."""
        return self.state == "not tried" and (self.why == NO_TIME or BUDGET in self.why)

    def worth(self, none_seconds: float) -> tuple[float, float, float]:
        """Time of the whole run at `none` by that with it, and the interval of that."""
        if self.final_ratio is None or self.final_interval is None:
            return 0.0, 0.0, 0.0
        extra = self.extra_seconds / none_seconds

        def over_the_run(ratio: float) -> float:
            share = extra + 1 / ratio if ratio else math.inf
            return 1 / share if share else math.inf  # an interval of few blocks may be open

        low, high = self.final_interval
        return over_the_run(self.final_ratio), over_the_run(low), over_the_run(high)

    def pays_from(self, none_ms: float, floor: float) -> float | None:
        """The steps from which on a run is faster with it, by the rule of `by_preference`.

        None where a step is not known to be faster. Without a final by its last heat, which has
        no interval and has to be clear instead.
        """
        if self.final_ratio is not None and self.final_interval is not None:
            ratio, low = self.final_ratio, self.final_interval[0]
        else:
            ratio = self.heat_ratio or 0.0
            low = ratio if ratio > CLEAR else 0.0
        if low <= 1:
            return None
        saved = 1e-3 * none_ms * min(1 - 1 / low, 1 / (1 + floor) - 1 / ratio)  # in each step
        return self.extra_seconds / saved if saved > 0 else None


@dataclass
class Found:
    """What a search came to."""

    chosen: str = NONE
    techniques: list[str] = field(default_factory=list)
    reason: str = ""
    steps: int = 0  # that were planned
    none_ms: float = 0.0  # a step at `none`
    none_peak_bytes: int | None = None
    noise_floor: float = 0.0
    seconds: float = 0.0
    budget_s: float = 0.0
    tried: list[Tried] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # techniques, and why
    advice: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # what all of this is about

    def unjudged(self) -> bool:
        """Whether numbers were to be judged and were not: another time they may be."""
        return any(row.parity is None and row.parity_reason for row in self.tried)

    def outgrown(self, steps: int) -> bool:
        """Whether something that could not pay back then, and was not judged, would by now."""
        pays = [row.pays_from(self.none_ms, self.noise_floor) for row in self.open()]
        return any(self.steps < since <= steps for since in pays if since is not None)

    def open(self) -> list[Tried]:
        """Those that ran, and that nothing but their time speaks against."""
        return [row for row in self.tried if row.state == "out" and row.parity is None]

    def row(self, name: str) -> Tried:
        """The candidate of that name."""
        return next(row for row in self.tried if row.name == name)


def unpaid(row: Tried, steps: int, none_ms: float, floor: float) -> str:
    """That faster steps do not make up for what it takes to set up; empty where they do."""
    since = row.pays_from(none_ms, floor)
    if since is None or since <= steps or row.extra_seconds < 1:
        return ""
    what = "compiling" if row.compiles else "setting up"
    return (
        f"{what} ({row.extra_seconds:.0f} s) would not be paid back in {steps:,} steps; from "
        f"about {_up(since):,} steps on it would"
    )


def _up(number: float) -> int:
    """To two digits, and never down."""
    unit = int(10 ** max(0, len(str(int(number))) - 2))
    return math.ceil(number / unit) * unit


def by_preference(
    rows: Sequence[Tried], none_seconds: float, floor: float, must_pay: bool = True
) -> list[Tried]:
    """Those that are faster than `none` beyond noise, what it takes to compile included.

    The best first, but where a plainer one is as good, that one. All of them where `none` is no
    choice and nothing `must_pay`.
    """
    paying = []
    for row in rows:
        row.gain, low, _ = row.worth(none_seconds)
        if (low > 1 and row.gain > 1 + floor) or (row.gain and not must_pay):
            paying.append(row)
    paying.sort(key=lambda row: -(row.gain or 0))
    if not paying:
        return []
    alike = ALIKE * (paying[0].gain or 0)
    near = [row for row in paying if (row.gain or 0) >= alike]
    near.sort(key=lambda row: (row.compiles, len(row.techniques), -(row.gain or 0)))
    return near + [row for row in paying if row not in near]
