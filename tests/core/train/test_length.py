"""How large a batch is where fewer samples are there than were asked for."""

from __future__ import annotations

import logging

import pytest

from runner import build, compose
from runner.core.errors import ConfigError
from runner.core.interfaces.run import Run

DATA = ["data=cancer", "model=mlp", "training.steps=2"]


def work(run: Run) -> str:
    """What threads are chosen by; who else is busy on the machine comes after it."""
    (reason,) = [c.reason for c in run.choices if c.key == "device.threads"]
    assert "MFLOP" in reason
    return reason.partition(",")[0]


def test_a_batch_size_above_the_sample_count_uses_all_samples_and_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with build(compose([*DATA, "training.batch_size=1000"])) as run:
        there = run.train.samples(0)
        asked = ["training.batch_size=100000", "training.micro_batch=90000"]
    with build(compose([*DATA, f"training.batch_size={there}", "optimization=basic"])) as run:
        expected = work(run)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "runner"):
        with build(compose([*DATA, *asked, "optimization=basic"])) as run:
            assert run.micro_batch == run.train.samples(0) == there
            assert run.train.steps_per_epoch == 1
            assert work(run) == expected  # figures are of the batch that runs
    (said,) = [m for m in caplog.messages if "training.batch_size" in m]
    assert "training.batch_size=100000" in said and f"{there} training samples" in said


def test_it_is_an_error_where_such_a_batch_would_be_dropped() -> None:
    with pytest.raises(ConfigError, match="training.batch_size: 100000 exceeds"):
        build(compose([*DATA, "training.batch_size=100000", "data.drop_last=true"])).close()
