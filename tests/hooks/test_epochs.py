"""How long epochs take: one number each, the end found within a stretch of steps."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest

from runner import build, compose, train
from runner.hooks import epochs
from runner.training.hook import Hook, Report
from runner.training.run import Run

OVERRIDES = [
    "device.threads=1",
    "monitoring.progress=false",
    "data=cancer",
    "model.width=8",
    "optimization=none",
    "monitoring.every=7",
]


def seconds(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["epoch_seconds"] for row in rows if "epoch_seconds" in row]


def test_each_epoch_is_said_at_debug_level_and_the_record_has_the_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "runner"):
        with build(compose([*OVERRIDES, "training.epochs=3"]), tmp_path) as run:
            summary = train(run)
    said = [
        record
        for record in caplog.records
        if record.name == "runner" and record.getMessage().startswith("epoch ")
    ]
    assert [record.getMessage().split()[1] for record in said] == ["1", "2", "3"]
    assert {record.levelno for record in said} == {logging.DEBUG}
    times = [float(record.getMessage().split()[-2]) for record in said]
    assert 0 < sum(times) <= summary.wall_seconds * 1.01
    assert seconds(tmp_path)
    assert max(seconds(tmp_path)) <= max(times) * 1.01


def test_a_long_epoch_is_news(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(epochs, "LONG_S", 0.0)
    with caplog.at_level(logging.INFO, "runner"):
        with build(compose([*OVERRIDES, "training.epochs=1"]), tmp_path) as run:
            train(run)
    assert any(record.getMessage().startswith("epoch 1 ended") for record in caplog.records)


def test_an_epoch_that_was_under_way_when_the_run_went_on_is_not_timed(tmp_path: Path) -> None:
    with build(compose([*OVERRIDES, "training.steps=5"]), tmp_path) as run:
        train(run)
        per_epoch = run.train.steps_per_epoch
    assert 5 < per_epoch
    again = [*OVERRIDES, "checkpoint.resume=auto", f"training.steps={per_epoch + 3}"]
    with build(compose(again), tmp_path) as run:
        train(run)
    assert seconds(tmp_path) == []


class Timed(Hook):
    """Asks the clock at each report."""

    def __init__(self, clock: epochs.Epochs) -> None:
        self.clock = clock

    def on_report(self, run: Run, report: Report) -> None:
        self.clock.seconds(run, report)


def test_several_epochs_between_two_reports_share_the_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    every = OVERRIDES[:-1] + ["monitoring.every=1000", "training.epochs=4"]
    with caplog.at_level(logging.DEBUG, "runner"), build(compose(every)) as run:
        clock = epochs.Epochs(0, run.train.steps_per_epoch)
        run.hooks.append(Timed(clock))
        start = time.monotonic()
        train(run)
        took = time.monotonic() - start
    (record,) = [r for r in caplog.records if r.getMessage().startswith("epoch 4 ended after ")]
    assert 0 < 4 * float(record.getMessage().split()[-2]) <= took
