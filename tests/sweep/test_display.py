"""What is seen of the jobs of a sweep while they are at work."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest

from runner import build, compose, train
from runner.record.console import close_logging, set_up_logging
from runner.sweep import schedule as display
from runner.sweep.child import LOG, Child
from runner.sweep.schedule import Display
from runner.sweep.state import Job

QUICK = ["data=cancer", "training.steps=30", "optimization=none", "device=cpu"]
FAR = r"step 30/30 \(100%\) · loss \d+\.\d{4} · 0:00 left"


@pytest.fixture
def child(tmp_path: Path) -> Child:
    """Of a job that had been at work in its folder before."""
    (tmp_path / LOG).write_text("12:00:00 step 900/900 (100%) · loss 0.1 · 0:00 left\n")
    started = Child.start([sys.executable, "-c", ""], {}, tmp_path, None)
    started.process.wait()
    started.close()
    return started


def test_how_far_a_job_has_come_is_read_from_its_log(
    child: Child, capsys: pytest.CaptureFixture[str]
) -> None:
    assert child.at_work() == "starting"  # what an earlier try said is not of this one
    set_up_logging("info", None)
    try:
        with build(compose([*QUICK, "monitoring.line_every_s=1e-9"])) as run:
            train(run)
    finally:
        close_logging()
    said = capsys.readouterr().err
    assert "validation" in said.splitlines()[-1]
    with (child.folder / LOG).open("a") as log:
        log.write(said)
    assert re.fullmatch(FAR, child.at_work())


def test_without_a_terminal_a_job_has_a_line_now_and_then(
    child: Child, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(3, ["seed=3"], "3")
    caplog.set_level(logging.INFO, "runner")
    with Display([job]) as shown:
        shown.began(job, False)
        shown.refresh([(job, child)])
        assert [record.getMessage() for record in caplog.records] == ["#3: begun"]
        monkeypatch.setattr(display, "LINE_S", 0.0)
        shown.refresh([(job, child)])
    assert caplog.records[-1].getMessage() == "#3: starting"
