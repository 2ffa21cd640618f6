"""Signals: remembered while a step runs, at once while the loop only waits."""

from __future__ import annotations

import os
import signal

import pytest

from runner.interrupts import Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_a_step_is_remembered_and_the_handlers_are_put_back(number: int) -> None:
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        os.kill(os.getpid(), number)
        assert interrupts.received == number
        assert interrupts.error().exit_code == 128 + number
    assert signal.getsignal(number) is before


def test_a_signal_cuts_a_wait_short() -> None:
    with Interrupts() as interrupts:
        interrupts.waiting = True
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.received == signal.SIGTERM


def test_the_second_signal_does_not_wait_for_the_step() -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.received == signal.SIGINT
