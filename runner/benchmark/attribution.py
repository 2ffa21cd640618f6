"""Speedup of each technique of a level: added alone to the reference, and left out of the level.

Techniques that did not engage in the level are listed but not measured. The three intervals of all
measured techniques hold jointly at 95 % (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any

from runner.benchmark.arms import Arm
from runner.benchmark.blocks import INTERRUPTED
from runner.benchmark.result import SAME, Attribution, Effect
from runner.benchmark.rounds import MeasureOptions, Round, run_round
from runner.benchmark.statistics import COARSE, ONE_PROCESS, Estimate, claim, each_alpha
from runner.config import RunConfig

INTERVALS = 3  # intervals of each technique: alone, within the level, and their ratio
EACH = 2  # techniques per round, which makes six processes of 0.5 GB or more
AFTERWARDS = {"quantization": "applies to inference only"}
Interval = tuple[float, float] | None


@dataclass(frozen=True)
class AttributionTrial:
    """A technique and the two arms that measure it: reference + technique, level - technique."""

    name: str
    added: Arm
    removed: Arm


def attribute(
    level: Arm,
    reference: Arm,
    options: MeasureOptions,
    summary: Mapping[str, Any],
    seed: int = 0,
    floor: float = 0.0,
) -> Attribution:
    """Measure the techniques of `level` one by one, alone and within the level.

    `summary` is the summary of a finished run of the level; `floor` the noise floor of its
    benchmark, inf where unknown. The rounds share `benchmark.attribute_budget_s` evenly. A trial
    that fails leaves a note at its effect. Ctrl-C is not raised: the measurements so far are
    returned, with `stopped` set to `interrupted`.
    """
    effects, trials = plan_trials(level, reference, summary)
    alpha = each_alpha(INTERVALS * len(trials))
    state = _Attribution(level, reference, replace(options, alpha=alpha), effects)
    try:
        stopped = state.run_rounds(trials, seed)
    except KeyboardInterrupt:
        stopped = INTERRUPTED
    sentences = summarize(list(effects.values()), level.name, max(floor, SAME))
    return Attribution(level.name, list(effects.values()), sentences, stopped)


@dataclass
class _Attribution:
    """An attribution in progress."""

    level: Arm
    reference: Arm
    options: MeasureOptions
    effects: dict[str, Effect]

    def run_rounds(self, trials: Sequence[AttributionTrial], seed: int) -> str:
        """Measure all trials, `EACH` per round. Returns why it stopped."""
        left = budget_s = self.options.settings.attribute_budget_s
        groups = [trials[i : i + EACH] for i in range(0, len(trials), EACH)]
        short = 0
        for number, group in enumerate(groups):
            names = " and ".join(trial.name for trial in group)
            self.options.announce(f"{names}: round {number + 1} of {len(groups)}")
            measured = self._run_round(group, left / (len(groups) - number), seed + number).measured
            if measured.stopped == INTERRUPTED:
                return INTERRUPTED
            left -= measured.seconds
            short += not measured.precise
        if not short:
            return "every ratio is precise enough" if groups else "there was nothing to measure"
        return (
            f"the budget is spent (benchmark.attribute_budget_s={budget_s:g}): {short} of "
            f"{len(groups)} rounds ended before every ratio was precise enough"
        )

    def _run_round(self, group: Sequence[AttributionTrial], budget_s: float, seed: int) -> Round:
        plain, level = self.reference.name, self.level.name
        arms = [self.reference, self.level]
        arms += [arm for trial in group for arm in (trial.added, trial.removed)]
        round_ = run_round(arms, plain, budget_s, seed, self.options)
        for trial in group:
            added, removed = trial.added.name, trial.removed.name
            effect, idle = self.effects[trial.name], _explain_idle(trial, round_)
            effect.processes = round_.measured.processes
            if (alone := self._compare(effect, round_, plain, added, idle)) is not None:
                effect.added, effect.added_interval = alone.ratio, alone.interval
                effect.added_memory_bytes = _peak_difference(round_, added, plain)
            if (within := self._compare(effect, round_, removed, level)) is not None:
                effect.removed, effect.removed_interval = within.ratio, within.interval
                effect.removed_memory_bytes = _peak_difference(round_, level, removed)
            both = round_.ratio([removed, added], [level, plain]) if alone and within else None
            if both is not None:
                effect.interaction, effect.interaction_interval = both.ratio, both.interval
        return round_

    def _compare(
        self, effect: Effect, round_: Round, without: str, with_it: str, idle: str = ""
    ) -> Estimate | None:
        """Return the speedup of `with_it` over `without`; None, and a note, if unknown."""
        why = round_.explain_end(self.reference.name, without, with_it) or idle
        ratio = None if why else round_.ratio([without], [with_it])
        note = why or "too few blocks for an interval"
        if ratio is None and note not in effect.note:
            effect.note = "; ".join(filter(None, [effect.note, note]))
        return ratio


def _explain_idle(trial: AttributionTrial, round_: Round) -> str:
    """Return why the technique did not engage in the `added` arm; "" if it did, or if unknown."""
    if trial.added.name not in round_.finished:
        return ""
    row = round_.finished[trial.added.name].technique(trial.name)
    if row.get("engaged"):
        return ""
    return f"alone it does not engage: {row.get('reason') or 'no reason given'}"


def _peak_difference(round_: Round, name: str, than: str) -> int | None:
    """Return the peak memory of arm `name` minus that of arm `than`, in bytes; None if unknown."""
    finished = [round_.finished[n] for n in (name, than) if n in round_.finished]
    memories = [one.summary.get("memory") or {} for one in finished]
    peaks = [m.get("peak_device_bytes") or m.get("peak_process_bytes") or 0 for m in memories]
    return int(peaks[0] - peaks[1]) if len(peaks) == 2 and all(peaks) else None


# -- the arms of a trial ---------------------------------------------------------------------------


def plan_trials(
    level: Arm, reference: Arm, summary: Mapping[str, Any]
) -> tuple[dict[str, Effect], list[AttributionTrial]]:
    """Return an Effect per requested technique, in order of application, and the trials to run."""
    effects: dict[str, Effect] = {}
    trials = []
    rows = {row["name"]: row for row in summary.get("techniques", [])}
    names = [
        name for name, technique in level.config.optimization.techniques() if technique.enabled
    ]
    for name in names + [one.rpartition(".")[2] for one in level.config.optimization.extra]:
        effects[name] = Effect(name, note=_explain_untried(name, level, reference, rows))
        if not effects[name].note:
            added = _take_technique(reference, level, name, f"{reference.name} + {name}")
            removed = _take_technique(level, reference, name, f"{level.name} - {name}")
            trials.append(AttributionTrial(name, added, removed))
    return effects, trials


def _explain_untried(
    name: str, level: Arm, reference: Arm, rows: Mapping[str, Mapping[str, Any]]
) -> str:
    row = rows.get(name, {})
    if name in AFTERWARDS:
        return AFTERWARDS[name]
    if not row.get("engaged"):
        return f"did not engage in {level.name}: {row.get('reason') or 'not seen'}"
    if _find_technique(level.config, name) == _find_technique(reference.config, name):
        return f"is in {reference.name} too"
    if others := (row.get("evidence") or {}).get("part_of"):
        return f"had no separate effect in {level.name}: part of {others}"
    return ""


def _take_technique(arm: Arm, other: Arm, name: str, called: str) -> Arm:
    """Return `arm` with the setting of technique `name` copied from `other`."""
    config = copy(arm.config)
    config.optimization = deepcopy(arm.config.optimization)
    config.optimization.level, config.optimization.strict = "custom", False
    theirs = _find_technique(other.config, name)
    if isinstance(theirs, str | None):  # a technique of the user's own, by its class
        extra = [t for t in config.optimization.extra if t.rpartition(".")[2] != name]
        config.optimization.extra = extra + ([theirs] if theirs else [])
    else:
        setattr(config.optimization, name, deepcopy(theirs))
    return Arm(called, config)


def _find_technique(config: RunConfig, name: str) -> Any:
    """Return a technique's config; for a user's technique its class path, or None if it is off."""
    for own, technique in config.optimization.techniques():
        if own == name:
            return technique
    return next((t for t in config.optimization.extra if t.rpartition(".")[2] == name), None)


# -- the sentences ---------------------------------------------------------------------------------


def summarize(effects: Sequence[Effect], level: str, floor: float) -> list[str]:
    """Return summary sentences, most important first, of effects larger than `floor` (a share)."""
    within = {e.name: _claim(e.removed, e.removed_interval, e.processes, floor) for e in effects}
    alone = {e.name: _claim(e.added, e.added_interval, e.processes, floor) for e in effects}
    measured = [e for e in effects if e.removed is not None or e.added is not None]
    harmful = [e for e in measured if within[e.name] == "slower"]
    rest = [e for e in measured if e not in harmful]
    useful = [
        e for e in rest if within[e.name] == "faster" or alone[e.name] in ("faster", "slower")
    ]
    lines = [_describe_harm(e, level) for e in sorted(harmful, key=lambda e: e.removed or 1.0)]
    for e in sorted(useful, key=lambda e: max(e.added or 0.0, e.removed or 0.0), reverse=True):
        by_itself = _describe_worth(e.added, e.added_interval, alone[e.name])
        together = _describe_worth(e.removed, e.removed_interval, within[e.name])
        lines.append(f"{e.name}: alone {by_itself}, within {level} {together}")
    bar = 100 * (floor if floor <= COARSE else SAME)
    unproved = [e for e in rest if e not in useful]
    groups = {
        f"nothing{' else' if useful else ''} is worth more than {bar:.1f} %": [
            e.name for e in unproved if within[e.name] == "same"
        ],
        "not known": [e.name for e in unproved if within[e.name] != "same"],
        "not measured": [e.name for e in effects if e not in measured],
    }
    return lines + [f"{text}: {', '.join(names)}" for text, names in groups.items() if names]


def _describe_harm(effect: Effect, level: str) -> str:
    removed, (low, high) = effect.removed or 1.0, effect.removed_interval or (1.0, 1.0)
    return (
        f"{level} is {100 / removed - 100:.1f} % faster without {effect.name} here "
        f"(95 %: {100 / high - 100:.1f} to {100 / low - 100:.1f} %): drop it"
    )


def _describe_worth(ratio: float | None, interval: Interval, what: str) -> str:
    if ratio is None or interval is None:
        return "not known"
    worth = f"{ratio:.2f}× (95 %: {interval[0]:.2f} to {interval[1]:.2f})"
    return {"same": "nothing", "": "inconclusive"}.get(what, worth)


def _claim(ratio: float | None, interval: Interval, processes: int, floor: float) -> str:
    if ratio is None or interval is None:
        return ""
    floor = floor if processes > 1 else max(floor, ONE_PROCESS)
    what = claim(Estimate(ratio, *interval, processes), floor)
    # each technique has its own processes, whose noise the interval does not cover
    clear = interval[0] > 1 + floor or interval[1] < 1 / (1 + floor)
    return what if what == "same" or clear else ""
