"""`optimization=auto` for a run that is too short for a search: what is free, by rule."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from runner.benchmark.auto.look import Look, step_seconds
from runner.benchmark.auto.space import ALWAYS, in_order, pinned
from runner.benchmark.auto.tried import Found, Tried
from runner.build import Given
from runner.config import RunConfig

TIMES = 2  # so many budgets a run must take for a search to be worth it
LOOKS, LOOKING_S = 5, 4.0  # at what is free and at none, by turns; and after so long no more
BY_RULE = "it differs from none by rounding only; the numbers of this run were not judged"


def too_short(config: RunConfig, look: Look) -> str:
    """Why a search is not worth it; empty where it is."""
    budget_s = config.optimization.auto.budget_s
    if look.seconds >= TIMES * budget_s:
        return ""
    return (
        f"the run takes about {look.seconds:.2g} s at none: a search of "
        f"optimization.auto.budget_s={budget_s:g} is for runs of {TIMES * budget_s:g} s"
    )


def by_rule(config: RunConfig, given: Given, look: Look, why: str) -> Found:
    """Without a search, and `why`: what is free, where a step with it takes no longer here."""
    auto = config.optimization.auto
    names = [n for n in ALWAYS if n not in look.reasons and n not in pinned(config.optimization)]
    found = Found(steps=look.steps, none_ms=1e3 * look.step_seconds, budget_s=auto.budget_s)
    found.left_out = dict(look.reasons)
    if auto.memory_budget_mb is not None:
        why += "; optimization.auto.memory_budget_mb was not looked at"
    if not names:
        found.reason = f"{why}, and nothing is free that is not on already"
        return found
    free = list(in_order(names))
    ratios = _by_turns(config, given, free)
    row = Tried(" ".join(free), free, heat_ratio=1 / median(ratios), parity_reason=BY_RULE)
    found.tried.append(row)
    seen = f"a step takes {median(ratios):.2f} times as long, by {len(ratios)} looks at each"
    if median(ratios) > 1:
        row.state, row.why = "out", seen
        found.reason = f"{why}, and with what is free ({row.name}) {seen}"
        return found
    row.state = "chosen"
    found.chosen, found.techniques = row.name, free
    found.reason = f"{why}; what is free, by rule: {seen}, and {BY_RULE}"
    return found


def _by_turns(config: RunConfig, given: Given, names: Sequence[str]) -> list[float]:
    """How many times as long a step takes with these techniques as without, look by look.

    In this process, one run at a time: no more memory is held than the run itself will hold.
    """
    began, ratios = time.monotonic(), list[float]()
    while len(ratios) < LOOKS and (not ratios or time.monotonic() - began < LOOKING_S):
        order = (names, ()) if len(ratios) % 2 else ((), names)
        seconds = {bool(some): step_seconds(config, given, some) for some in order}
        ratios.append(seconds[True] / seconds[False])
    return ratios
