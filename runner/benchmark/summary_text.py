"""What a person should take away from an attribution: only what is beyond the noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from runner.benchmark.result import Effect
from runner.benchmark.statistics import COARSE, SAME, Estimate, claim

MIB = 2**20
SHARE = 0.05  # of the plain run's peak: memory that is worth a word
Interval = tuple[float, float] | None


def summary_text(
    effects: Sequence[Effect], level: str, floor: float, peaks: Sequence[int] = ()
) -> list[str]:
    """What of it to say, what matters most first.

    `floor` is the noise floor of a ratio of two processes, as a share, inf where it is not known;
    an interaction is a ratio of four and has √2 times that. Nothing within 2 % is said to be there,
    however still the machine was. `peaks` are those of the plain run, in bytes, one a heat: by what
    they differ, memory differs by chance.
    """
    floor = max(floor, SAME)
    measured = [e for e in effects if e.removed is not None or e.added is not None]
    harmful = [e for e in measured if _company(e, floor) == "slower"]
    said = [_harm(e, level, peaks) for e in _by(harmful, lambda e: e.removed or 1.0)]
    worth = [e for e in measured if e not in harmful and _tells(e, floor)]
    said += [_worth(e, level, floor) for e in _by(worth, lambda e: -_most(e))]
    said += _together(measured, floor)
    said += [_memory(e, more) for e in measured if (more := _moves(e, peaks))]
    said += [f"{e.name} changes the numbers: {e.note}" for e in effects if e.parity == "FAIL"]
    rest = [e for e in measured if e not in harmful and e not in worth]
    same = [e for e in rest if _company(e, floor) == "same"]
    if same:
        what = "nothing else is" if worth else "nothing is"
        bar = floor if floor <= COARSE else SAME
        said.append(f"{what} worth more than {_percent(bar)}: {_names(same)}")
    open_ = [f"{e.name} ({_between(e.removed_interval or e.added_interval)})"
             for e in rest if e not in same]  # fmt: skip
    if open_:
        why = "within the budget" if math.isfinite(floor) else "since the control came to nothing"
        said.append(f"not known {why}: {', '.join(open_)}")
    left_out = [e.name for e in effects if e not in measured]
    if left_out:
        said.append(f"not measured: {', '.join(left_out)}")
    return said


def _harm(effect: Effect, level: str, peaks: Sequence[int]) -> str:
    removed, (low, high) = effect.removed or 1.0, effect.removed_interval or (1.0, 1.0)
    said = (
        f"left out of {level}, {effect.name} makes it {_percent(1 / removed - 1)} faster here "
        f"(95 %: {_percents(1 / high - 1, 1 / low - 1)})"
    )
    saves = _moves(effect, peaks) < 0
    return f"{said}, and more memory is held" if saves else f"{said}: drop it"


def _worth(effect: Effect, level: str, floor: float) -> str:
    alone, company = _alone(effect, floor), _company(effect, floor)
    if alone == "faster" and company == "faster":
        said = f"{_times(effect.added)} alone, {_times(effect.removed)} in company"
        said += f" (95 %: {_between(effect.removed_interval)})"
    elif company == "faster":
        rest = "slower alone" if alone == "slower" else "nothing that can be told alone"
        rest = "not to be had alone" if effect.added is None else rest
        said = f"{_times(effect.removed)} in company (95 %: {_between(effect.removed_interval)})"
        said = f"{said}, {rest}"
    elif alone == "faster":
        rest = "nothing" if company == "same" else "nothing that can be told"
        rest = "not known" if effect.removed is None else rest
        said = f"{_times(effect.added)} alone (95 %: {_between(effect.added_interval)}), {rest}"
        said += f" in {level}"
    else:
        low, high = effect.added_interval or (1.0, 1.0)
        return (
            f"alone {effect.name} makes a step {_percent(1 / (effect.added or 1.0) - 1)} longer "
            f"(95 %: {_percents(1 / high - 1, 1 / low - 1)}); in {level} that cannot be told"
        )
    return f"{effect.name} is worth {said}"


def _together(effects: Sequence[Effect], floor: float) -> list[str]:
    """Who gains or loses by the company of the others; why, no ratio tells."""
    floor = math.expm1(math.sqrt(2) * math.log1p(floor))
    said = []
    for kind, how in (("slower", "less"), ("faster", "more")):
        some = [e for e in effects if _claim(e.interaction, e.interaction_interval, floor) == kind]
        if some:
            verb = "are" if some[1:] else "is"
            said.append(f"{_names(some)} {verb} worth {how} in company than alone")
    return said


def _memory(effect: Effect, more: int) -> str:
    size, than = f"{abs(more) / MIB:,.0f} MiB", "more" if more > 0 else "less"
    return f"with {effect.name} the peak is {size} {than}"


def _moves(effect: Effect, peaks: Sequence[int]) -> int:
    """By how many bytes it moves the peak, in company if that is known; 0 where chance may."""
    more = effect.removed_memory_bytes
    more = effect.added_memory_bytes if more is None else more
    if not peaks or more is None:
        return 0
    least = max(SHARE * max(peaks), 2 * (max(peaks) - min(peaks)))
    return more if abs(more) > least else 0


def _tells(effect: Effect, floor: float) -> bool:
    return _company(effect, floor) == "faster" or _alone(effect, floor) in ("faster", "slower")


def _company(effect: Effect, floor: float) -> str:
    return _claim(effect.removed, effect.removed_interval, floor)


def _alone(effect: Effect, floor: float) -> str:
    return _claim(effect.added, effect.added_interval, floor)


def _claim(ratio: float | None, interval: Interval, floor: float) -> str:
    if ratio is None or interval is None:
        return ""
    said = claim(Estimate(ratio, *interval), floor)
    # each technique has processes of its own: the noise of these comes on top of the interval's
    clear = interval[0] > 1 + floor or interval[1] < 1 / (1 + floor)
    return said if said == "same" or clear else ""


def _most(effect: Effect) -> float:
    return max(effect.added or 0.0, effect.removed or 0.0)


def _by(effects: list[Effect], key: Callable[[Effect], float]) -> list[Effect]:
    return sorted(effects, key=key)


def _names(effects: Sequence[Effect]) -> str:
    names = [e.name for e in effects]
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _times(ratio: float | None) -> str:
    if ratio is None:
        return "nothing known"
    return f"{ratio:.1f}×" if ratio >= 1.2 else _percent(ratio - 1)


def _between(interval: Interval) -> str:
    return "unknown" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}×"


def _percent(share: float) -> str:
    return f"{_digits(share)} %"


def _percents(low: float, high: float) -> str:
    return f"{_digits(low)} to {_digits(high)} %"


def _digits(share: float) -> str:
    return f"{100 * share:.1f}" if abs(share) < 0.1 else f"{100 * share:.0f}"
