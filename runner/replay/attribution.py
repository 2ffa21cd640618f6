"""The smallest set of techniques without which a bad step is good, found by leaving some out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from runner.replay.findings import Attempt, Blame, ReplayTrial

log = logging.getLogger("runner")

Make = Callable[[Collection[str], Mapping[str, str]], Attempt]
"""Makes the step without some techniques, and with some of their keys set otherwise."""

MOST = 12  # tries
RESERVE = 3  # of them, kept for sets of several
SUSPICION = (
    "amp",
    "whole_step",
    "compile",
    "chunked_loss",
    "attention",
    "recompute",
    "fused_optimizer",
    "cuda_graphs",
    "tf32",
    "channels_last",
    "accumulation",
    "system",
)
"""What is left out first."""
HARMLESS = ("pipeline", "quantization")
"""What fetches batches, and what is for after the training: no part of a step."""
COMPILING = ("whole_step", "compile", "cuda_graphs")
OTHERS: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "amp": ("optimization.amp.dtype", {"bf16": ("fp16",), "fp16": ("bf16",)}),
    "attention": (
        "optimization.attention.kernel",
        {"flash": ("math", "plain"), "math": ("flash", "plain"), "plain": ("flash", "math")},
    ),
}
"""What else a technique may be set to, by what it was."""
TYPES = {"bf16": "bfloat16", "fp16": "float16"}


class _Spent(Exception):
    """There have been as many tries as there may be."""


class TechniqueSearch:
    """Tries sets of techniques; each set once, and never more than `most` times in all."""

    def __init__(self, as_it_was: Attempt, make: Make, most: int = MOST, seconds: float = 1800.0):
        self.as_it_was, self.make, self.most = as_it_was, make, most
        self.until = time.monotonic() + seconds
        self.trials: list[ReplayTrial] = []
        self.known: dict[frozenset[str], Attempt] = {}
        taken = [name for name in as_it_was.techniques if name not in HARMLESS]
        self.names = sorted(taken, key=lambda n: (_rank(n), n))

    def blame(self) -> Blame:
        """The verdict; what could not be tried any more is in it."""
        if not self.names:
            return self._end("no technique took part: it is in the model, the data or the weights")
        everything = self.try_without(self.names)
        if everything.failed:
            return self._end(f"not known: with all techniques off, {everything.failed}")
        if everything.bad:
            return self._end(
                "no technique is to blame: with all of them off it is just as bad; it is in the "
                "model, the data or the weights"
            )
        try:
            culprits, alone = self._smallest()
        except _Spent:
            return self._end(
                f"one or more of {', '.join(self.names)}: not looked into further", self.names
            )
        return self._end(self._words(culprits, alone), culprits, alone)

    def try_without(
        self, off: Collection[str], settings: Mapping[str, str] | None = None
    ) -> Attempt:
        """One try; raises _Spent where there may be no more."""
        key = frozenset(off)
        if not settings and key in self.known:
            return self.known[key]
        if len(self.trials) >= self.most or time.monotonic() > self.until:
            raise _Spent
        with_all = "with all techniques" if not off else f"without {' and '.join(sorted(off))}"
        also = "".join(f", {k}={v}" for k, v in (settings or {}).items())
        log.info("replay: the step %s%s", with_all, also)
        found = self.make(sorted(off), settings or {})
        self.trials.append(ReplayTrial(sorted(off), dict(settings or {}), found))
        if not settings:
            self.known[key] = found
        return found

    def _is_good(self, off: Collection[str]) -> bool:
        found = self.try_without(off)
        return not found.bad and not found.failed

    def _smallest(self) -> tuple[list[str], list[str]]:
        """The set, and all that are enough alone where the set is of one."""
        if len(self.names) == 1:
            return self.names, self.names
        alone: list[str] = []
        try:
            for name in self.names:
                if not alone and self.most - len(self.trials) <= RESERVE and self.most > RESERVE:
                    break
                if self._is_good([name]):
                    alone.append(name)
        except _Spent:
            if not alone:
                raise
        if alone:
            return alone[:1], alone
        compiling = [name for name in self.names if name in COMPILING]
        current = self.names
        if 1 < len(compiling) < len(current) and self._is_good(compiling):
            current = compiling
        return self._shrunk(current), []

    def _shrunk(self, current: list[str]) -> list[str]:
        """Delta debugging (Zeller and Hildebrandt 2002): no part of what is left would do."""
        pieces = 2
        try:
            while len(current) > 1:
                smaller = next((c for c in _parts(current, pieces) if self._is_good(c)), None)
                if smaller is not None:
                    current, pieces = smaller, max(2, pieces - 1)
                elif pieces < len(current):
                    pieces = min(len(current), 2 * pieces)
                else:
                    break
        except _Spent:
            log.info("replay: as many tries as there may be; the set may not be the smallest")
        return current

    def _words(self, culprits: list[str], alone: list[str]) -> str:
        if len(alone) > 1:
            named = " and ".join(self._named(name) for name in alone)
            return f"{named} together: without either one the step is good"
        if len(culprits) == 1:
            return self._named(culprits[0]) + self._otherwise(culprits[0])
        named = " and ".join(self._named(name) for name in culprits)
        if set(culprits) <= set(COMPILING):
            return f"{named}: either one compiles the model, and compiled it is bad"
        return f"{named}: only without all of them the step is good"

    def _named(self, name: str) -> str:
        note = self.as_it_was.notes.get(name, "")
        if note in ("", "auto", "default"):
            return name
        return f"{name} ({TYPES.get(note, note)})"

    def _otherwise(self, name: str) -> str:
        """How the step comes out with the technique on and set otherwise."""
        key, others = OTHERS.get(name, ("", {}))
        said = []
        for value in others.get(self.as_it_was.notes.get(name, ""), ()):
            try:
                settings = {key: value}
                if value == "fp16":  # a first loss scale is too large more often than not
                    settings["optimization.amp.initial_scale"] = "1.0"
                found = self.try_without([], settings)
            except _Spent:
                break
            if not found.failed:
                said.append(f"{'bad' if found.bad else 'good'} in {TYPES.get(value, value)}")
        return f"; {', '.join(said)}" if said else ""

    def _end(
        self, verdict: str, culprits: Collection[str] = (), alone: Collection[str] = ()
    ) -> Blame:
        untried = [n for n in self.names if frozenset([n]) not in self.known]
        if not culprits or len(self.names) < 2:
            untried = []
        needed = list(alone or culprits)
        return Blame(verdict, list(culprits), needed, self.trials, untried)


def _parts(names: list[str], pieces: int) -> Iterator[list[str]]:
    """The pieces, then what is left without each."""
    cuts = [round(i * len(names) / pieces) for i in range(pieces + 1)]
    chunks = [names[a:b] for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    yield from chunks
    if pieces > 2:
        yield from ([n for n in names if n not in chunk] for chunk in chunks)


def _rank(name: str) -> int:
    return SUSPICION.index(name) if name in SUSPICION else -1  # the user's own come first
