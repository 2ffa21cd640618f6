from __future__ import annotations

import io
import logging
import os
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from runner.data.batch import Sizes
from runner.hooks import progress
from runner.hooks.progress import ProgressDisplay
from runner.record.config import MonitoringConfig
from runner.training.hook import Evaluation, Report
from runner.training.run import Run

from .conftest import MakeRun

CONFIG = MonitoringConfig(line_every_s=5.0)


@pytest.fixture
def run(make_run: MakeRun) -> Run:
    batch = (torch.rand(4, 3), torch.zeros(4, dtype=torch.int64))
    return make_run(None, nn.Linear(3, 2), batch, Sizes("classification", classes=2))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def report(first: int, loss: float = 0.5) -> Report:
    return Report(first, [loss] * 10, [1.0] * 10, [False] * 10, 1e-3, 0.02, 320)


def evaluation(step: int) -> Evaluation:
    metrics = {"val/loss": 0.4, "val/accuracy": 0.875, "val/accuracy/0": 1.0}
    return Evaluation(step, metrics, None, True)


def test_without_a_terminal_there_is_a_line_now_and_then_and_one_per_validation(
    run: Run,
    clock: list[float],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO, "runner")
    watcher = ProgressDisplay(CONFIG)
    with watcher.session(run):
        for first, now in [(1, 101.0), (11, 104.9), (21, 105.0), (31, 106.0)]:
            clock[0] = now
            watcher.on_report(run, report(first))
        watcher.on_validation(run, evaluation(40))
    assert "\x1b" not in capfd.readouterr().err
    assert [r.getMessage() for r in caplog.records] == [
        "step 30/100 (30%) · loss 0.5000 · lr 1.00e-03 · 2 ms/step · 16,000 samples/s · 0:14 left",
        "step 40: validation accuracy 0.8750, loss 0.4000 (best)",
    ]


def test_a_resumed_run_counts_its_own_pace(
    run: Run, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "runner")
    run.progress.step = 80
    watcher = ProgressDisplay(CONFIG)
    with watcher.session(run):
        clock[0] += 10.0
        watcher.on_report(run, report(81))
    assert "0:10 left" in caplog.text


@pytest.mark.parametrize(("width", "no_color"), [(20, False), (80, False), (80, True)])
def test_the_live_display_fits_and_is_gone_at_the_end(
    run: Run, clock: list[float], monkeypatch: pytest.MonkeyPatch, width: int, no_color: bool
) -> None:
    stream = io.StringIO()
    screen = Console(file=stream, force_terminal=True, width=width, no_color=no_color, _environ={})
    monkeypatch.setattr(progress, "console", lambda: screen)
    watcher = ProgressDisplay(CONFIG)
    with watcher.session(run):
        for first in (1, 11, 21):
            clock[0] += 1.0
            watcher.on_report(run, report(first))
            watcher.on_validation(run, evaluation(first))
    text = stream.getvalue()
    assert "30/100" in text or width == 20
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back
    if no_color:
        assert "\x1b[38;5" not in text and "\x1b[32m" not in text
    assert watcher.live is None


@pytest.mark.parametrize("kind", ["closed", "broken pipe", "none"])
def test_no_trouble_with_the_terminal_stops_the_run(
    run: Run, clock: list[float], monkeypatch: pytest.MonkeyPatch, kind: str, tmp_path: Path
) -> None:
    read, write = os.pipe()
    stream = open(write, "w", buffering=1)  # noqa: SIM115  # closed in the course of the test
    screen = progress.console().__class__(file=stream, force_terminal=True, width=80, _environ={})
    monkeypatch.setattr(progress, "console", lambda: screen)
    watcher = ProgressDisplay(CONFIG)
    with watcher.session(run):
        clock[0] += 1.0
        watcher.on_report(run, report(1))
        if kind == "closed":
            stream.close()
        elif kind == "broken pipe":
            os.close(read)
        for first in (11, 21):
            clock[0] += 1.0
            watcher.on_report(run, report(first))
    assert watcher.live is None
    if kind == "broken pipe":
        with pytest.raises(BrokenPipeError):
            stream.close()
    else:
        stream.close()
        os.close(read)
