"""What a replay's page tells a person to do next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.core.captures.manifest import FOLDER
from runner.diagnose.replay.investigation import advice
from runner.diagnose.replay.results import Attempt, Cause, Replay, StepPhase
from tests.diagnose.replay.replays import Captured, replay


def a_replay(found: Cause, **more: Any) -> Replay:
    known: dict[str, Any] = {"capture": "", "step": 44, "samples": found.samples, **more}
    return Replay(
        run="mine", kind="non_finite", message="", loss=1.0, grad_norm=2.0, same=True,
        attempt=Attempt(loss=1.0), reproduced=True, found=found, **known,
    )  # fmt: skip


@pytest.mark.usefixtures("here")
def test_grown_weights_are_named_and_a_lower_rate_is_advised(
    captured: Captured, tmp_path: Path
) -> None:
    path = captured("optimizer=sgd", "optimizer.lr=1e9", "stability.clip_norm=null")
    result = replay(path, tmp_path, "replay.attribute=false")
    assert result.reproduced and "is up to" in result.found.grown
    assert "lower optimizer.lr, and keep stability.clip_norm" in " ".join(result.advice)


def test_samples_of_high_loss_come_before_the_settings() -> None:
    steps = advice(a_replay(Cause(StepPhase.spike, "large", samples=[5])))
    assert "Samples 5 of the data set" in steps[0]
    assert steps[1].startswith("Lower stability.clip_norm")


def test_weights_that_were_bad_before_point_to_an_earlier_capture(tmp_path: Path) -> None:
    for step in (43, 44):
        (tmp_path / FOLDER / f"step_{step:08d}").mkdir(parents=True)
        (tmp_path / FOLDER / f"step_{step:08d}" / "manifest.json").touch()
    found = Cause(StepPhase.weights, "first.weight was not finite before the step")
    first, second = (str(tmp_path / FOLDER / f"step_{step:08d}") for step in (43, 44))
    steps = advice(a_replay(found, capture=second))
    assert steps[0] == f"Step 43 of this run was captured earlier: replay.path={first}"
    assert "captured earlier" not in " ".join(advice(a_replay(found, capture=first, step=43)))
