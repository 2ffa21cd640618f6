"""The table: the first row that fits counts, and each has its bounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runner import compose
from runner.core.errors import ConfigError
from runner.core.schemas.stability import (
    Action,
    BadStepKind,
    RecoveryRule,
    SpikeConfig,
    StabilityConfig,
)
from runner.core.stability.anomalies import Anomaly
from runner.core.stability.messages import Decision, describe_giving_up, restore_decision
from runner.core.stability.policy import RecoveryTable
from runner.core.stability.spike import SpikeDetector


def table(*rules: RecoveryRule, skips: int = 3, rollbacks: int = 2) -> RecoveryTable:
    return RecoveryTable(rules, skips, rollbacks)


def chosen(
    found: RecoveryTable, kind: BadStepKind, in_a_row: int = 1, rollbacks: int = 0
) -> Action | None:
    row = found.first_match(kind, in_a_row, rollbacks, scaled=True)
    return None if row is None else found.rules[row].action


def test_the_first_row_of_its_kind_counts() -> None:
    rules = table(RecoveryRule(BadStepKind.spike, action=Action.stop), RecoveryRule())
    assert chosen(rules, BadStepKind.spike) is Action.stop
    assert chosen(rules, BadStepKind.non_finite) is Action.skip
    scaled = table(RecoveryRule(action=Action.lower_scale), RecoveryRule())
    assert scaled.first_match(BadStepKind.overflow, 1, 0, scaled=True) == 0
    assert scaled.first_match(BadStepKind.overflow, 1, 0, scaled=False) == 1


def test_so_many_in_a_row_and_the_next_row_has_its_turn() -> None:
    rules = table(
        RecoveryRule(BadStepKind.spike, in_a_row=3, action=Action.lower_lr),
        RecoveryRule(),
        RecoveryRule(action=Action.rollback),
    )
    actions = [chosen(rules, BadStepKind.spike, n) for n in range(1, 6)]
    mild, end = [Action.skip, Action.skip, Action.lower_lr], [Action.rollback] * 2
    assert actions == mild + end  # lower_lr is bounded by max_consecutive_skips=3 as skip is
    others = [chosen(rules, BadStepKind.overflow, n) for n in (3, 4)]
    assert others == [Action.skip, Action.rollback]


def test_roll_backs_and_uses_are_bounded_and_then_nothing_fits() -> None:
    rules = table(
        RecoveryRule(action=Action.lower_lr, at_most=2), RecoveryRule(action=Action.rollback)
    )
    for _ in range(2):
        assert chosen(rules, BadStepKind.spike) is Action.lower_lr
        rules.record_use(0, 7)
    assert chosen(rules, BadStepKind.spike, rollbacks=1) is Action.rollback
    assert chosen(rules, BadStepKind.spike, rollbacks=2) is None
    assert chosen(table(), BadStepKind.spike) is None
    rules = table(RecoveryRule(action=Action.rollback), RecoveryRule())
    rules.rolls_back = False  # there is nothing to go back to
    assert chosen(rules, BadStepKind.spike) is Action.skip


def test_the_shipped_tables_are_what_they_say() -> None:
    default = RecoveryTable.from_config(compose([]).stability)
    assert chosen(default, BadStepKind.weights) is Action.rollback
    assert chosen(default, BadStepKind.weights, rollbacks=2) is Action.stop
    assert chosen(default, BadStepKind.non_finite, 10) is Action.skip
    assert chosen(default, BadStepKind.non_finite, 11) is Action.rollback
    assert chosen(default, BadStepKind.non_finite, 11, rollbacks=2) is None
    assert chosen(default, BadStepKind.spike, 11, rollbacks=2) is Action.accept
    strict = RecoveryTable.from_config(compose(["stability=strict"]).stability)
    assert chosen(strict, BadStepKind.overflow) is Action.skip
    assert chosen(strict, BadStepKind.spike) is Action.stop
    assert chosen(strict, BadStepKind.non_finite) is Action.stop
    assert [rule.action for rule in StabilityConfig().recovery] == [Action.skip, Action.rollback]
    off = compose(["stability=off"]).stability
    assert (off.guard, off.spike.enabled, off.recovery) == (False, False, [])


def test_a_table_comes_from_the_command_line() -> None:
    typed = "stability.recovery=[{kind:spike,action:lower_lr,for_steps:7},{action:stop}]"
    first, second = compose([typed]).stability.recovery
    assert first == RecoveryRule(BadStepKind.spike, action=Action.lower_lr, for_steps=7)
    assert second == RecoveryRule(action=Action.stop)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("stability.recovery=[{kind:spyke}]", "'spyke'.* one of .*spike"),
        ("stability.recovery=[{action:rolback}]", "'rolback'.* one of .*rollback"),
        ("stability.recovery=[{on:spike}]", "use one of kind, in_a_row, action"),
        ("stability.recovery=[{factor:0}]", "recovery.factor: must be > 0 and ≤ 1, got 0"),
        ("stability.recovery=[{kind:weights,action:accept}]", "accept is for kind: spike"),
        ("stability.recovery=[{kind:spike,action:lower_scale}]", "is for kind: overflow"),
        ("stability.recovery=skip", "stability.recovery: .*list"),
        ("stability.spike.window=1", r"^stability\.spike\.window: "),
        ("stability.spike.at_least=101", r"must be ≤ stability\.spike\.window=100"),
        ("stability.spike.watch=lossy", "stability.spike.watch: .*loss"),
    ],
)
def test_a_wrong_row_is_refused_with_the_way_out(typed: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        compose([typed])


WENT_WRONG = Anomaly(3, "weights", 1.0, 2.0, 9.0, 9.0, skipped=True, capture="debug/captures/3")


def kept_by(fatal: Sequence[BadStepKind] = (), **more: Any) -> Decision | None:
    saved = {"row": 0, "kind": "weights", "step": 3, "message": "send me money", **more}
    return restore_decision(saved, [WENT_WRONG], SpikeDetector(SpikeConfig(), True), fatal)


def test_a_kept_decision_is_made_again_in_words_of_the_run() -> None:
    found = kept_by(row=99, stuck=True, in_a_row=2, since=2)
    assert found is not None and found.outdated and not found.stuck and found.row is None
    assert (found.message, found.capture) == ("the weights are not finite", "debug/captures/3")
    assert (found.in_a_row, found.since, found.raises) == (2, 2, False)
    ends = kept_by([BadStepKind.weights])
    assert ends is not None and ends.raises  # as the config of now says


def test_a_kept_decision_about_nothing_that_went_wrong_is_dropped() -> None:
    for odd in ({"kind": "asked"}, {"kind": "spike"}, {"step": 4}, {"in_a_row": 4}, {"since": 4}):
        assert kept_by(**odd) is None
    with pytest.raises(KeyError, match="zz"):
        kept_by(kind="zz")


def test_giving_up_leads_to_a_capture_that_is_there(tmp_path: Path) -> None:
    found = kept_by()
    assert found is not None
    rules = table(RecoveryRule())
    assert "captures" not in describe_giving_up(found, rules, 0, tmp_path, WENT_WRONG)
    (tmp_path / WENT_WRONG.capture).mkdir(parents=True)
    assert "captures/3" in describe_giving_up(found, rules, 0, tmp_path, None)
