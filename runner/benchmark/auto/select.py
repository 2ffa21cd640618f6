"""From a search to a selection: faster beyond noise, the numbers right, within the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from runner.benchmark.auto.candidates import NONE, Candidate, SearchResult, rank
from runner.benchmark.auto.search import FINALISTS, Search
from runner.benchmark.blocks import ArmEnded
from runner.benchmark.parity_checker import ParityVerdict

CheckParity = Callable[[str, float], ParityVerdict]
"""Whether a candidate's numbers are right, by its name; and the seconds that this may take."""
FINALS = 4  # where those of the first one turn out to compute something else


def select(
    search: Search,
    check_parity: CheckParity,
    limit_bytes: float | None = None,
) -> SearchResult:
    """Run the rounds and finals, and select the first candidate that may be taken; else `none`.

    Raises ArmEnded where not even `none` runs.
    """
    fits = limit_bytes is None or _none_fits(search, limit_bytes)
    try:
        chosen = _run_finals(search, check_parity, limit_bytes, must_pay=fits)
    finally:
        search.end_all()
    for row in search.candidates:
        if row.state == "running":
            row.state = "out"
            row.why = "slower than the finalists, by its last round"
            if row.final_ratio is not None:
                row.why = "not shown to be faster than none"
    result = SearchResult(
        steps=search.steps,
        none_ms=1e3 * search.none_seconds() / search.steps,
        none_peak_bytes=search.none.peak_bytes,
        noise_floor=search.floor,
        seconds=search.budget_s - search.budget.left(),
        budget_s=search.budget_s,
        tried=list(search.candidates),
    )
    if chosen is not None:
        result.chosen, result.techniques = chosen.name, chosen.techniques
        result.reason = _describe_choice(chosen, search.steps)
    elif fits:
        result.reason = _describe_nothing(result)
    else:
        result.reason = "nothing that was tried stays within optimization.auto.memory_budget_mb"
    return result


def _run_finals(
    search: Search, check_parity: CheckParity, limit_bytes: float | None, must_pay: bool
) -> Candidate | None:
    """The best candidate that may be taken; the next ones get a final where the first may not."""
    remaining = search.run_rounds()
    for _ in range(FINALS):
        finalists = remaining[:FINALISTS]
        remaining = remaining[FINALISTS:]
        if not finalists:
            break
        search.run_final(finalists)
        ratios = [f"{row.name} {row.final_ratio:.2f}" for row in finalists if row.final_ratio]
        search.told(f"final: {'; '.join(ratios)}")
        ranked = rank(finalists, search.none_seconds(), search.floor, must_pay)
        for row in ranked:
            if _has_parity(search, row, check_parity) and _fits(search, row, limit_bytes):
                for other in finalists:
                    if other.state == "running":
                        other.state, other.why = "ran up", f"{row.name} was as good or better"
                row.state, row.why = "chosen", ""
                return row
        for row in finalists:
            search.end(row)
        if not ranked:
            break  # the remaining ones are slower still
    return None


def _has_parity(search: Search, row: Candidate, check_parity: CheckParity) -> bool:
    limit_s = search.parity_limit(row)
    search.told(f"{row.name}: checking parity, for {limit_s:.0f} s at most")
    verdict = check_parity(row.name, limit_s)
    row.parity, row.parity_reason = verdict.parity, verdict.reason
    search.told(f"{row.name}: numbers: {row.parity or 'not known'} ({row.parity_reason})")
    if row.parity in (None, "FAIL"):
        row.state = "out"
        row.why = f"its numbers are {'wrong' if row.parity else 'not known'}: {row.parity_reason}"
    return row.parity not in (None, "FAIL")


def _fits(search: Search, row: Candidate, limit_bytes: float | None) -> bool:
    """Whether its run ends as it should, within the memory."""
    search.alive.remove(row.name)
    try:
        row.peak_bytes = _peak_bytes(search.workers.finish(row.name).summary)
    except ArmEnded as error:
        row.state, row.why = "ended", f"{error.status}: {error.reason}"
        return False
    if limit_bytes is None or row.peak_bytes <= limit_bytes:
        return True
    row.state = "out"
    row.why = (
        f"its peak memory is {row.peak_bytes / 2**20:,.0f} MB, above "
        f"optimization.auto.memory_budget_mb={limit_bytes / 2**20:,.0f}"
    )
    return False


def _none_fits(search: Search, limit_bytes: float) -> bool:
    """Whether `none` stays within the memory; else anything that does may be taken, if slower."""
    search.workers.start(NONE)
    search.none.peak_bytes = _peak_bytes(search.workers.finish(NONE).summary)
    return search.none.peak_bytes <= limit_bytes


def _peak_bytes(summary: Mapping[str, Any]) -> int:
    """Of the device, or on a CPU of the process."""
    memory = summary["memory"]
    return int(memory["peak_device_bytes"] or memory["peak_process_bytes"])


def _describe_choice(chosen: Candidate, steps: int) -> str:
    low, high = chosen.final_interval or (0.0, 0.0)
    return (
        f"{chosen.final_ratio:.2f} times as fast as none ({low:.2f} to {high:.2f}, "
        f"{chosen.final_blocks} blocks), {chosen.gain:.2f} times over {steps:,} steps with "
        f"{chosen.extra_seconds:.0f} s of set-up; numbers: {chosen.parity}"
    )


def _describe_nothing(result: SearchResult) -> str:
    untried = sum(row.state == "not tried" for row in result.tried)
    return (
        f"nothing was shown to be faster beyond noise over {result.steps:,} steps ({untried} of "
        f"{len(result.tried)} candidates were not tried)"
    )
