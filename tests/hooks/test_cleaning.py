"""Above its share of the memory a run cleans, says so once, and counts."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from runner import build, compose, train
from runner.device import memory
from runner.device.config import DeviceConfig
from runner.errors import ConfigError

QUICK = ["data=cancer", "training.steps=60", "monitoring.every=10", "monitoring.progress=false",
         "device=cpu", "optimization=none"]  # fmt: skip


def test_memory_above_the_threshold_is_cleaned_and_said_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING, "runner"):
        with build(compose([*QUICK, "device.clean_above=1e-6"]), tmp_path) as run:
            summary = train(run)
    said = [r.message for r in caplog.records if "device.clean_above" in r.message]
    assert len(said) == 1
    assert summary.faults["memory_cleaned"] == 1  # nothing has grown since


def test_cleaning_happens_again_once_memory_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.5, 0.95, 0.93, 0.935, 0.96, 0.94, 0.5, 0.95, 0.95])
    monkeypatch.setattr(memory, "share_held", lambda device: next(shares))
    with build(compose([*QUICK, "device.clean_above=0.9"])) as run:
        summary = train(run)
    # 0.95 -> 0.93; 0.935 is no growth; 0.96 -> 0.94; below; 0.95 -> 0.95
    assert summary.faults["memory_cleaned"] == 3


@pytest.mark.parametrize("setting", ["null", "1"])
def test_below_the_threshold_nothing_is_done(setting: str) -> None:
    with build(compose([*QUICK, f"device.clean_above={setting}"])) as run:
        assert "memory_cleaned" not in train(run).faults


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_a_threshold_is_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match=r"device\.clean_above"):
        DeviceConfig(clean_above=share)
