"""Parity of arms, in a process that may come to harm: a verdict, or why there is none."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from runner.core.config.composing import compose
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, RunBuilder, Technique
from runner.measure.benchmark.arms import Arm
from runner.measure.benchmark.parity_checker import NO_TECHNIQUE, ParityChecker, ParityVerdict

SMALL = ["device=cpu", "device.threads=1", "model.width=8", "model.depth=1", "training.steps=20"]
TRUSTED = "security.trusted=[parity_mutants,tests]"


class Endless(Technique):
    """Never comes to an end."""

    def apply(self, builder: RunBuilder) -> str | None:
        while True:
            signal.pause()

    def engaged(self, run: Run) -> Evidence:
        return Evidence(True, "")


class Deadly(Endless):
    """Takes the process down."""

    def apply(self, builder: RunBuilder) -> str | None:
        os.kill(os.getpid(), signal.SIGKILL)
        return None


def arm(extra: str, *overrides: str) -> Arm:
    asked = [f"optimization.extra=[{extra}]"] if extra else []
    return Arm("an arm", compose([*SMALL, TRUSTED, *overrides, *asked]))


def test_an_arm_without_techniques_is_the_plain_run_and_takes_no_process() -> None:
    with ParityChecker(60.0) as checker:
        assert checker.check(arm("", "optimization=none")) == ParityVerdict("exact", NO_TECHNIQUE)
        assert checker.process is None


@pytest.mark.slow
def test_one_process_judges_all_and_is_replaced_when_it_dies_or_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "parity"))
    with ParityChecker(120.0) as checker:
        right = checker.check(arm("", "optimization=basic"))
        assert checker.process is not None
        pid = checker.process.pid
        wrong = checker.check(arm("parity_mutants.DroppedGradient", "optimization=none"))
        assert checker.process.pid == pid
        deadly = checker.check(arm(f"{__name__}.Deadly", "optimization=none"))
        other = checker.check(arm("", "optimization=basic", "optimizer=sgd"))
        endless = checker.check(arm(f"{__name__}.Endless", "optimization=none"), within_s=5.0)
        assert checker.process is None
    assert right.parity == "explained by precision"
    assert wrong.parity == "FAIL", wrong.reason
    assert "grad_norm at step 1: off by" in wrong.reason
    assert deadly == ParityVerdict(None, "the parity process: it was killed by SIGKILL")
    assert other.parity in ("exact", "explained by precision")
    assert endless == ParityVerdict(None, "not judged within 5 s")
    assert not psutil.pid_exists(pid)
