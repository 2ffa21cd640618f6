"""Candidates of `optimization=auto`: combinations of techniques, and what is known of each.

Techniques that answer the same question (what is compiled, in which precision) are the settings of
one axis, and a candidate has one setting of each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product

from runner.techniques.config import Optimization

AXES: dict[str, tuple[tuple[str, ...], ...]] = {
    "precision": ((), ("tf32",), ("amp",), ("tf32", "amp")),
    "graph": (
        (),
        ("compile",),
        ("compile", "whole_step"),
        ("compile", "whole_step", "cuda_graphs"),
    ),
    "layout": ((), ("channels_last",), ("attention",), ("channels_last", "attention")),
}
FREE = ("system", "fused_optimizer", "pipeline")
"""Cost nothing and change the numbers by rounding only: every candidate has them."""
COMPILING = frozenset({"compile", "whole_step", "cuda_graphs"})
MOST = 16  # candidates
ALIKE = 0.98  # of the best gain: among these the plainest one is preferred
NONE = "none"


@dataclass(eq=False)
class Candidate:
    """One combination of techniques, and what is known of it.

    `state`: not tried, measured, out (and why), ended (by itself), ran up, chosen.
    """

    name: str
    techniques: list[str]  # in order of application
    state: str = "not tried"
    why: str = ""
    extra_seconds: float = 0.0  # to build and compile it, beyond what `none` takes
    round_ratio: float | None = None  # speedup over `none`, in its last round
    final_ratio: float | None = None  # speedup over `none`, in blocks of the final alone
    final_interval: tuple[float, float] | None = None
    final_blocks: int = 0
    final_processes: int = 0  # of each arm; of one, how these differ is not in the interval
    gain: float | None = None  # time of the whole run at `none` over its time with this
    parity: str | None = None
    parity_reason: str = ""

    @property
    def compiles(self) -> bool:
        """Whether it spends time before it saves any."""
        return not COMPILING.isdisjoint(self.techniques)

    def distance(self, other: Candidate) -> int:
        """How many techniques only one of the two has."""
        return len(set(self.techniques) ^ set(other.techniques))

    def over_the_run(self, none_seconds: float, ratio: float) -> float:
        """Speedup of the whole run where a step has the speedup `ratio`: set-up is included."""
        share = self.extra_seconds / none_seconds + (1 / ratio if ratio else math.inf)
        return 1 / share if share else math.inf  # an interval of few blocks may be open


def make_candidates(excluded: Collection[str]) -> list[Candidate]:
    """All candidates, the plainest first, without the `excluded` techniques."""
    axes = []
    for settings in AXES.values():
        able = [tuple(name for name in setting if name not in excluded) for setting in settings]
        axes.append(list(dict.fromkeys(able)))
    while math.prod(map(len, axes)) > MOST:  # settings in the middle of the longest axis go first
        max(axes, key=len).pop(-2)
    free = [name for name in FREE if name not in excluded]
    combinations = [sort_techniques([*sum(one, ()), *free]) for one in product(*axes)]
    return [Candidate(" ".join(names), names) for names in combinations if names]


def order_by_promise(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Where a search begins: what is free, everything but compiling, everything; then the rest."""
    most = sorted(candidates, key=lambda one: -len(one.techniques))
    plain = [one for one in most if not one.compiles]
    return list(dict.fromkeys([*candidates[:1], *plain[:1], *most]))


def rank(rows: Sequence[Candidate], none_seconds: float, floor: float) -> list[Candidate]:
    """Those that make the whole run faster than `none` beyond noise, set-up included; best first.

    Among those as good as the best one the plainest is first.
    """
    paying = []
    for row in rows:
        if row.final_ratio is None or row.final_interval is None:
            continue
        row.gain = row.over_the_run(none_seconds, row.final_ratio)
        if row.over_the_run(none_seconds, row.final_interval[0]) > 1 and row.gain > 1 + floor:
            paying.append(row)
    paying.sort(key=lambda row: -(row.gain or 0.0))
    alike = [row for row in paying if (row.gain or 0.0) >= ALIKE * (paying[0].gain or 0.0)]
    plainest_first = sorted(alike, key=lambda row: (row.compiles, len(row.techniques)))
    return plainest_first + paying[len(alike) :]


def sort_techniques(names: Iterable[str]) -> list[str]:
    """In order of application."""
    chosen = set(names)
    return [name for name, _ in Optimization().techniques() if name in chosen]


def enable_techniques(optimization: Optimization, names: Iterable[str]) -> Optimization:
    """The same knobs with these techniques on as well; the level is no longer `auto`."""
    chosen = {*names, *pinned_techniques(optimization)}
    enabled = deepcopy(optimization)
    enabled.level = "custom" if chosen else NONE
    for name, technique in enabled.techniques():
        technique.enabled = name in chosen
    return enabled


def pinned_techniques(optimization: Optimization) -> list[str]:
    """Techniques that are switched on by name."""
    return [name for name, technique in optimization.techniques() if technique.enabled]
