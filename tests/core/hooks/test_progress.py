import io
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from runner.core.hooks import progress
from runner.core.hooks.progress import ProgressDisplay
from runner.core.interfaces.hook import Evaluation, Report
from runner.core.interfaces.run import Run
from runner.core.schemas.monitoring import MonitoringConfig
from tests import runs

CONFIG = MonitoringConfig(line_every_s=5.0)


@pytest.fixture
def run() -> Iterator[Run]:
    with runs.opened(*runs.TABLE, "optimization=none", "training.steps=100") as run:
        yield run


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
    run: Run, clock: list[float], caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    caplog.set_level(logging.INFO, "runner")
    caplog.clear()
    watcher = ProgressDisplay(CONFIG)
    with watcher.session(run):
        for first, now in [(1, 101.0), (11, 104.9), (21, 105.0), (31, 106.0)]:
            clock[0] = now
            watcher.on_report(run, report(first))
        watcher.on_validation(run, evaluation(40))
    assert "\x1b" not in capfd.readouterr().err
    run.progress.step = 80  # a resumed run counts its own pace
    watcher = ProgressDisplay(CONFIG)
    with watcher.session(run):
        clock[0] += 10.0
        watcher.on_report(run, report(81))
    facts = "loss 0.5000 · lr 1.00e-03 · 2 ms/step · 16,000 samples/s"
    assert [r.getMessage() for r in caplog.records] == [
        f"step 30/100 (30%) · {facts} · 0:14 left",
        "step 40: validation accuracy 0.8750, loss 0.4000 (best)",
        f"step 90/100 (90%) · {facts} · 0:10 left",
    ]


@pytest.mark.parametrize(("width", "no_color"), [(20, False), (80, True)])
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
    assert not no_color or ("\x1b[38;5" not in text and "\x1b[32m" not in text)
    assert watcher.live is None


@pytest.mark.parametrize("kind", ["closed", "broken pipe"])
def test_no_trouble_with_the_terminal_stops_the_run(
    run: Run, clock: list[float], monkeypatch: pytest.MonkeyPatch, kind: str
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
        os.close(read)
        for first in (11, 21):
            clock[0] += 1.0
            watcher.on_report(run, report(first))
    assert watcher.live is None
    if kind == "broken pipe":
        with pytest.raises(BrokenPipeError):
            stream.close()
