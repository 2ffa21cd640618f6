"""The recovery table, and the choice of the rule for a bad step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.core.schemas.stability import Action, BadStepKind, RecoveryRule, StabilityConfig

MILD_ACTIONS = (Action.skip, Action.lower_lr, Action.lower_scale)
MAX_LISTED_STEPS = 5  # steps listed per action when the run gives up
ACTION_TEXTS = {
    Action.skip: "skipped a step",
    Action.lower_lr: "lowered the learning rate",
    Action.lower_scale: "lowered the loss scale",
    Action.rollback: "rolled back",
    Action.accept: "accepted a spike as the new baseline",
    Action.stop: "stopped",
}


@dataclass
class RecoveryTable:
    """The recovery rules, of which the first that fits applies, and how often each was used."""

    rules: Sequence[RecoveryRule]
    max_consecutive_skips: int
    max_rollbacks: int
    rolls_back: bool = True  # False: no checkpoints, so rollback rules never fit
    use_counts: list[int] = field(default_factory=list)  # applications per rule
    steps: dict[str, list[int]] = field(default_factory=dict)  # first few per action
    counts: dict[str, int] = field(default_factory=dict)  # per action

    def __post_init__(self) -> None:
        self.use_counts = self.use_counts or [0] * len(self.rules)

    @classmethod
    def from_config(cls, config: StabilityConfig) -> RecoveryTable:
        """Create the table of a config."""
        return cls(config.recovery, config.max_consecutive_skips, config.max_rollbacks)

    def first_match(
        self, kind: BadStepKind, in_a_row: int, rollbacks: int, scaled: bool = False, start: int = 0
    ) -> int | None:
        """Return the index of the first rule from `start` on that fits, or None.

        `in_a_row` counts consecutive bad steps including this one, `rollbacks` the roll-backs of
        the run so far; `scaled` is True with a loss scale.
        """
        for row in range(start, len(self.rules)):
            rule = self.rules[row]
            if rule.kind not in (BadStepKind.any, kind) or in_a_row < rule.in_a_row:
                continue
            if rule.at_most is not None and self.use_counts[row] >= rule.at_most:
                continue
            if rule.action in MILD_ACTIONS and in_a_row > self.max_consecutive_skips:
                continue
            if rule.action is Action.rollback and not self.can_roll_back(rollbacks):
                continue
            if rule.action is Action.lower_scale and not scaled:
                continue
            return row
        return None

    def can_roll_back(self, rollbacks: int) -> bool:
        """Return whether another roll-back is allowed after `rollbacks` of them."""
        return self.rolls_back and rollbacks < self.max_rollbacks

    def record_use(self, row: int, step: int) -> None:
        """Count a use of rule `row`, and its action, at that step."""
        self.use_counts[row] += 1
        self.count_action(self.rules[row].action, step)

    def count_action(self, action: Action, step: int) -> None:
        """Count an action at that step, but no use of a rule."""
        name = action.name
        self.counts[name] = self.counts.get(name, 0) + 1
        self.steps[name] = [*self.steps.get(name, []), step][:MAX_LISTED_STEPS]

    def describe_history(self) -> str:
        """Return a description of the remedies of the run so far."""
        parts = []
        for name, count in self.counts.items():
            steps = ", ".join(map(str, self.steps[name])) + ", …" * (count > len(self.steps[name]))
            times = f"{count} times (steps" if count > 1 else "once (step"
            parts.append(f"{ACTION_TEXTS[Action[name]]} {times} {steps})")
        return "; ".join(parts) or "nothing"

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"used": list(self.use_counts), "steps": self.steps, "counts": self.counts}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state, uses only if as many rules; KeyError for an unknown action."""
        if len(state["used"]) == len(self.rules):
            self.use_counts = list(state["used"])
        self.counts = {Action[name].name: count for name, count in state["counts"].items()}
        self.steps = {name: list(state["steps"][name]) for name in self.counts}
