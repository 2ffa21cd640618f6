"""Parity of arms, in a process that may come to harm: a verdict, or why there is none."""

import os
import signal

import psutil
import pytest

from runner.core.config.composing import compose
from runner.core.interfaces.technique import RunBuilder
from runner.measure.benchmark.arms import Arm
from runner.measure.benchmark.parity_checker import NO_TECHNIQUE, ParityChecker, ParityVerdict
from tests.measure.parity.parity_mutants import mutant

SMALL = ["device=cpu", "device.threads=1", "model.width=8", "model.depth=1", "training.steps=20"]
TRUSTED = "security.trusted=[parity_mutants,tests]"


@mutant
def Endless(builder: RunBuilder) -> None:
    while True:
        signal.pause()


@mutant
def Deadly(builder: RunBuilder) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(extra: str, *overrides: str) -> Arm:
    asked = [f"optimization.extra=[{extra}]"] if extra else []
    return Arm("an arm", compose([*SMALL, TRUSTED, *overrides, *asked]))


def test_an_arm_without_techniques_is_the_plain_run_and_takes_no_process() -> None:
    with ParityChecker(60.0) as checker:
        assert checker.check(arm("", "optimization=none")) == ParityVerdict("exact", NO_TECHNIQUE)
        assert checker.process is None


@pytest.mark.slow
@pytest.mark.usefixtures("parity_mutants")
def test_one_process_judges_all_and_is_replaced_when_it_dies_or_does_not_end() -> None:
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
