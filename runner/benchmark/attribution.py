"""What each technique of a level is worth: added alone to the plain run, left out of the level.

Both are held against the plain run and against the level in the same blocks, so what a technique
gains or loses by the company of the others is a ratio of four times of one block. A technique
that did not take hold in the level is named, with its reason, and not measured. There are three
intervals to each technique, and all of them together hold at 95 % (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from runner.benchmark.agreement import Judge, Verdict
from runner.benchmark.arms import Arm
from runner.benchmark.blocks import ArmEnded
from runner.benchmark.crew.crew import Finished
from runner.benchmark.heat import INTERRUPTED, Heat, Told, With, run_heat
from runner.benchmark.result import Attribution, Effect
from runner.benchmark.sentences import sentences
from runner.benchmark.statistics import CONFIDENCE, SAME, noise_floor
from runner.benchmark.trials import Trial, planned

INTERVALS = 3  # of each technique: alone, in company, the one over the other
EACH = 2  # techniques to a heat, which makes six processes: each holds half a GB and more
AGAIN = "plain, again"
Judgement = Callable[[Arm, Mapping[str, Any]], Verdict]
"""Of an arm and the choices that its run has made: whether the numbers are right."""


@dataclass
class _Seen:
    """What all heats together say of plain run and level."""

    engaged: set[str] = field(default_factory=set)
    ratios: list[float] = field(default_factory=list)  # log of plain / level, of each heat
    peaks: list[int] = field(default_factory=list)  # of the plain run
    floor: float = 0.0  # that the control, where there is one, says is noise
    choices: dict[str, dict[str, Any]] = field(default_factory=dict)  # of each arm added alone


def attribute(
    level: Arm,
    reference: Arm,
    how: With,
    seed: int = 0,
    told: Told | None = None,
    summary: Mapping[str, Any] | None = None,
    floor: float | None = None,
    judge: Judgement | None = None,
) -> Attribution:
    """What the techniques of `level` are worth, one by one, held against `reference`.

    `summary` is that of a finished run of the level, which says what took hold; without one such a
    run is made first. `floor` is the noise floor of a control that ran before; without one the
    first heat has a control. Within `benchmark.attribute_budget_s` of measuring, shared evenly.
    A trial that fails is a note at its effect; after Ctrl-C there is what was measured so far, and
    `stopped` is `interrupted`.
    """
    found, seen = Attribution(level.name), _Seen()
    try:
        if summary is None:
            summary = _scouted(level, how, told).summary
        seen.engaged = _engaged(summary)
        effects, trials = planned(level, reference, summary)
        found.effects = list(effects.values())
        how = replace(how, alpha=(1 - CONFIDENCE) / max(1, INTERVALS * len(trials)))
        found.stopped = _heats(trials, effects, level, reference, how, seed, told, seen, floor)
        if found.stopped != INTERRUPTED and how.settings.parity:
            with ExitStack() as stack:
                if judge is None:
                    judge = stack.enter_context(Judge(how.settings.timeout_s, how.given)).judge
                _judge(trials, effects, seen, told, judge)
    except ArmEnded as ended:
        found.stopped = f"{level.name}: {ended.status}: {ended.reason}"
    except KeyboardInterrupt:
        found.stopped = INTERRUPTED
    found.sentences = sentences(found.effects, level.name, _floor(seen, floor), seen.peaks)
    return found


def _heats(
    trials: Sequence[Trial],
    effects: Mapping[str, Effect],
    level: Arm,
    reference: Arm,
    how: With,
    seed: int,
    told: Told | None,
    seen: _Seen,
    floor: float | None,
) -> str:
    """Measure all trials, a few at a time; why it ended."""
    heats = [trials[i : i + EACH] for i in range(0, len(trials), EACH)]
    left, short = how.settings.attribute_budget_s, 0
    for number, some in enumerate(heats):
        budget = left / (len(heats) - number)
        arms = [reference, level, *(arm for one in some for arm in (one.added, one.removed))]
        control = number == 0 and floor is None and how.settings.control
        if control:
            arms.append(replace(reference, name=AGAIN, folder=""))
        if told is not None:
            told(f"{' and '.join(one.name for one in some)}: heat {number + 1} of {len(heats)}")
        heat = run_heat(arms, reference.name, budget, seed + number, how, told)
        _note(heat, seen, reference.name, level.name, control)
        for one in some:
            _measured(effects[one.name], one, heat, seen, reference.name, level.name)
        if heat.measured.stopped == INTERRUPTED:
            return INTERRUPTED
        left -= heat.measured.seconds
        short += heat.measured.seconds >= budget
    return _stopped(how.settings.attribute_budget_s, short, len(heats))


def _judge(
    trials: Sequence[Trial],
    effects: Mapping[str, Effect],
    seen: _Seen,
    told: Told | None,
    judge: Judgement,
) -> None:
    """Whether each technique alone leaves the numbers right, where it took hold."""
    for one in trials:
        if one.added.name not in seen.choices:
            continue
        if told is not None:
            told(f"{one.name}: are the numbers right?")
        verdict = judge(one.added, seen.choices[one.added.name])
        effects[one.name].parity = verdict.parity
        if verdict.parity in (None, "FAIL"):
            _say(effects[one.name], f"parity: {verdict.reason}")


def _scouted(level: Arm, how: With, told: Told | None) -> Finished:
    """A run of the level by itself, to see what takes hold."""
    if told is not None:
        told(f"{level.name}: which techniques take hold")
    with how.crew([level], how.settings, how.folder, how.given) as crew:
        crew.start(level.name)
        return crew.finish(level.name)


def _engaged(summary: Mapping[str, Any]) -> set[str]:
    return {row["name"] for row in summary.get("techniques", []) if row.get("engaged")}


def _note(heat: Heat, seen: _Seen, plain: str, level: str, control: bool) -> None:
    """Take along what the heat says of the two arms that are in each."""
    whole = heat.ratio([plain], [level])
    if whole is not None:
        seen.ratios.append(math.log(whole.ratio))
    if plain in heat.finished:
        seen.peaks.append(_peak(heat.finished[plain]))
    if control:
        seen.floor = noise_floor(heat.ratio([plain], [AGAIN]))


def _measured(effect: Effect, one: Trial, heat: Heat, seen: _Seen, plain: str, level: str) -> None:
    """Fill in what the heat says of one technique, and why where it says nothing."""
    alone = company = None
    if word := heat.why_not(plain, one.added.name) or _missing(one.name, heat, one.added.name):
        _say(effect, word)
    else:
        alone = heat.ratio([plain], [one.added.name])
        _say(effect, "" if alone else "too few blocks for an interval")
        effect.added_memory_bytes = _more(heat, one.added.name, plain)
        seen.choices[one.added.name] = _choices(heat, one.added.name)
    if word := heat.why_not(plain, level, one.removed.name):
        _say(effect, word)
    else:
        company = heat.ratio([one.removed.name], [level])
        _say(effect, "" if company else "too few blocks for an interval")
        effect.removed_memory_bytes = _more(heat, level, one.removed.name)
        _say(effect, _instead(one.name, seen.engaged, heat.finished.get(one.removed.name)))
    if alone is not None:
        effect.added, effect.added_interval = alone.ratio, (alone.low, alone.high)
    if company is not None:
        effect.removed, effect.removed_interval = company.ratio, (company.low, company.high)
    if alone is not None and company is not None:
        both = heat.ratio([one.removed.name, one.added.name], [level, plain])
        if both is not None:
            effect.interaction, effect.interaction_interval = both.ratio, (both.low, both.high)


def _missing(name: str, heat: Heat, arm: str) -> str:
    """Why the technique did not take hold in that arm; "" where it did, or nobody has looked."""
    if arm not in heat.finished:
        return ""
    for row in heat.finished[arm].summary.get("techniques", []):
        if row["name"] == name and row.get("engaged"):
            return ""
        if row["name"] == name:
            return f"alone it does not take hold: {row.get('reason') or 'no reason given'}"
    return "alone it does not take hold: not seen"


def _choices(heat: Heat, arm: str) -> dict[str, Any]:
    rows = heat.finished[arm].summary.get("choices", []) if arm in heat.finished else []
    return {row["key"]: row["value"] for row in rows}


def _instead(name: str, engaged: set[str], without: Finished | None) -> str:
    """Which other techniques hold, or do no more, where this one is left out."""
    if without is None:
        return ""
    now = _engaged(without.summary)
    gone, come = sorted(engaged - now - {name}), sorted(now - engaged)
    said = [f"{' and '.join(come)} in its place"] if come else []
    said += [f"no {' or '.join(gone)} either"] if gone else []
    return f"without it {', '.join(said)}" if said else ""


def _say(effect: Effect, word: str) -> None:
    if word and word not in effect.note:
        effect.note = "; ".join(filter(None, [effect.note, word]))


def _peak(finished: Finished) -> int:
    memory = finished.summary.get("memory") or {}
    own = (memory.get("peak_process_bytes") or 0) + finished.worker_bytes
    return int(memory.get("peak_device_bytes") or own)


def _more(heat: Heat, name: str, than: str) -> int | None:
    """By how much the peak of one is above that of the other."""
    ours, theirs = (heat.finished.get(one) for one in (name, than))
    if ours is None or theirs is None or not (_peak(ours) and _peak(theirs)):
        return None
    return _peak(ours) - _peak(theirs)


def _floor(seen: _Seen, given: float | None) -> float:
    """What is noise: the control's, or what plain run and level differed by from heat to heat; 2 %
    at least.

    Each heat has processes of its own, and where a process lies in memory makes a difference.
    """
    floor = seen.floor if given is None else given
    spread = max(seen.ratios) - min(seen.ratios) if seen.ratios else 0.0
    return max(floor, math.expm1(spread), SAME)


def _stopped(budget_s: float, short: int, heats: int) -> str:
    if not heats:
        return "there was nothing to measure"
    if not short:
        return "known well enough"
    some = "all heats" if short == heats else f"{short} of {heats} heats"
    spent = f"the budget is spent (benchmark.attribute_budget_s={budget_s:g})"
    return f"{spent}: {some} ended before all was narrow"
