"""job=replay from end to end: what it says, what it leaves behind, and its script."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner import build, compose
from runner.captures.reader import open_capture
from runner.errors import NotVerified
from runner.jobs.replay import main
from runner.replay.findings import Replay, StepPhase
from runner.replay.investigation import BAD
from runner.replay.reopen import config_of
from runner.training.summary import Summary

POISON = "+data.poison=[3,17,20,33,41,50]"
AMP = ["optimization.amp.enabled=true", "optimization.amp.dtype=bf16"]


def replay(capture: Path, folder: Path, *overrides: str) -> Replay:
    folder.mkdir()
    asked = ["job=replay", f"replay.path={capture}", "security.trusted=[faulty_models]"]
    return main(compose([*asked, *overrides]), folder)


def run_script(folder: Path) -> subprocess.CompletedProcess[str]:
    """reproduce.py in a process of its own, in an empty environment of modules."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(  # noqa: S603  # what was just written
        [sys.executable, "reproduce.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )


@pytest.mark.slow  # test_seeded_faults has it without the command line
def test_a_fault_of_bf16_is_replayed_down_to_line_and_technique(
    captured: Any, marked: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = captured(POISON, "+model.part=cancels", *AMP)
    folder = tmp_path / "replay"
    found = replay(path, folder)
    assert found.reproduced
    assert found.same
    assert (found.found.module, found.found.kind) == ("part", "Cancels")
    assert found.found.line is not None
    assert found.found.line.number == marked("CANCELS")
    assert found.blame is not None
    assert found.blame.techniques == ["amp"]
    assert found.blame.verdict == "amp (bfloat16); good in float16"
    assert found.attempt.techniques == ["amp"]
    assert set(found.samples) <= {3, 17, 20, 33, 41, 50}

    page = (folder / "replay.md").read_text()
    assert (path / "replay.md").read_text() == page
    for told in ("part (Cancels)", "amp (bfloat16)", "# CANCELS", "optimization.amp.enabled"):
        assert told in page.replace("\\", "")
    data = json.loads((folder / "replay.json").read_text())
    assert data["found"]["phase"] == "forward"
    assert data["blame"]["techniques"] == ["amp"]
    assert data["loss"] == "nan"  # as text: JSON has none
    summary = Summary.read(folder)
    assert (summary.status, summary.faults) == ("done", {"non_finite": 1})
    screen = capsys.readouterr().out
    assert all(len(text) <= 80 for text in screen.splitlines() if str(tmp_path) not in text)

    done = run_script(folder)
    assert done.returncode == BAD, done.stderr
    assert done.stdout.splitlines()[-1] == f"bad: {found.found.cause}"


@pytest.mark.slow  # four processes that compile
def test_a_fault_of_compiled_code_is_replayed_down_to_line_and_techniques(
    captured: Any, marked: Any, tmp_path: Path
) -> None:
    path = captured(
        POISON, "+model.part=compiled", "optimization.compile.enabled=true",
        "optimization.whole_step.enabled=true", "optimization.fused_optimizer.enabled=true",
    )  # fmt: skip
    found = replay(path, tmp_path / "replay")
    assert found.reproduced
    assert found.blame is not None
    assert sorted(found.blame.techniques) == ["compile", "whole_step"]
    assert (found.found.phase, found.found.module) == (StepPhase.forward, "part")
    assert found.found.line is not None
    assert found.found.line.number == marked("COMPILED")
    assert run_script(tmp_path / "replay").returncode == BAD


def test_a_step_that_is_good_after_all_is_said_to_be(captured: Any, tmp_path: Path) -> None:
    path = captured(POISON, "+model.part=log")
    good = tmp_path / "good" / path.name
    shutil.copytree(path, good)
    with build(config_of(open_capture(path), ["faulty_models"]), tmp_path / "fine") as run:
        run.recorder.open(0)
        assert run.captures is not None
        kept = run.captures.take(run, 1, "non_finite", "they said", _harmless(run))
    with pytest.raises(NotVerified, match="does not reproduce"):
        replay(tmp_path / "fine" / str(kept), tmp_path / "replay", "replay.attribute=false")
    page = (tmp_path / "replay" / "replay.md").read_text()
    assert "no: loss" in page
    assert Summary.read(tmp_path / "replay").reason == "step 1 does not reproduce"


def _harmless(run: Any) -> Any:
    inputs, target = run.train.at(0)
    inputs = inputs.clone()
    inputs[:, -1] = 0
    return inputs, target


def test_a_fault_is_found_where_a_technique_decides_which_weights_are_trained(
    captured: Any, tmp_path: Path
) -> None:
    trusted = "security.trusted=[faulty_models,faulty_techniques]"
    path = captured(
        POISON, "+model.part=log", "optimization.extra=[faulty_techniques.LastLayer]", trusted
    )
    found = replay(path, tmp_path / "replay", trusted)
    assert found.reproduced
    assert found.found.module == "part"
    assert found.blame is not None
    assert "not known: with all techniques off" in found.blame.verdict
