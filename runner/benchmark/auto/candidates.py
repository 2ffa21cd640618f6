"""Candidates of `optimization=auto`: combinations of techniques, and what is known of each.

Techniques that answer the same question (what is compiled, in which precision) are the settings of
one axis, and a candidate has one setting of each. The search moves to candidates that differ from
the best one in a single axis, so it need not try all of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from typing import Any

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
    "memory": ((), ("recompute",)),
}
ALWAYS = ("system", "fused_optimizer", "pipeline")
"""Cost nothing and change the numbers by rounding only: every candidate has them."""
COMPILING = frozenset({"compile", "whole_step", "cuda_graphs"})
MOST = 16  # candidates
ALIKE = 0.98  # of the best gain: among these the plainest one is preferred
NONE = "none"


@dataclass(eq=False)
class Candidate:
    """One combination of techniques, and what is known of it.

    `state`: not tried, running, out (and why), ended (by itself), ran up, chosen.
    """

    name: str
    techniques: list[str]  # in order of application
    settings: list[int] = field(default_factory=list)  # of each axis
    state: str = "not tried"
    why: str = ""
    samples_per_step: int = 0
    setup_seconds: float = 0.0  # from the start of its process to the end of the warm-up steps
    extra_seconds: float = 0.0  # of these, beyond what `none` takes
    round_ms: list[float] = field(default_factory=list)  # a step, in each block of its last round
    round_ratio: float | None = None  # time of `none` in the same blocks over that
    final_ratio: float | None = None  # speedup over `none`, in blocks of the final alone
    final_interval: tuple[float, float] | None = None
    final_blocks: int = 0
    gain: float | None = None  # time of the whole run at `none` over its time with this
    parity: str | None = None
    parity_reason: str = ""
    peak_bytes: int | None = None

    @property
    def compiles(self) -> bool:
        """Whether it spends time before it saves any."""
        return not COMPILING.isdisjoint(self.techniques)

    def over_the_run(self, none_seconds: float, ratio: float) -> float:
        """Speedup of the whole run where a step has the speedup `ratio`: set-up is included."""
        share = self.extra_seconds / none_seconds + (1 / ratio if ratio else math.inf)
        return 1 / share if share else math.inf  # an interval of few blocks may be open


@dataclass
class SearchResult:
    """What a search selected, and everything that it measured: `optimization_evidence.json`."""

    chosen: str = NONE
    techniques: list[str] = field(default_factory=list)
    reason: str = ""
    steps: int = 0  # that were planned
    none_ms: float = 0.0  # a step at `none`
    none_peak_bytes: int | None = None
    noise_floor: float = 0.0
    seconds: float = 0.0
    budget_s: float = 0.0
    tried: list[Candidate] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # techniques, and why
    facts: dict[str, Any] = field(default_factory=dict)  # model, shapes, device, versions


def make_candidates(
    reasons: Mapping[str, str], pinned: Collection[str], memory: bool
) -> list[Candidate]:
    """All candidates, the plainest first, without techniques that have a reason to be left out.

    What is `pinned` is on in all runs anyway. `memory`: recomputation is worth a try.
    """
    out = {*reasons, *pinned, *(() if memory else ("recompute",))}
    axes = []
    for settings in AXES.values():
        able = [tuple(n for n in setting if n not in out) for setting in settings]
        axes.append(list(dict.fromkeys(able)))
    while math.prod(map(len, axes)) > MOST:  # settings in the middle of the longest axis go first
        max(axes, key=len).pop(-2)
    candidates = []
    for indices in product(*(range(len(axis)) for axis in axes)):
        on = {name for axis, i in zip(axes, indices, strict=True) for name in axis[i]}
        if not {"whole_step", "recompute"} <= on:  # one graph has no boundary to recompute from
            names = sort_techniques({*on, *(n for n in ALWAYS if n not in out)})
            candidates.append(Candidate(" ".join(names) or NONE, names, list(indices)))
    return [one for one in candidates if one.techniques]


def first_candidates(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Where a search begins: what is free, everything but compiling, everything, all but amp."""
    plain = [one for one in candidates if "recompute" not in one.techniques]
    first = candidates[:1]
    for without in (COMPILING, frozenset[str](), frozenset({"amp", "tf32"})):
        able = [one for one in plain if without.isdisjoint(one.techniques)]
        first = [*first, *sorted(able, key=lambda one: -len(one.techniques))[:1]]
    return list(dict.fromkeys(first))


def neighbours(centre: Candidate, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that differ from it in one axis, those with more techniques first."""
    return [
        one
        for one in reversed(candidates)
        if sum(a != b for a, b in zip(centre.settings, one.settings, strict=True)) == 1
    ]


def rank(
    rows: Sequence[Candidate], none_seconds: float, floor: float, must_pay: bool = True
) -> list[Candidate]:
    """Those that make the whole run faster than `none` beyond noise, set-up included; best first.

    Among those as good as the best one the plainest is first. Without `must_pay` slower ones too.
    """
    paying = []
    for row in rows:
        if row.final_ratio is None or row.final_interval is None:
            continue
        row.gain = row.over_the_run(none_seconds, row.final_ratio)
        low = row.over_the_run(none_seconds, row.final_interval[0])
        if not must_pay or (low > 1 and row.gain > 1 + floor):
            paying.append(row)
    near = ALIKE * max((row.gain or 0.0 for row in paying), default=0.0)

    def preference(row: Candidate) -> tuple[bool, bool, int, float]:
        gain = row.gain or 0.0
        plainness = (row.compiles, len(row.techniques)) if gain >= near else (False, 0)
        return gain < near, *plainness, -gain

    return sorted(paying, key=preference)


def sort_techniques(names: Iterable[str]) -> list[str]:
    """In order of application."""
    wanted = set(names)
    return [name for name, _ in Optimization().techniques() if name in wanted]


def enable_techniques(optimization: Optimization, names: Iterable[str]) -> Optimization:
    """The same knobs with these techniques on as well; the level is no longer `auto`."""
    wanted = set(names)
    enabled = deepcopy(optimization)
    enabled.level = "custom" if wanted or pinned_techniques(optimization) else NONE
    for name, technique in enabled.techniques():
        technique.enabled = technique.enabled or name in wanted
    return enabled


def pinned_techniques(optimization: Optimization) -> list[str]:
    """Techniques that are switched on by name."""
    return [name for name, technique in optimization.techniques() if technique.enabled]
