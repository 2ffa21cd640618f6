"""Speedup of each technique of a level: added alone to the reference, and left out of the level.

The three intervals of all techniques that engage in the level hold jointly at 95 % (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any

from runner.core.config.run_config import RunConfig
from runner.core.format import share, times_interval
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
class Ablation:
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

    `summary` is that of a finished run of the level; `floor` the noise floor of its benchmark, inf
    where unknown. The rounds share `benchmark.attribute_budget_s`. A trial that fails leaves a note
    at its effect. After Ctrl-C the measurements so far are returned, `stopped` is `interrupted`.
    """
    by_name, trials = plan_trials(level, reference, summary)
    alpha, effects = bonferroni_alpha(INTERVALS_PER_TECHNIQUE * len(trials)), [*by_name.values()]
    options = replace(options, alpha=alpha)
    try:
        stopped = _run_rounds(level, reference, options, by_name, trials, seed)
    except KeyboardInterrupt:
        stopped = INTERRUPTED
    sentences = summarize_effects(effects, level.name, max(floor, NEGLIGIBLE))
    return Attribution(level.name, effects, sentences, stopped)


def _run_rounds(
    level: Arm,
    reference: Arm,
    options: MeasureOptions,
    effects: Mapping[str, Effect],
    trials: Sequence[Ablation],
    seed: int,
) -> str:
    """Measure all trials, `TECHNIQUES_PER_ROUND` per round. Returns why it stopped."""
    remaining_s = budget_s = options.settings.attribute_budget_s
    size, imprecise_rounds = TECHNIQUES_PER_ROUND, 0
    groups = [trials[i : i + size] for i in range(0, len(trials), size)]
    for number, group in enumerate(groups):
        names = " and ".join(trial.name for trial in group)
        options.announce(f"{names}: round {number + 1} of {len(groups)}")
        arms = [reference, level, *(arm for trial in group for arm in (trial.added, trial.removed))]
        share_s = remaining_s / (len(groups) - number)
        round_ = run_round(arms, reference.name, share_s, seed + number, options)
        for trial in group:
            _read_effect(effects[trial.name], trial, round_, reference.name, level.name)
        if round_.measurements.stop_reason == INTERRUPTED:
            return INTERRUPTED
        remaining_s -= round_.measurements.seconds
        imprecise_rounds += not round_.measurements.precise
    if not imprecise_rounds:
        return "every ratio is precise enough" if groups else "there was nothing to measure"
    rounds = f"{imprecise_rounds} of {len(groups)} rounds"
    budget = f"the budget is spent (benchmark.attribute_budget_s={budget_s:g})"
    return f"{budget}: {rounds} ended before every ratio was precise enough"


def _read_effect(
    effect: Effect, trial: Ablation, round_: Round, reference: str, level: str
) -> None:
    """Set the speed-ups and memory of a technique, and a note on each that is unknown."""
    effect.processes, notes, not_engaged = round_.measurements.processes, [], ""
    if (results := round_.results.get(trial.added.name)) is not None:
        row = results.technique(trial.name)
        if not row.get("engaged"):
            not_engaged = f"alone it does not engage: {row.get('reason') or 'no reason given'}"
    for side, baseline, candidate, idle in (
        ("added", reference, trial.added.name, not_engaged),
        ("removed", trial.removed.name, level, ""),
    ):
        problem = round_.describe_failure(reference, baseline, candidate) or idle
        speedup = None if problem else round_.ratio([baseline], [candidate])
        if speedup is None:
            notes.append(problem or "too few blocks for an interval")
            continue
        setattr(effect, side, speedup.ratio)
        setattr(effect, f"{side}_interval", speedup.interval)
        setattr(effect, f"{side}_memory_bytes", _peak_difference(round_, candidate, baseline))
    effect.note = "; ".join(dict.fromkeys(notes))
    if not notes:
        over, under = [trial.removed.name, trial.added.name], [level, reference]
        if (interaction := round_.ratio(over, under)) is not None:
            effect.interaction = interaction.ratio
            effect.interaction_interval = interaction.interval


def _peak_difference(round_: Round, name: str, other: str) -> int | None:
    """Return the peak memory of arm `name` minus that of arm `other`, in bytes; None if unknown."""
    results = [round_.results[n] for n in (name, other) if n in round_.results]
    memories = [run.summary.get("memory") or {} for run in results]
    peaks = [m.get("peak_device_bytes") or m.get("peak_process_bytes") or 0 for m in memories]
    return int(peaks[0] - peaks[1]) if len(peaks) == 2 and all(peaks) else None


# -- the arms of a trial ---------------------------------------------------------------------------


def plan_trials(
    level: Arm, reference: Arm, summary: Mapping[str, Any]
) -> tuple[dict[str, Effect], list[Ablation]]:
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
            trials.append(Ablation(name, added, removed))
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
    harmful, useful = list[Effect](), list[tuple[Effect, str]]()
    threshold = share(floor if floor <= COARSE_NOISE else NEGLIGIBLE)
    nothing, unknown, unmeasured = f"worth no more than {threshold}", "not known", "not measured"
    groups: dict[str, list[str]] = {nothing: [], unknown: [], unmeasured: []}
    for e in effects:
        removed = _classify(e.removed, e.removed_interval, e.processes, floor)
        added = _classify(e.added, e.added_interval, e.processes, floor)
        if e.removed is None and e.added is None:
            groups[unmeasured].append(e.name)
        elif removed == "slower":
            harmful.append(e)
        elif removed == "faster" or added in ("faster", "slower"):
            alone = _describe_gain(e.added, e.added_interval, added)
            in_level = _describe_gain(e.removed, e.removed_interval, removed)
            useful.append((e, f"{e.name}: alone {alone}, within {level} {in_level}"))
        else:
            groups[nothing if removed == "same" else unknown].append(e.name)
    harmful.sort(key=lambda e: e.removed or 1.0)
    useful.sort(key=lambda pair: -max(pair[0].added or 0.0, pair[0].removed or 0.0))
    lines = []
    for e in harmful:
        ratio, (low, high) = e.removed or 1.0, e.removed_interval or (1.0, 1.0)
        bounds = f"{100 / high - 100:.1f} to {share(1 / low - 1)}"
        gain = f"{share(1 / ratio - 1)} faster without {e.name} here (95 %: {bounds})"
        lines.append(f"{level} is {gain}: drop it")
    lines += [text for _, text in useful]
    return lines + [f"{text}: {', '.join(names)}" for text, names in groups.items() if names]


def _describe_gain(ratio: float | None, interval: Interval, label: str) -> str:
    if ratio is None or interval is None:
        return "not known"
    return {"same": "nothing", "": "inconclusive"}.get(label, times_interval(ratio, interval))


def _classify(ratio: float | None, interval: Interval, processes: int, floor: float) -> str:
    if ratio is None or interval is None:
        return ""
    floor = floor if processes > 1 else max(floor, ONE_PROCESS_NOISE)
    label = classify_ratio(Estimate(ratio, *interval, processes), floor)
    # each technique has its own processes, whose noise the interval does not cover
    beyond_floor = interval[0] > 1 + floor or interval[1] < 1 / (1 + floor)
    return label if label == "same" or beyond_floor else ""
