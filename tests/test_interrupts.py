"""Signals: remembered while a step runs, at once while the loop only waits."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.errors import Interrupted
from runner.training.loop import train
from runner.training.signals import Interrupts, interruption_before_run, sigterm_unwinds
from tests import runs


def test_the_first_signal_is_answered_at_once_and_only_that(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = threading.Event()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.set()

    logger, handler = logging.getLogger("runner"), Told()
    logger.addHandler(handler)
    try:
        with Interrupts("stopping after this step"):
            os.kill(os.getpid(), signal.SIGTERM)
            assert said.wait(10)  # while nothing else goes on
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
    finally:
        logger.removeHandler(handler)
    assert caplog.messages == ["SIGTERM: stopping after this step"]
    assert "interrupts" not in [thread.name for thread in threading.enumerate()]


def test_sigterm_before_a_run_unwinds_as_ctrl_c_does_and_is_told_apart() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt) as ended, sigterm_unwinds():
            with Interrupts() as interrupts:  # theirs while they are there
                os.kill(os.getpid(), signal.SIGTERM)
            assert interrupts.received == signal.SIGTERM
            os.kill(os.getpid(), signal.SIGTERM)
        assert interruption_before_run(ended.value).exit_code == 143
        assert interruption_before_run(KeyboardInterrupt()).exit_code == 130
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_second_signal_does_not_wait_for_the_step() -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.received == signal.SIGINT


def test_a_signal_cuts_a_wait_short() -> None:
    with Interrupts() as interrupts:
        interrupts.begin_wait()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.received == signal.SIGTERM and interrupts.cut_short


def test_a_wait_does_not_begin_after_a_signal() -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            interrupts.begin_wait()
        assert interrupts.received == signal.SIGTERM and interrupts.cut_short


def test_a_signal_during_the_first_checkpoint_is_not_followed_by_a_wait_for_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def batches(first: int) -> Iterator[Any]:
        raise AssertionError("data was asked for")
        yield

    with runs.opened("checkpoint.every=1", folder=tmp_path) as run:
        saved = run.checkpointer.save

        def save_under_a_signal(*args: Any, **options: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return saved(*args, **options)

        monkeypatch.setattr(run.checkpointer, "save", save_under_a_signal)
        monkeypatch.setattr(run.train, "batches", batches)
        with pytest.raises(Interrupted) as ended:
            train(run)
    assert ended.value.exit_code == 143


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_a_step_is_remembered_and_the_handlers_are_put_back(number: int) -> None:
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        os.kill(os.getpid(), number)
        assert interrupts.received == number
        assert interrupts.error().exit_code == 128 + number
    assert signal.getsignal(number) is before
