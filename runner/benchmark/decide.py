"""From a search to a choice: faster beyond noise, the numbers right, within the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runner.benchmark.agreement import Verdict
from runner.benchmark.blocks import ArmEnded
from runner.benchmark.search import FINALISTS, ROUNDS, Search
from runner.benchmark.space import NONE
from runner.benchmark.tried import Found, Tried, by_preference

Judge = Callable[[str], Verdict]
"""Whether a candidate's numbers are right, by its name."""


def decide(search: Search, judge: Judge, limit_bytes: float | None = None) -> Found:
    """Search, measure the best ones afresh, and take the first that may be taken; else `none`.

    Of two that are alike the plainer one. Raises ArmEnded where not even `none` runs.
    """
    found = Found(
        budget_s=search.budget_s, steps=search.steps, left_out=dict(search.space.left_out)
    )
    fits = limit_bytes is None or _none_fits(search, limit_bytes)
    try:
        ranked = search.heats()
        chosen = _first(search, ranked, judge, limit_bytes, must_pay=fits)
    finally:
        search.end()
    found.tried = list(search.rows.values())
    found.none_ms = search.none_seconds() * 1e3 / search.steps
    found.noise_floor, found.seconds = search.floor, search.clock() - search.began
    found.none_peak_bytes = search.none.peak_bytes
    take(found, chosen)
    if chosen is None and not fits:
        found.reason = "nothing that was tried stays within optimization.auto.memory_budget_mb"
    return found


def take(found: Found, chosen: Tried | None) -> None:
    """Note what is chosen, and why."""
    found.chosen, found.techniques = NONE, []
    if chosen is None:
        found.reason = "nothing was shown to be faster beyond noise"
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
    left = [row for row in ranked if row.state != "ended"]
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
            if row.state == "running":
                row.state, row.why = "out", "not shown to be faster than none"
        if not ordered:
            break  # those that are left are slower still
    return None


def _may_be_taken(search: Search, row: Tried, judge: Judge, limit_bytes: float | None) -> bool:
    verdict = judge(row.name)
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
