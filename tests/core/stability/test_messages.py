"""Keys of the group, the pending roll-back in a checkpoint, and the message of giving up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runner import compose
from runner.core.config.recorded import merge_recorded_overrides
from runner.core.errors import ConfigError
from runner.core.schemas.stability import SpikeConfig, StabilityConfig
from runner.core.stability.anomalies import Anomaly, BadStepKind
from runner.core.stability.messages import Decision, describe_giving_up, restore_decision
from runner.core.stability.spike import SpikeDetector


def limits(option: str) -> tuple[int, int, float]:
    config = compose([f"stability={option}"]).stability
    return config.max_consecutive_skips, config.max_rollbacks, config.rollback_lr_factor


def test_options_of_the_group_have_the_documented_limits() -> None:
    assert limits("default") == (10, 2, 0.5)
    assert compose([]).stability == StabilityConfig()
    assert limits("strict") == (0, 0, 0.5)
    off = compose(["stability=off"]).stability
    assert (off.guard, off.spike.enabled, off.clip_norm) == (False, False, None)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("stability.recovery=[{action:skip}]", "max_consecutive_skips.*max_r.*rollback_lr_factor"),
        ("+stability.recovery=[]", "max_consecutive_skips.*max_rollbacks.*rollback_lr_factor"),
        ("stability.spike.at_least=101", r"must be ≤ stability\.spike\.window=100"),
        ("stability.spike.watch=lossy", "stability.spike.watch: .*loss"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_the_fix(typed: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        compose([typed])


def test_a_recorded_table_of_an_older_version_is_replaced_by_any_of_the_keys(
    tmp_path: Path,
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / ".hydra").mkdir()
    recorded = "- data=cancer\n- stability.recovery=[{action:skip}]\n"
    (tmp_path / ".hydra/overrides.yaml").write_text(recorded)
    typed = [f"checkpoint.resume={tmp_path}"]
    with pytest.raises(ConfigError, match="stability.rollback_lr_factor say what follows"):
        compose(merge_recorded_overrides(typed, sweeps=False).overrides)
    typed.append("stability.max_rollbacks=3")
    config = compose(merge_recorded_overrides(typed, sweeps=False).overrides)
    assert (config.data.kind, config.stability.max_rollbacks) == ("cancer", 3)


BAD_STEP = Anomaly(3, "weights", 1.0, 2.0, 9.0, 9.0, skipped=True, capture="debug/captures/3")


def restored(fatal: Sequence[BadStepKind] = (), **saved: Any) -> Decision | None:
    saved = {"row": 0, "kind": "weights", "step": 3, "message": "send me money", **saved}
    spikes = SpikeDetector(SpikeConfig(), True)
    spike = Anomaly(4, "spike", 9.0, 1.0, 2.0, 2.0, skipped=True)
    return restore_decision(saved, [BAD_STEP, spike], spikes, fatal)


def test_a_restored_decision_has_a_message_of_this_run() -> None:
    decision = restored(stuck=True, in_a_row=2, since=2)
    assert decision is not None and not decision.stuck and not decision.raises
    found = (decision.message, decision.capture)
    assert found == ("the weights are not finite", "debug/captures/3")
    assert (decision.in_a_row, decision.since) == (2, 2)
    fatal = restored([BadStepKind.weights])
    assert fatal is not None and fatal.raises  # as the present config says


@pytest.mark.parametrize(
    "saved",
    [
        {"kind": "asked"},
        {"kind": "spike", "step": 4},  # of an older version, which rolled back for it
        {"step": 5},
        {"in_a_row": 4},
        {"since": 4},
    ],
)
def test_a_restored_decision_without_its_bad_step_is_dropped_and_an_unknown_kind_an_error(
    saved: dict[str, Any],
) -> None:
    assert restored(**saved) is None
    with pytest.raises(KeyError, match="zz"):
        restored(**{**saved, "kind": "zz"})


def test_giving_up_names_a_capture_that_exists_and_the_limit_that_was_reached(
    tmp_path: Path,
) -> None:
    decision, config = Decision("non_finite", 14, "the loss was nan", 4), StabilityConfig()
    existing, missing = tmp_path / "captures" / "3", tmp_path / "captures" / "2"
    existing.mkdir(parents=True)
    assert "captures" not in describe_giving_up(decision, config, 2, [missing])
    text = describe_giving_up(decision, config, 2, [missing, existing])
    assert text.startswith("step 14: the loss was nan, 4 bad steps in a row; rolled back 2 times")
    assert f"replay.path={existing}" in text
    assert "(stability.max_rollbacks=2)" in text
    assert text.endswith("or raise stability.max_rollbacks")
    decision.stuck = True
    assert "max_rollbacks" not in describe_giving_up(decision, config, 1, [])
    assert "or load an earlier checkpoint" in describe_giving_up(decision, None, 0, [])
