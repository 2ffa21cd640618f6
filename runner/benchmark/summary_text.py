"""The sentences of an attribution: only what is beyond the noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

from runner.benchmark.result import Effect
from runner.benchmark.statistics import COARSE, SAME, Estimate, claim

MIB = 2**20
SHARE = 0.05  # of the plain run's peak: memory that is worth a sentence
WORTH = {"same": "nothing", "": "nothing that can be told", "unmeasured": "not known"}
Interval = tuple[float, float] | None


def summary_text(
    effects: Sequence[Effect], level: str, floor: float, peaks: Sequence[int] = ()
) -> list[str]:
    """What to take away, the most important first.

    `floor` is the noise floor of a ratio of two processes, as a share, inf where it is not known;
    an interaction is a ratio of four and has √2 times that. Nothing within 2 % is stated. `peaks`
    are those of the plain run, in bytes, one a round: they differ by chance.
    """
    floor = max(floor, SAME)
    company = {e.name: _claim(e.removed, e.removed_interval, floor) for e in effects}
    alone = {e.name: _claim(e.added, e.added_interval, floor) for e in effects}
    measured = [e for e in effects if e.removed is not None or e.added is not None]
    harmful = [e for e in measured if company[e.name] == "slower"]
    useful = [
        e
        for e in measured
        if e not in harmful
        and (company[e.name] == "faster" or alone[e.name] in ("faster", "slower"))
    ]
    lines = [_harm(e, level, peaks) for e in sorted(harmful, key=lambda e: e.removed or 1.0)]
    for e in sorted(useful, key=lambda e: max(e.added or 0.0, e.removed or 0.0), reverse=True):
        by_itself = _worth(e.added, e.added_interval, alone[e.name])
        together = _worth(e.removed, e.removed_interval, company[e.name])
        lines.append(f"{e.name}: alone {by_itself}, in company {together}")
    lines += _interactions(measured, floor)
    lines += [
        f"with {e.name} the peak is {abs(more) / MIB:,.0f} MiB {'more' if more > 0 else 'less'}"
        for e in measured
        if (more := _extra_memory(e, peaks))
    ]
    lines += [f"{e.name} changes the numbers: {e.note}" for e in effects if e.parity == "FAIL"]
    rest = [e for e in measured if e not in harmful and e not in useful]
    same = [e for e in rest if company[e.name] == "same"]
    if same:
        bar = floor if floor <= COARSE else SAME
        lines.append(
            f"{'nothing else' if useful else 'nothing'} is worth more than {100 * bar:.1f} %: "
            f"{_names(same)}"
        )
    unknown = [e for e in rest if e not in same]
    if unknown:
        why = "within the budget" if math.isfinite(floor) else "as the noise floor is not known"
        lines.append(f"not known {why}: {_names(unknown)}")
    if left_out := [e for e in effects if e not in measured]:
        lines.append(f"not measured: {_names(left_out)}")
    return lines


def _harm(effect: Effect, level: str, peaks: Sequence[int]) -> str:
    removed, (low, high) = effect.removed or 1.0, effect.removed_interval or (1.0, 1.0)
    line = (
        f"left out of {level}, {effect.name} makes it {100 / removed - 100:.1f} % faster here "
        f"(95 %: {100 / high - 100:.1f} to {100 / low - 100:.1f} %)"
    )
    saves = _extra_memory(effect, peaks) < 0
    return f"{line}, and more memory is held" if saves else f"{line}: drop it"


def _worth(ratio: float | None, interval: Interval, what: str) -> str:
    if ratio is None or interval is None:
        return WORTH["unmeasured"]
    if what not in ("faster", "slower"):
        return WORTH[what]
    return f"{ratio:.2f}× (95 %: {interval[0]:.2f} to {interval[1]:.2f})"


def _interactions(effects: Sequence[Effect], floor: float) -> list[str]:
    """Which techniques gain more or less in company; why, no ratio tells."""
    floor = math.expm1(math.sqrt(2) * math.log1p(floor))
    lines = []
    for kind, how in (("slower", "less"), ("faster", "more")):
        some = [e for e in effects if _claim(e.interaction, e.interaction_interval, floor) == kind]
        if some:
            verb = "are" if some[1:] else "is"
            lines.append(f"{_names(some)} {verb} worth {how} in company than alone")
    return lines


def _extra_memory(effect: Effect, peaks: Sequence[int]) -> int:
    """By how many bytes it moves the peak, in company if that is known; 0 where chance may."""
    more = effect.removed_memory_bytes
    more = effect.added_memory_bytes if more is None else more
    if not peaks or more is None:
        return 0
    least = max(SHARE * max(peaks), 2 * (max(peaks) - min(peaks)))
    return more if abs(more) > least else 0


def _claim(ratio: float | None, interval: Interval, floor: float) -> str:
    if ratio is None or interval is None:
        return ""
    what = claim(Estimate(ratio, *interval), floor)
    # each technique has processes of its own: the noise of these comes on top of the interval's
    clear = interval[0] > 1 + floor or interval[1] < 1 / (1 + floor)
    return what if what == "same" or clear else ""


def _names(effects: Sequence[Effect]) -> str:
    names = [e.name for e in effects]
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
