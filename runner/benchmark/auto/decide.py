"""From a search to a choice: faster beyond noise, the numbers right, within the memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runner.benchmark.agreement import Verdict
from runner.benchmark.auto.budget import FINAL_S, OVER
from runner.benchmark.auto.search import FINALISTS, ROUNDS, Search
from runner.benchmark.auto.space import NONE
from runner.benchmark.auto.tried import CLEAR, NO_TIME, Found, Tried, by_preference, unpaid
from runner.benchmark.blocks import ArmEnded

Judge = Callable[[str, float], Verdict]
"""Whether a candidate's numbers are right, by its name; and the seconds that this may take."""
SLOWER = "not shown to be faster than none"
LESS = "less was to be expected of it than of those that were measured afresh"


def decide(search: Search, judge: Judge, limit_bytes: float | None = None) -> Found:
    """Search, measure the best ones afresh, and take the first that may be taken; else `none`.

    Of two that are alike the plainer one. Raises ArmEnded where not even `none` runs.
    """
    found = Found(
        budget_s=search.budget_s, steps=search.steps, left_out=dict(search.space.left_out)
    )
    fits = limit_bytes is None or _none_fits(search, limit_bytes)
    search.must_pay = fits
    try:
        ranked = search.heats()
        chosen = _first(search, ranked, judge, limit_bytes, must_pay=fits)
    finally:
        search.end()
    found.tried = list(search.rows.values())
    found.none_ms = search.none_seconds() * 1e3 / search.steps
    found.noise_floor, found.seconds = search.floor, search.budget_s - search.budget.left()
    found.none_peak_bytes = search.none.peak_bytes
    _say_why(found)
    take(found, chosen)
    if chosen is None and not fits:
        found.reason = "nothing that was tried stays within optimization.auto.memory_budget_mb"
    return found


def take(found: Found, chosen: Tried | None) -> None:
    """Note what is chosen, and why."""
    found.chosen, found.techniques = NONE, []
    if chosen is None:
        found.reason = _why_nothing(found)
        return
    found.chosen, found.techniques = chosen.name, chosen.techniques
    low, high = chosen.final_interval or (0.0, 0.0)
    found.reason = (
        f"{chosen.final_ratio:.2f} times as fast as none ({low:.2f} to {high:.2f}, "
        f"{chosen.final_blocks} blocks)"
    )
    if chosen.extra_seconds >= 1:
        found.reason += (
            f", {chosen.gain:.2f} times over {found.steps:,} steps with "
            f"{chosen.extra_seconds:.0f} s of setting up and compiling"
        )
    found.reason += f"; numbers: {chosen.parity}"


def _why_nothing(found: Found) -> str:
    """Noise, or compiling that so few steps do not pay back; and what nobody could look at."""
    whys = {
        row.name: (row.final_ratio or row.heat_ratio or 0.0, why)
        for row in [*found.open(), *filter(_fitted, found.tried)]
        if (why := _unpaid(row, found) or _no_use(row) or _too_late(row, found))
    }
    reason = "nothing was shown to be faster beyond noise"
    if whys:
        name = max(whys, key=lambda name: whys[name])
        reason = (
            f"nothing was shown to be faster over {found.steps:,} steps; with {name} a step is "
            f"{whys[name][0]:.2f} times as fast, but {whys[name][1]}"
        )
    untried = sum(row.no_time() for row in found.tried)
    if untried:
        reason += f" (the budget left {untried} of {len(found.tried)} candidates untried)"
    return reason


def effort(found: Found) -> str:
    """How long the search took, and what it left untried."""
    said = f"searched for {found.seconds:.0f} s"
    if found.seconds > found.budget_s + 1:
        said += (
            f", with optimization.auto.budget_s={found.budget_s:g}: some of it took longer than "
            "was to be expected"
        )
    whys = [(row.why, row.no_time()) for row in found.tried if row.state == "not tried"]
    untried = Counter(NO_TIME if no_time else why for why, no_time in whys)
    said += f"; {len(found.tried) - untried.total()} of {len(found.tried)} candidates tried"
    return said + "".join(f"; {count} not: {why}" for why, count in untried.items())


def again(found: Found, steps: int) -> None:
    """Choose anew, for another number of steps, among those whose numbers are known to be right."""
    known = [row for row in found.tried if row.parity not in (None, "FAIL") and _fitted(row)]
    none_seconds = 1e-3 * found.none_ms * steps
    found.steps = steps
    pays = by_preference(known, none_seconds, found.noise_floor)
    take(found, pays[0] if pays else None)


def _fitted(row: Tried) -> bool:
    return row.state in ("chosen", "ran up")


def _first(
    search: Search,
    ranked: Sequence[Tried],
    judge: Judge,
    limit_bytes: float | None,
    must_pay: bool,
) -> Tried | None:
    """The best one that may be taken. Where the first ones may not, others get a final too."""
    left = [row for row in ranked if row.state != "ended" and not _given_up(search, row)]
    for _ in range(ROUNDS):
        rows, left = left[:FINALISTS], left[FINALISTS:]
        if not rows:
            break
        search.final(rows)
        search.told(
            "final: "
            + "; ".join(f"{row.name} {row.final_ratio:.2f}" for row in rows if row.final_ratio)
        )
        ordered = by_preference(rows, search.none_seconds(), search.floor, must_pay)
        for row in ordered:
            if _may_be_taken(search, row, judge, limit_bytes):
                row.state, row.why = "chosen", ""
                for other in rows:
                    if other.state == "running":
                        other.state, other.why = "ran up", f"{row.name} was as good or better"
                return row
        for row in rows:
            search.drop(row)
        if not ordered:
            break  # those that are left are slower still
    return None


def _say_why(found: Found) -> None:
    """Of those that were tried and not taken."""
    for row in found.tried:
        why = _too_late(row, found)
        if row.state == "running":
            final = row.final_ratio is not None
            row.state, row.why = "out", why or (SLOWER if final else LESS)
        elif row in found.open() and why and not row.given_up:
            row.why += f"; {why}"


def _unpaid(row: Tried, found: Found) -> str:
    return unpaid(row, found.steps, found.none_ms, found.noise_floor)


def _no_use(row: Tried) -> str:
    """That it was given up though it looked faster."""
    return row.why if row.given_up and (row.final_ratio or row.heat_ratio or 0.0) > CLEAR else ""


def _too_late(row: Tried, found: Found) -> str:
    """That compiling takes what faster steps save, or all but; empty where that is not it."""
    why = _unpaid(row, found)
    ratio = row.heat_ratio or 0.0
    if why or row.final_ratio is not None or not row.compiles or ratio <= CLEAR:
        return why
    seconds = 1e-3 * found.none_ms * found.steps
    gain = seconds / (row.extra_seconds + seconds / ratio)
    return (
        f"compiling ({row.extra_seconds:.0f} s) leaves {gain:.2f} times over {found.steps:,} "
        f"steps: {LESS}"
    )


def _gain(search: Search, row: Tried, known: float | None) -> float:
    """Seconds that the run would be shorter by with it, as `known` or by its last heat."""
    total = search.none_seconds()
    return total - (search.planned(row) if known is None else total / known)


def _unrewarding(search: Search, row: Tried, known: float | None) -> str:
    """Why it is not gone on with: that takes longer than it saves, or than there is time.

    `known`: what a final found it to be worth (`Tried.gain`); else its last heat says it, and the
    final is still to come.
    """
    budget, gain = search.budget, _gain(search, row, known)
    costs = budget.judging(row.techniques, row.compiles)
    if costs > budget.for_judging(costs, gain):
        return (
            f"judging its numbers takes about {costs:.0f} s, and {OVER:g} times "
            f"optimization.auto.budget_s={search.budget_s:g} would be over before"
        )
    if not search.must_pay:
        return ""
    if known is not None:
        return budget.no_gain(costs, gain)
    return budget.no_gain(costs + budget.start_s + FINAL_S, gain)


def _given_up(search: Search, row: Tried, known: float | None = None) -> bool:
    """Whether it is not gone on with, for the time that this takes."""
    why = _unrewarding(search, row, known)
    if why:
        row.state, row.why, row.given_up = "out", why, True
        search.drop(row)
        search.told(f"{row.name}: out: {why}")
    return bool(why)


def _may_be_taken(search: Search, row: Tried, judge: Judge, limit_bytes: float | None) -> bool:
    if _given_up(search, row, row.gain):
        row.parity_reason = f"not judged: {row.why}"
        return False
    estimate = search.budget.judging(row.techniques, row.compiles)
    began = search.clock()
    search.told(f"{row.name}: its numbers are judged, for about {estimate:.0f} s")
    verdict = judge(row.name, search.budget.for_judging(estimate, _gain(search, row, row.gain)))
    search.budget.judged *= max(1.0, (search.clock() - began) / estimate)
    row.parity, row.parity_reason = verdict.parity, verdict.reason
    search.told(f"{row.name}: numbers: {row.parity or 'not known'} ({row.parity_reason})")
    if row.parity in (None, "FAIL"):
        row.state = "out"
        row.why = f"its numbers are {'wrong' if row.parity else 'not known'}: {row.parity_reason}"
        return False
    if row.name in search.alive:
        search.alive.remove(row.name)
        try:
            summary = search.team.finish(row.name).summary
        except ArmEnded as error:
            row.state, row.why = "ended", f"{error.status}: {error.reason}"
            return False
        row.peak_bytes = peak(summary)
        row.fell_back = [
            f"{one['name']}: {one['reason']}"
            for one in summary.get("techniques", [])
            if one["requested"] and not one["engaged"]
        ]
    if limit_bytes is not None and (row.peak_bytes or 0) > limit_bytes:
        row.state = "out"
        row.why = (
            f"it holds {(row.peak_bytes or 0) / 2**20:,.0f} MB, and "
            f"optimization.auto.memory_budget_mb is {limit_bytes / 2**20:,.0f}"
        )
        return False
    return True


def _none_fits(search: Search, limit_bytes: float) -> bool:
    """What `none` itself holds; where that is too much, what fits is taken however slow."""
    search.team.start(NONE)
    search.none.peak_bytes = peak(search.team.finish(NONE).summary)
    return search.none.peak_bytes <= limit_bytes


def peak(summary: Mapping[str, Any]) -> int:
    """Of the device, or on a CPU of the process."""
    memory = summary["memory"]
    return int(memory["peak_device_bytes"] or memory["peak_process_bytes"])
