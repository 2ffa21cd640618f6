"""What `optimization=auto` knows of each candidate, and which of them it prefers. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.benchmark.space import COMPILING, NONE

ALIKE = 0.98  # of the best one's worth: the plainer one is taken


@dataclass
class Tried:
    """What is known of one candidate.

    `state`: not tried, running, out (and why), ended (by itself), ran up, chosen.
    """

    name: str
    techniques: list[str]
    state: str = "not tried"
    why: str = ""
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

    def worth(self, none_seconds: float) -> tuple[float, float, float]:
        """Time of the whole run at `none` by that with it, and the interval of that."""
        if self.final_ratio is None or self.final_interval is None:
            return 0.0, 0.0, 0.0
        ratios = (self.final_ratio, *self.final_interval)
        found = [
            none_seconds / (self.extra_seconds + none_seconds / r) if r else 0.0 for r in ratios
        ]
        return found[0], found[1], found[2]


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

    def row(self, name: str) -> Tried:
        """The candidate of that name."""
        return next(row for row in self.tried if row.name == name)


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
