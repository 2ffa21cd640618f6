"""What a replay's page tells a person to do, and how it is worded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner import compose
from runner.captures.manifest import FOLDER
from runner.jobs.replay import main
from runner.replay.findings import Attempt, Cause, Replay, StepPhase
from runner.replay.investigation import advice
from runner.replay.page import facts
from runner.replay.spike import explain_spike

POISON = "+data.poison=[3,17,20,33,41,50]"


def a_replay(found: Cause, **more: Any) -> Replay:
    known: dict[str, Any] = {"capture": "", "kind": "non_finite", "samples": found.samples, **more}
    return Replay(
        run="mine",
        step=44,
        message="",
        loss=1.0,
        grad_norm=2.0,
        attempt=Attempt(loss=1.0),
        reproduced=True,
        same=True,
        found=found,
        **known,
    )


def test_weights_that_have_grown_are_what_is_to_be_mended(captured: Any, tmp_path: Path) -> None:
    path = captured("optimizer=sgd", "optimizer.lr=1e9", "stability.clip_norm=null")
    folder = tmp_path / "replay"
    folder.mkdir()
    asked = ["job=replay", f"replay.path={path}", "security.trusted=[faulty_models]"]
    found = main(compose([*asked, "replay.attribute=false"]), folder)
    assert found.reproduced
    assert "is up to" in found.found.grown
    assert "lower optimizer.lr, and keep stability.clip_norm" in " ".join(found.advice)
    assert "clamp" not in " ".join(found.advice)


def test_a_sample_that_is_far_too_large_comes_before_the_settings(
    captured: Any, standing: Any
) -> None:
    with standing(captured(POISON, "+model.part=log")) as (run, batch, _):
        inputs = batch[0].clone()
        inputs[5] *= 1e6
        found = explain_spike(run, (inputs, batch[1]), batch)
    assert found.cause.startswith("the batch itself: input is ")
    number = found.cause.split()[5].replace(",", "")
    assert float(number) == float(f"{float(number):.2g}"), "in two digits"
    assert found.samples == [5]
    steps = advice(a_replay(found))
    assert "Samples 5 of the data set" in steps[0]
    assert steps[1].startswith("Lower stability.clip_norm")


def test_weights_that_were_bad_before_point_to_an_earlier_capture(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (43, 44):
        (run / FOLDER / f"step_{step:08d}").mkdir(parents=True)
        (run / FOLDER / f"step_{step:08d}" / "manifest.json").touch()
    found = Cause(StepPhase.weights, "first.weight was not finite before the step")
    first, second = (str(run / FOLDER / f"step_{step:08d}") for step in (43, 44))
    steps = advice(a_replay(found, capture=second))
    assert steps[0] == f"Step 43 of this run was captured earlier: replay.path={first}"
    only = a_replay(found, capture=first)
    only.step = 43
    assert "captured earlier" not in " ".join(advice(only))


def test_the_page_says_in_which_run_it_looked_and_what_the_script_tells() -> None:
    replay = a_replay(
        Cause(StepPhase.spike, "the batch itself"), seen="the step without any technique"
    )
    replay.script = "reproduce.py"
    told = [value for name, value in facts(replay) if name in ("looked at", "script")]
    assert told == [
        "the step without any technique",
        "reproduce.py makes the step again; exit code 3: it is bad",
    ]
