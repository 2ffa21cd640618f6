"""What `optimization=auto` may choose from: combinations of techniques that can do something here.

Techniques that answer the same question (what is compiled, in what precision) are the settings of
one axis, and a candidate is a setting of each. From the best so far the search goes to those that
differ in one axis, so it need not try all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
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
    "memory": ((), ("recompute",)),
}
"""The settings of each axis, of which those are left that can do something."""
ALWAYS = ("system", "fused_optimizer", "pipeline")
"""Free of charge, and the numbers are the same but for rounding: every candidate has them."""
COMPILING = frozenset({"compile", "whole_step", "cuda_graphs"})
MOST = 16  # candidates
NONE = "none"


@dataclass(frozen=True)
class Candidate:
    """A setting of each axis, and the techniques that it switches on, in order of application."""

    settings: tuple[int, ...]
    techniques: tuple[str, ...]

    @property
    def name(self) -> str:
        """How it is called; `none` where nothing is on."""
        return " ".join(self.techniques) or NONE

    @property
    def compiles(self) -> bool:
        """Whether it takes time before it saves any."""
        return not COMPILING.isdisjoint(self.techniques)


@dataclass(frozen=True)
class Space:
    """All candidates; `none`, which they are held against, is not one of them."""

    axes: tuple[tuple[tuple[str, ...], ...], ...]
    always: tuple[str, ...]
    left_out: Mapping[str, str]  # techniques that can do nothing here, and why

    def at(self, settings: tuple[int, ...]) -> Candidate:
        """The candidate of these settings."""
        on = set(self.always).union(*(axis[i] for axis, i in zip(self.axes, settings, strict=True)))
        return Candidate(settings, in_order(on))

    def all(self) -> list[Candidate]:
        """Every one that makes sense, the plainest first."""
        found = [self.at(s) for s in product(*(range(len(axis)) for axis in self.axes))]
        return [one for one in found if sensible(one)]

    def first(self, compiling: bool = True) -> list[Candidate]:
        """Where to begin: nothing but what is free, all of it, and what lies between."""
        most = tuple(0 if _is(axis, "recompute") else len(axis) - 1 for axis in self.axes)
        wanted = [
            (0,) * len(most),
            self._without("compile", most),  # before what may take all the time to compile
            most,
            self._without("amp", most),
        ]
        found = dict.fromkeys(self.at(settings) for settings in wanted)
        return [one for one in found if sensible(one) and (compiling or not one.compiles)]

    def _without(self, name: str, settings: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(
            0 if _is(axis, name) else i for axis, i in zip(self.axes, settings, strict=True)
        )

    def neighbours(self, of: Candidate) -> Iterator[Candidate]:
        """Those that differ from it in one axis."""
        for n, axis in enumerate(self.axes):
            for i in reversed(range(len(axis))):
                settings = (*of.settings[:n], i, *of.settings[n + 1 :])
                if i != of.settings[n] and sensible(one := self.at(settings)):
                    yield one


def space_of(reasons: Mapping[str, str], pinned: Collection[str], memory: bool) -> Space:
    """The space without the techniques that have a reason to be left out.

    What is `pinned` is on in all candidates, and in what they are held against. `memory`: what
    computes more in order to hold less is worth a try.
    """
    out = dict(reasons)
    if not memory:
        out.setdefault("recompute", "there is no optimization.auto.memory_budget_mb")
    axes = []
    for settings in AXES.values():
        left = []
        for setting in settings:
            able = tuple(name for name in setting if name not in out and name not in pinned)
            if able not in left:
                left.append(able)
        if len(left) > 1:
            axes.append(tuple(left))
    while _size(axes) > MOST:  # settings in the middle of the longest axis go first
        longest = max(axes, key=len)
        axes[axes.index(longest)] = (*longest[:-2], longest[-1])
    always = tuple(name for name in ALWAYS if name not in out and name not in pinned)
    return Space(tuple(axes), always, out)


def sensible(candidate: Candidate) -> bool:
    """One graph has no boundary at which activations could be computed again."""
    return not {"whole_step", "recompute"} <= set(candidate.techniques)


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """As they are applied."""
    wanted = set(names)
    return tuple(name for name, _ in Optimization().techniques() if name in wanted)


def switched_on(optimization: Optimization, names: Iterable[str]) -> Optimization:
    """The same knobs with these techniques on as well; `auto` is settled by that."""
    wanted = set(names)
    found = deepcopy(optimization)
    found.level = "custom" if wanted or pinned(optimization) else NONE
    for name, technique in found.techniques():
        technique.enabled = technique.enabled or name in wanted
    return found


def pinned(optimization: Optimization) -> list[str]:
    """What is switched on by name."""
    return [name for name, technique in optimization.techniques() if technique.enabled]


def _size(axes: Iterable[tuple[tuple[str, ...], ...]]) -> int:
    size = 1
    for axis in axes:
        size *= len(axis)
    return size


def _is(axis: tuple[tuple[str, ...], ...], name: str) -> bool:
    return any(name in setting for setting in axis)
