"""The smallest set of techniques without which a bad step is good, found by leaving some out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from runner.replay.findings import Attempt, Blame, ReplayTrial

log = logging.getLogger("runner")

Make = Callable[[Collection[str]], Attempt]
"""Makes the step without some techniques."""

MOST = 30  # tries: all off, each alone, and then one after another
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
"""What is left out first, after techniques of the user's own."""
HARMLESS = ("pipeline", "quantization")
"""What fetches batches, and what is for after the training: no part of a step."""
COMPILING = ("whole_step", "compile", "cuda_graphs")
TYPES = {"bf16": "bfloat16", "fp16": "float16"}
ELSEWHERE = "it is in the model, the data or the weights"


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
        self.names = sorted(taken, key=lambda name: (_rank(name), name))

    def blame(self) -> Blame:
        """The verdict."""
        if not self.names:
            return self._end(f"no technique took part: {ELSEWHERE}")
        everything = self.try_without(self.names)
        if everything.failed:
            return self._end(f"not known: with all techniques off, {everything.failed}")
        if everything.bad:
            return self._end(
                f"no technique is to blame: with all of them off it is just as bad; {ELSEWHERE}"
            )
        alone: list[str] = []
        culprits = self.names
        try:
            for name in self.names:
                alone += [name] if self._is_good([name]) else []
            if not alone:
                for name in reversed(self.names):
                    rest = [other for other in culprits if other != name]
                    culprits = rest if rest and self._is_good(rest) else culprits
        except _Spent:
            if not alone:
                named = self._named(culprits)
                return self._end(f"one or more of {named}: not looked into further", culprits)
        culprits = alone[:1] or culprits
        return self._end(self._words(culprits, alone), culprits, alone)

    def try_without(self, off: Collection[str]) -> Attempt:
        """One try; raises _Spent where there may be no more."""
        key = frozenset(off)
        if key not in self.known:
            if len(self.trials) >= self.most or time.monotonic() > self.until:
                raise _Spent
            log.info("replay: the step without %s", " and ".join(sorted(off)))
            self.known[key] = self.make(sorted(off))
            self.trials.append(ReplayTrial(sorted(off), self.known[key]))
        return self.known[key]

    def _is_good(self, off: Collection[str]) -> bool:
        attempt = self.try_without(off)
        return not attempt.bad and not attempt.failed

    def _words(self, culprits: list[str], alone: list[str]) -> str:
        if len(alone) > 1:
            return f"{self._named(alone)} together: without either one the step is good"
        if len(culprits) == 1:
            return self._named(culprits)
        if set(culprits) <= set(COMPILING):
            return f"{self._named(culprits)}: either one compiles the model, and compiled it is bad"
        return f"{self._named(culprits)}: only without all of them the step is good"

    def _named(self, names: list[str]) -> str:
        """With the type or kernel that a technique had."""

        def label(name: str) -> str:
            note = self.as_it_was.notes.get(name, "")
            return name if note in ("", "auto", "default") else f"{name} ({TYPES.get(note, note)})"

        return " and ".join(map(label, names))

    def _end(
        self, verdict: str, culprits: Collection[str] = (), alone: Collection[str] = ()
    ) -> Blame:
        return Blame(verdict, list(culprits), list(alone or culprits), self.trials)


def _rank(name: str) -> int:
    return SUSPICION.index(name) if name in SUSPICION else -1
