"""job=replay from end to end: what it says and advises, what it leaves behind, and its script."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from runner.core.captures.manifest import FOLDER
from runner.core.errors import NotVerified
from runner.core.record.summary import Summary
from runner.diagnose.replay.investigation import BAD_EXIT_CODE, advice
from runner.diagnose.replay.job import attempt_in_process
from runner.diagnose.replay.results import Attempt, Cause, Replay, StepPhase
from tests import runs
from tests.diagnose.replay.replays import AMP, OVERRIDES, POISON, ROWS, Captured, line_of, replay


def run_script(folder: Path) -> subprocess.CompletedProcess[str]:
    """reproduce.py in a process of its own, in an empty environment of modules."""
    return subprocess.run(  # noqa: S603  # what was just written
        [sys.executable, "reproduce.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_fault_of_bf16_is_replayed_down_to_line_and_technique(
    captured: Captured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = replay(captured(POISON, "+model.part=cancels", *AMP), tmp_path)
    assert result.reproduced and result.same
    assert (result.found.module, result.found.kind) == ("part", "Cancels")
    assert result.found.line.number == line_of("CANCELS")
    assert (result.blame.techniques, result.blame.verdict) == (["amp"], "amp (bfloat16)")
    assert result.attempt.techniques == ["amp"]
    assert set(result.samples) <= ROWS

    text = (tmp_path / "replay.md").read_text().replace("\\", "")
    for words in ("part (Cancels)", "amp (bfloat16)", "# CANCELS", "optimization.amp.enabled"):
        assert words in text
    data = json.loads((tmp_path / "replay.json").read_text())
    assert data["found"]["phase"] == "forward"
    assert data["blame"]["techniques"] == ["amp"]
    assert data["loss"] == "nan"  # as text: JSON has none
    summary = Summary.read(tmp_path)
    assert (summary.status, summary.faults) == ("done", {"non_finite": 1})
    screen = capsys.readouterr().out
    assert all(len(text) <= 80 for text in screen.splitlines() if str(tmp_path) not in text)

    assert f"os.chdir({os.getcwd()!r})" in (tmp_path / "reproduce.py").read_text()
    done = run_script(tmp_path)
    assert done.returncode == BAD_EXIT_CODE, done.stderr
    assert done.stdout.splitlines()[-1] == f"bad: {result.found.cause}"


@pytest.mark.slow  # four processes that compile
def test_a_fault_of_compiled_code_is_replayed_down_to_line_and_techniques(
    captured: Captured, tmp_path: Path
) -> None:
    techniques = ("compile", "whole_step", "fused_optimizer")
    on = [f"optimization.{name}.enabled=true" for name in techniques]
    result = replay(captured(POISON, "+model.part=compiled", *on), tmp_path)
    assert result.reproduced
    assert sorted(result.blame.techniques) == ["compile", "whole_step"]
    assert (result.found.phase, result.found.module) == (StepPhase.forward, "part")
    assert result.found.line.number == line_of("COMPILED")
    assert run_script(tmp_path).returncode == BAD_EXIT_CODE


@pytest.mark.usefixtures("here")
def test_a_step_that_is_good_after_all_is_said_to_be(tmp_path: Path) -> None:
    fine = tmp_path / "fine"
    with runs.opened(*OVERRIDES, POISON, "+model.part=log", folder=fine) as run:
        run.recorder.open(0)
        assert run.captures is not None
        kept = run.captures.take(run, 1, "non_finite", "they said", _harmless(run))
    with pytest.raises(NotVerified, match="does not reproduce"):
        replay(fine / str(kept), tmp_path / "replay", "replay.attribute=false")
    assert "no: loss" in (tmp_path / "replay" / "replay.md").read_text()
    assert Summary.read(tmp_path / "replay").reason == "step 1 does not reproduce"


def _harmless(run: Any) -> Any:
    inputs, target = run.train.at(0)
    inputs = inputs.clone()
    inputs[:, -1] = 0
    return inputs, target


@pytest.mark.usefixtures("here")
def test_a_fault_is_found_where_a_technique_decides_which_weights_are_trained(
    captured: Captured, tmp_path: Path
) -> None:
    extra = "optimization.extra=[seeded_models.LastLayer]"
    result = replay(captured(POISON, "+model.part=log", extra), tmp_path)
    assert result.reproduced
    assert result.found.module == "part"
    assert "not known: with all techniques off" in result.blame.verdict


@pytest.mark.slow  # waits for a time-out
def test_an_attempt_that_hangs_is_ended_with_all_that_it_started(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, note = captured(POISON, "+model.part=hangs"), tmp_path / "pid"
    monkeypatch.setenv("FAULTY_HANGS", str(note))
    result = attempt_in_process(path, ["faulty_models"], 30, tmp_path / "log", [])
    assert "not done within replay.timeout_s=30" in result.failed
    started = int(note.read_text())
    assert not psutil.pid_exists(started) or psutil.Process(started).status() == "zombie"


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
