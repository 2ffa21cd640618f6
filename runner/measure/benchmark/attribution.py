"""Speedup of each technique of a level: added alone to the reference, and left out of the level.

Techniques that did not engage in the level are listed but not measured. The three intervals of all
measured techniques hold jointly at 95 % (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any

from runner.core.config.run_config import RunConfig
from runner.measure.benchmark.arms import Arm
from runner.measure.benchmark.blocks import INTERRUPTED
from runner.measure.benchmark.result import NEGLIGIBLE, Attribution, Effect
from runner.measure.benchmark.rounds import MeasureOptions, Round, run_round
from runner.measure.benchmark.statistics import (
    COARSE_NOISE,
    ONE_PROCESS_NOISE,
    Estimate,
    bonferroni_alpha,
    classify_ratio,
)

INTERVALS_PER_TECHNIQUE = 3  # alone, within the level, and their ratio
TECHNIQUES_PER_ROUND = 2  # which makes six processes of 0.5 GB or more
INFERENCE_ONLY = {"quantization": "applies to inference only"}
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
    alpha = bonferroni_alpha(INTERVALS_PER_TECHNIQUE * len(trials))
    state = _AttributionRun(level, reference, replace(options, alpha=alpha), effects)
    try:
        stopped = state.run_rounds(trials, seed)
    except KeyboardInterrupt:
        stopped = INTERRUPTED
    sentences = summarize_effects(list(effects.values()), level.name, max(floor, NEGLIGIBLE))
    return Attribution(level.name, list(effects.values()), sentences, stopped)


@dataclass
class _AttributionRun:
    """An attribution in progress."""

    level: Arm
    reference: Arm
    options: MeasureOptions
    effects: dict[str, Effect]

    def run_rounds(self, trials: Sequence[AttributionTrial], seed: int) -> str:
        """Measure all trials, `TECHNIQUES_PER_ROUND` per round. Returns why it stopped."""
        remaining_s = budget_s = self.options.settings.attribute_budget_s
        size = TECHNIQUES_PER_ROUND
        groups = [trials[i : i + size] for i in range(0, len(trials), size)]
        imprecise_rounds = 0
        for number, group in enumerate(groups):
            names = " and ".join(trial.name for trial in group)
            self.options.announce(f"{names}: round {number + 1} of {len(groups)}")
            share_s = remaining_s / (len(groups) - number)
            measurements = self._run_round(group, share_s, seed + number).measurements
            if measurements.stop_reason == INTERRUPTED:
                return INTERRUPTED
            remaining_s -= measurements.seconds
            imprecise_rounds += not measurements.precise
        if not imprecise_rounds:
            return "every ratio is precise enough" if groups else "there was nothing to measure"
        return (
            f"the budget is spent (benchmark.attribute_budget_s={budget_s:g}): {imprecise_rounds} "
            f"of {len(groups)} rounds ended before every ratio was precise enough"
        )

    def _run_round(self, group: Sequence[AttributionTrial], budget_s: float, seed: int) -> Round:
        reference, level = self.reference.name, self.level.name
        arms = [self.reference, self.level]
        arms += [arm for trial in group for arm in (trial.added, trial.removed)]
        round_ = run_round(arms, reference, budget_s, seed, self.options)
        for trial in group:
            added, removed = trial.added.name, trial.removed.name
            effect, not_engaged = self.effects[trial.name], _explain_not_engaged(trial, round_)
            effect.processes = round_.measurements.processes
            alone = self._measure_speedup(effect, round_, reference, added, not_engaged)
            if alone is not None:
                effect.added, effect.added_interval = alone.ratio, alone.interval
                effect.added_memory_bytes = _peak_difference(round_, added, reference)
            in_level = self._measure_speedup(effect, round_, removed, level)
            if in_level is not None:
                effect.removed, effect.removed_interval = in_level.ratio, in_level.interval
                effect.removed_memory_bytes = _peak_difference(round_, level, removed)
            if not alone or not in_level:
                continue
            interaction = round_.ratio([removed, added], [level, reference])
            if interaction is not None:
                effect.interaction = interaction.ratio
                effect.interaction_interval = interaction.interval
        return round_

    def _measure_speedup(
        self, effect: Effect, round_: Round, baseline: str, candidate: str, not_engaged: str = ""
    ) -> Estimate | None:
        """Return the speedup of `candidate` over `baseline`; None, and a note, if unknown."""
        problem = round_.describe_failure(self.reference.name, baseline, candidate) or not_engaged
        speedup = None if problem else round_.ratio([baseline], [candidate])
        note = problem or "too few blocks for an interval"
        if speedup is None and note not in effect.note:
            effect.note = "; ".join(filter(None, [effect.note, note]))
        return speedup


def _explain_not_engaged(trial: AttributionTrial, round_: Round) -> str:
    """Return why the technique did not engage in the `added` arm; "" if it did, or if unknown."""
    if trial.added.name not in round_.results:
        return ""
    row = round_.results[trial.added.name].technique(trial.name)
    if row.get("engaged"):
        return ""
    return f"alone it does not engage: {row.get('reason') or 'no reason given'}"


def _peak_difference(round_: Round, name: str, other: str) -> int | None:
    """Return the peak memory of arm `name` minus that of arm `other`, in bytes; None if unknown."""
    results = [round_.results[n] for n in (name, other) if n in round_.results]
    memories = [run.summary.get("memory") or {} for run in results]
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
    names = [name for name, t in level.config.optimization.techniques() if t.enabled]
    for name in names + [one.rpartition(".")[2] for one in level.config.optimization.extra]:
        effects[name] = Effect(name, note=_explain_not_measured(name, level, reference, rows))
        if not effects[name].note:
            added = _copy_technique(reference, level, name, f"{reference.name} + {name}")
            removed = _copy_technique(level, reference, name, f"{level.name} - {name}")
            trials.append(AttributionTrial(name, added, removed))
    return effects, trials


def _explain_not_measured(
    name: str, level: Arm, reference: Arm, rows: Mapping[str, Mapping[str, Any]]
) -> str:
    row = rows.get(name, {})
    if name in INFERENCE_ONLY:
        return INFERENCE_ONLY[name]
    if not row.get("engaged"):
        return f"did not engage in {level.name}: {row.get('reason') or 'not seen'}"
    if _find_technique(level.config, name) == _find_technique(reference.config, name):
        return f"is in {reference.name} too"
    if joint := (row.get("evidence") or {}).get("part_of"):
        return f"had no separate effect in {level.name}: part of {joint}"
    return ""


def _copy_technique(arm: Arm, source: Arm, name: str, arm_name: str) -> Arm:
    """Return `arm` with the setting of technique `name` copied from `source`."""
    config = copy(arm.config)
    config.optimization = deepcopy(arm.config.optimization)
    config.optimization.level, config.optimization.strict = "custom", False
    setting = _find_technique(source.config, name)
    if isinstance(setting, str | None):  # a technique of the user's own, by its class
        extra = [t for t in config.optimization.extra if t.rpartition(".")[2] != name]
        config.optimization.extra = extra + ([setting] if setting else [])
    else:
        setattr(config.optimization, name, deepcopy(setting))
    return Arm(arm_name, config)


def _find_technique(config: RunConfig, name: str) -> Any:
    """Return a technique's config; for a user's technique its class path, or None if it is off."""
    for builtin, technique in config.optimization.techniques():
        if builtin == name:
            return technique
    return next((t for t in config.optimization.extra if t.rpartition(".")[2] == name), None)


# -- the sentences ---------------------------------------------------------------------------------


def summarize_effects(effects: Sequence[Effect], level: str, floor: float) -> list[str]:
    """Return summary sentences, most important first, of effects larger than `floor` (a share)."""
    removed, added = dict[str, str](), dict[str, str]()
    for e in effects:
        removed[e.name] = _classify(e.removed, e.removed_interval, e.processes, floor)
        added[e.name] = _classify(e.added, e.added_interval, e.processes, floor)
    measured = [e for e in effects if e.removed is not None or e.added is not None]
    harmful = [e for e in measured if removed[e.name] == "slower"]
    harmless = [e for e in measured if e not in harmful]
    useful = [
        e for e in harmless if removed[e.name] == "faster" or added[e.name] in ("faster", "slower")
    ]
    lines = [_describe_harm(e, level) for e in sorted(harmful, key=lambda e: e.removed or 1.0)]
    for e in sorted(useful, key=lambda e: max(e.added or 0.0, e.removed or 0.0), reverse=True):
        alone = _describe_gain(e.added, e.added_interval, added[e.name])
        in_level = _describe_gain(e.removed, e.removed_interval, removed[e.name])
        lines.append(f"{e.name}: alone {alone}, within {level} {in_level}")
    threshold_percent = 100 * (floor if floor <= COARSE_NOISE else NEGLIGIBLE)
    unclaimed = [e for e in harmless if e not in useful]
    groups = {
        f"nothing{' else' if useful else ''} is worth more than {threshold_percent:.1f} %": [
            e.name for e in unclaimed if removed[e.name] == "same"
        ],
        "not known": [e.name for e in unclaimed if removed[e.name] != "same"],
        "not measured": [e.name for e in effects if e not in measured],
    }
    return lines + [f"{text}: {', '.join(names)}" for text, names in groups.items() if names]


def _describe_harm(effect: Effect, level: str) -> str:
    removed, (low, high) = effect.removed or 1.0, effect.removed_interval or (1.0, 1.0)
    return (
        f"{level} is {100 / removed - 100:.1f} % faster without {effect.name} here "
        f"(95 %: {100 / high - 100:.1f} to {100 / low - 100:.1f} %): drop it"
    )


def _describe_gain(ratio: float | None, interval: Interval, label: str) -> str:
    if ratio is None or interval is None:
        return "not known"
    text = f"{ratio:.2f}× (95 %: {interval[0]:.2f} to {interval[1]:.2f})"
    return {"same": "nothing", "": "inconclusive"}.get(label, text)


def _classify(ratio: float | None, interval: Interval, processes: int, floor: float) -> str:
    if ratio is None or interval is None:
        return ""
    floor = floor if processes > 1 else max(floor, ONE_PROCESS_NOISE)
    label = classify_ratio(Estimate(ratio, *interval, processes), floor)
    # each technique has its own processes, whose noise the interval does not cover
    beyond_floor = interval[0] > 1 + floor or interval[1] < 1 / (1 + floor)
    return label if label == "same" or beyond_floor else ""
