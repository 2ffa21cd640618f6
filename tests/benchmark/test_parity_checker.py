"""Parity of arms, in a process that may come to harm: a verdict, or why there is none."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from runner.benchmark.arms import Arm
from runner.benchmark.parity_checker import PLAIN, ParityChecker, ParityVerdict
from runner.build import Components
from runner.composing import compose
from runner.techniques.base import Evidence, RunBuilder, Technique
from runner.training.run import Run

SMALL = ["device=cpu", "device.threads=1", "model.width=8", "model.depth=1", "training.steps=20"]
MUTANTS = Path(__file__).parents[1] / "parity"
TRUSTED = "security.trusted=[parity_mutants,tests]"


class Deadly(Technique):
    """Takes the process down."""

    def apply(self, draft: RunBuilder) -> str | None:
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    def engaged(self, run: Run) -> Evidence:
        return Evidence(True, "")


class Endless(Technique):
    """Never comes to an end."""

    def apply(self, draft: RunBuilder) -> str | None:
        while True:
            signal.pause()

    def engaged(self, run: Run) -> Evidence:
        return Evidence(True, "")


def arm(name: str, *overrides: str) -> Arm:
    return Arm(name, compose([*SMALL, TRUSTED, *overrides]))


def extra(name: str) -> str:
    return f"optimization.extra=[{name}]"


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(MUTANTS))


def test_an_arm_without_techniques_is_the_plain_run_and_takes_no_process() -> None:
    with ParityChecker(60.0) as checker:
        assert checker.check(arm("none", "optimization=none")) == ParityVerdict("exact", PLAIN)
        assert checker.process is None


@pytest.mark.usefixtures("mutants")
@pytest.mark.slow
def test_one_process_judges_all_and_is_replaced_when_it_dies() -> None:
    with ParityChecker(120.0) as checker:
        right = checker.check(arm("basic", "optimization=basic"))
        assert checker.process is not None
        pid = checker.process.pid
        wrong = checker.check(
            arm("bad", "optimization=none", extra("parity_mutants.DroppedGradient"))
        )
        assert checker.process.pid == pid
        deadly = checker.check(arm("bad", "optimization=none", extra(f"{__name__}.Deadly")))
        other = checker.check(arm("sgd", "optimization=basic", "optimizer=sgd"))
    assert right.parity == "explained by precision"
    assert wrong.parity == "FAIL", wrong.reason
    assert "grad_norm at step 1: off by" in wrong.reason
    assert deadly == ParityVerdict(None, "the process that judged it: killed by SIGKILL")
    assert other.parity in ("exact", "explained by precision")
    assert not psutil.pid_exists(pid)


@pytest.mark.slow
def test_an_arm_that_never_ends_is_given_up() -> None:
    with ParityChecker(5.0) as checker:
        verdict = checker.check(arm("slow", "optimization=none", extra(f"{__name__}.Endless")))
        assert checker.process is None
    assert verdict == ParityVerdict(None, "not judged within 5 s")


def test_a_part_that_cannot_be_sent_is_said() -> None:
    nothing: Any = Components(objective=lambda: None)  # type: ignore[arg-type]
    with ParityChecker(60.0, nothing) as checker:
        verdict = checker.check(arm("basic", "optimization=basic"))
    assert verdict.parity is None
    assert "cannot be sent to another process" in verdict.reason
