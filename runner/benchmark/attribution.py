"""What each technique of a level is worth: added alone to the plain run, left out of the level.

Both are measured in the same blocks as the plain run and the level, so the interaction of a
technique with the others is a ratio of four times of one block. Techniques that are not engaged in
the level are named and not measured. The three intervals of each technique hold at 95 % all
together (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy, deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any

from runner.benchmark.arms import Arm, knob_text
from runner.benchmark.blocks import INTERRUPTED
from runner.benchmark.parity_checker import ParityChecker, ParityVerdict
from runner.benchmark.result import Attribution, Effect
from runner.benchmark.rounds import MeasureOptions, Round, Told, run_round
from runner.benchmark.rows import collect_choices
from runner.benchmark.statistics import CONFIDENCE, SAME, Estimate
from runner.benchmark.summary_text import summary_text
from runner.benchmark.workers.messages import Finished
from runner.config import RunConfig

INTERVALS = 3  # of each technique: alone, in company, the one over the other
EACH = 2  # techniques to a round, which makes six processes of half a GB and more
AFTERWARDS = {"quantization": "is for inference: training never sees it"}
CheckParity = Callable[[Arm, Mapping[str, Any]], ParityVerdict]
"""Of an arm and the choices that its run has made: whether the numbers are right."""


@dataclass(frozen=True)
class AttributionTrial:
    """One technique, and the two arms that show what it is worth."""

    name: str
    added: Arm
    removed: Arm


def attribute(
    level: Arm,
    reference: Arm,
    options: MeasureOptions,
    summary: Mapping[str, Any],
    seed: int = 0,
    told: Told | None = None,
    floor: float = 0.0,
    check_parity: CheckParity | None = None,
) -> Attribution:
    """What the techniques of `level` are worth, one by one, next to `reference`.

    `summary` is that of a finished run of the level, `floor` the noise floor of its benchmark, inf
    where it is not known. `benchmark.attribute_budget_s` of measuring is shared evenly. A trial
    that fails is a note at its effect; after Ctrl-C the measurements so far come back, and
    `stopped` is `interrupted`.
    """
    effects, trials = plan_trials(level, reference, summary)
    alpha = (1 - CONFIDENCE) / max(1, INTERVALS * len(trials))
    state = _Attribution(
        level, reference, replace(options, alpha=alpha), told or (lambda line: None), effects
    )
    try:
        stopped = state.run_rounds(trials, seed)
        if stopped != INTERRUPTED and options.settings.parity:
            with ExitStack() as stack:
                if check_parity is None:
                    checker = ParityChecker(options.settings.timeout_s, options.given)
                    check_parity = stack.enter_context(checker).check
                state.check_parity(trials, check_parity)
    except KeyboardInterrupt:
        stopped = INTERRUPTED
    noise = max(floor, state.spread(), SAME)
    sentences = summary_text(list(effects.values()), level.name, noise, state.peaks)
    return Attribution(level.name, list(effects.values()), sentences, stopped)


@dataclass
class _Attribution:
    """An attribution in progress."""

    level: Arm
    reference: Arm
    options: MeasureOptions
    told: Told
    effects: dict[str, Effect]
    ratios: list[float] = field(default_factory=list)  # log of plain / level, of each round
    peaks: list[int] = field(default_factory=list)  # of the plain run
    choices: dict[str, dict[str, Any]] = field(default_factory=dict)  # of each arm added alone

    def run_rounds(self, trials: Sequence[AttributionTrial], seed: int) -> str:
        """Measure all trials, a few at a time; why it ended."""
        left = budget_s = self.options.settings.attribute_budget_s
        groups = [trials[i : i + EACH] for i in range(0, len(trials), EACH)]
        short = 0
        for number, group in enumerate(groups):
            self.told(f"{' and '.join(t.name for t in group)}: round {number + 1} of {len(groups)}")
            limit_s = left / (len(groups) - number)
            round_ = self._run_round(group, limit_s, seed + number)
            if round_.measured.stopped == INTERRUPTED:
                return INTERRUPTED
            left -= round_.measured.seconds
            short += round_.measured.seconds >= limit_s
        if not groups:
            return "there was nothing to measure"
        if not short:
            return "every ratio is precise enough"
        return (
            f"the budget is spent (benchmark.attribute_budget_s={budget_s:g}): {short} of "
            f"{len(groups)} rounds ended before every ratio was precise enough"
        )

    def _run_round(self, group: Sequence[AttributionTrial], budget_s: float, seed: int) -> Round:
        plain, level = self.reference.name, self.level.name
        arms = [self.reference, self.level]
        arms += [arm for trial in group for arm in (trial.added, trial.removed)]
        round_ = run_round(arms, plain, budget_s, seed, self.options, self.told)
        if (whole := round_.ratio([plain], [level])) is not None:
            self.ratios.append(math.log(whole.ratio))
        if plain in round_.finished:
            self.peaks.append(_peak_bytes(round_.finished[plain]))
        for trial in group:
            self._note_added(trial, round_)
            self._note_removed(trial, round_)
            effect = self.effects[trial.name]
            if effect.added is not None and effect.removed is not None:
                both = round_.ratio([trial.removed.name, trial.added.name], [level, plain])
                if both is not None:
                    effect.interaction, effect.interaction_interval = _split(both)
        return round_

    def _note_added(self, trial: AttributionTrial, round_: Round) -> None:
        effect, plain, name = self.effects[trial.name], self.reference.name, trial.added.name
        if why := round_.explain_end(plain, name) or _explain_idle(trial, round_):
            return _add_note(effect, why)
        self.choices[name] = collect_choices(round_.finished.get(name))
        effect.added_memory_bytes = _peak_difference(round_, name, plain)
        alone = round_.ratio([plain], [name])
        if alone is None:
            return _add_note(effect, "too few blocks for an interval")
        effect.added, effect.added_interval = _split(alone)

    def _note_removed(self, trial: AttributionTrial, round_: Round) -> None:
        effect, level, name = self.effects[trial.name], self.level.name, trial.removed.name
        if why := round_.explain_end(self.reference.name, level, name):
            return _add_note(effect, why)
        effect.removed_memory_bytes = _peak_difference(round_, level, name)
        company = round_.ratio([name], [level])
        if company is None:
            return _add_note(effect, "too few blocks for an interval")
        effect.removed, effect.removed_interval = _split(company)

    def check_parity(self, trials: Sequence[AttributionTrial], check: CheckParity) -> None:
        """Whether each technique alone leaves the numbers right, where it is engaged."""
        for trial in trials:
            if trial.added.name in self.choices:
                self.told(f"{trial.name}: checking parity")
                verdict = check(trial.added, self.choices[trial.added.name])
                effect = self.effects[trial.name]
                effect.parity = verdict.parity
                if verdict.parity in (None, "FAIL"):
                    _add_note(effect, f"parity: {verdict.reason}")

    def spread(self) -> float:
        """The share by which plain run and level differed from round to round.

        Each round has new processes, whose places in memory make a difference.
        """
        return math.expm1(max(self.ratios) - min(self.ratios)) if self.ratios else 0.0


def _split(estimate: Estimate) -> tuple[float, tuple[float, float]]:
    return estimate.ratio, (estimate.low, estimate.high)


def _explain_idle(trial: AttributionTrial, round_: Round) -> str:
    """Why the technique alone is not engaged; "" where it is, or that is not known."""
    if trial.added.name not in round_.finished:
        return ""
    rows = round_.finished[trial.added.name].summary.get("techniques", [])
    row = next((row for row in rows if row["name"] == trial.name), {"reason": "not seen"})
    if row.get("engaged"):
        return ""
    return f"alone it does not take hold: {row.get('reason') or 'no reason given'}"


def _add_note(effect: Effect, note: str) -> None:
    if note not in effect.note:
        effect.note = "; ".join(filter(None, [effect.note, note]))


def _peak_bytes(finished: Finished) -> int:
    memory = finished.summary.get("memory") or {}
    own = (memory.get("peak_process_bytes") or 0) + finished.worker_bytes
    return int(memory.get("peak_device_bytes") or own)


def _peak_difference(round_: Round, name: str, than: str) -> int | None:
    """By how much the peak of one is above that of the other."""
    peaks = [_peak_bytes(round_.finished[n]) for n in (name, than) if n in round_.finished]
    return peaks[0] - peaks[1] if len(peaks) == 2 and all(peaks) else None


# -- the arms that show what one technique is worth ------------------------------------------------


def plan_trials(
    level: Arm, reference: Arm, summary: Mapping[str, Any]
) -> tuple[dict[str, Effect], list[AttributionTrial]]:
    """An effect for each requested technique, in order of application, and the trials to make."""
    effects: dict[str, Effect] = {}
    trials = []
    rows = {row["name"]: row for row in summary.get("techniques", [])}
    for name in _requested(level.config):
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
        return f"did not take hold in {level.name}: {row.get('reason') or 'not seen'}"
    if _find_technique(level.config, name) == _find_technique(reference.config, name):
        return f"is in {reference.name} too"
    if others := (row.get("evidence") or {}).get("part_of"):
        return f"did nothing of its own in {level.name}: part of {others}"
    return ""


def _requested(config: RunConfig) -> list[str]:
    own = [name for name, technique in config.optimization.techniques() if technique.enabled]
    return own + [target.rpartition(".")[2] for target in config.optimization.extra]


def _take_technique(arm: Arm, other: Arm, name: str, called: str) -> Arm:
    """The arm with that one technique as it is in the other."""
    config = copy(arm.config)
    config.optimization = deepcopy(arm.config.optimization)
    config.optimization.level, config.optimization.strict = "custom", False
    wanted, own = _find_technique(other.config, name), _find_technique(arm.config, name)
    if isinstance(wanted, str | None):  # a technique of the user's own, by its class
        extra = [t for t in config.optimization.extra if t.rpartition(".")[2] != name]
        config.optimization.extra = extra + ([wanted] if wanted else [])
        typed = [f"optimization.extra=[{','.join(config.optimization.extra)}]"]
    else:
        setattr(config.optimization, name, deepcopy(wanted))
        typed = [
            f"optimization.{name}.{knob.name}={knob_text(getattr(wanted, knob.name))}"
            for knob in fields(wanted)
            if own is None or getattr(wanted, knob.name) != getattr(own, knob.name)
        ]
    return Arm(called, config, [*arm.overrides, *typed])


def _find_technique(config: RunConfig, name: str) -> Any:
    """A technique with its knobs; of a user's own its class's name, None if it is off."""
    for own, technique in config.optimization.techniques():
        if own == name:
            return technique
    return next((t for t in config.optimization.extra if t.rpartition(".")[2] == name), None)
