"""Signals: remembered while a step runs, at once while the loop only waits; no worker stays."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from runner.core.device.signals import InterruptHandler, interruption_before_run, raise_on_signals
from runner.core.errors import ConfigError, Interrupted
from runner.core.interfaces.run import Run
from runner.core.record.summary import Summary
from runner.core.train.loop import train
from tests import runs


@contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    """A signal's handler is this one."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(("number", "name"), [(2, "Ctrl-C"), (15, "SIGTERM")])
def test_the_first_signal_is_answered_at_once_and_the_second_waits_for_no_step(
    number: int, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(number)
    with InterruptHandler("stopping after this step") as interrupts:
        os.kill(os.getpid(), number)
        runs.wait_until(lambda: caplog.messages, seconds=10)  # by another thread
        assert interrupts.received == number
        assert interrupts.error().exit_code == 128 + number
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert caplog.messages == [f"{name}: stopping after this step"]
    assert signal.getsignal(number) is before
    assert "interrupts" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("number", [15, 10])
def test_a_signal_before_a_run_unwinds_as_ctrl_c_does_and_is_told_apart(number: int) -> None:
    with handled(number, signal.SIG_DFL):
        with pytest.raises(KeyboardInterrupt) as ended, raise_on_signals():
            with InterruptHandler() as interrupts:  # theirs while they are there
                os.kill(os.getpid(), number)
            assert interrupts.received == number
            os.kill(os.getpid(), number)
        error = interruption_before_run(ended.value)
        assert error.exit_code == 128 + number
        assert str(error) == f"interrupted by {signal.Signals(number).name}"
        assert interruption_before_run(KeyboardInterrupt()).exit_code == 130
        assert signal.getsignal(number) is signal.SIG_DFL


def test_what_a_library_raises_while_a_signal_unwinds_it_is_the_signal() -> None:
    with pytest.raises(KeyboardInterrupt) as ended, raise_on_signals():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            None.cleaned  # type: ignore[attr-defined]  # noqa: B018
    assert interruption_before_run(ended.value).exit_code == 143
    with pytest.raises(ConfigError), raise_on_signals():  # what was made of it on purpose stays
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ConfigError("key", "is wrong") from None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_error_after_a_signal_that_a_library_swallowed_is_the_signal(number: int) -> None:
    with pytest.raises(KeyboardInterrupt) as ended, raise_on_signals():
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        raise ConfigError("key", "is half composed")
    assert interruption_before_run(ended.value).exit_code == 128 + number


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_that_nohup_ignores_or_another_program_handles_is_left_to_them(
    number: int,
) -> None:
    theirs: list[int] = []
    for handler in (signal.SIG_IGN, lambda received, frame: theirs.append(received)):
        with handled(number, handler):
            with raise_on_signals(), InterruptHandler("stopping") as interrupts:
                os.kill(os.getpid(), number)
            assert interrupts.received is None
    assert theirs == [number]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_all_processes_of_a_run_ends_in_a_checkpoint(
    number: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def send(run: Run) -> None:
        workers = multiprocessing.active_children()
        for worker in workers:
            os.kill(worker.pid or 0, number)
        assert len(workers) == 2 and not wait([w.sentinel for w in workers], 0.1)
        os.kill(os.getpid(), number)
        if number in (signal.SIGUSR1, signal.SIGUSR2):  # SLURM's next may come before it has ended
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as ended:
        runs.trained("data.workers=2", folder=tmp_path, hooks=[runs.AtSteps(3, send)])
    assert ended.value.exit_code == (129 if number == signal.SIGHUP else 143)
    assert Summary.read(tmp_path).checkpoint.last == "checkpoints/step_00000003"
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("waits", [True, False])
def test_a_signal_cuts_a_wait_short_and_none_begins_after_it(waits: bool) -> None:
    with InterruptHandler() as interrupts:
        if waits:
            interrupts.begin_wait()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            interrupts.begin_wait()
        assert interrupts.received == signal.SIGTERM and interrupts.wait_interrupted


def test_a_signal_during_the_first_checkpoint_is_not_followed_by_a_wait_for_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with runs.opened("checkpoint.every=1", folder=tmp_path) as run:
        saved = run.checkpointer.save

        def save_under_a_signal(*args: Any, **options: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return saved(*args, **options)

        monkeypatch.setattr(run.checkpointer, "save", save_under_a_signal)
        no_data = ["data was asked for"]
        monkeypatch.setattr(run.train, "batches", lambda first: map(pytest.fail, no_data))
        with pytest.raises(Interrupted) as ended:
            train(run)
    assert ended.value.exit_code == 143


def _own_handler(number: int, frame: object) -> None:
    pass


def test_a_handler_that_other_code_sets_during_a_run_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with InterruptHandler() as interrupts:
        interrupts.warn_replaced()
        assert not caplog.messages
        signal.signal(signal.SIGTERM, _own_handler)
        for _ in range(2):
            interrupts.warn_replaced()
    (message,) = caplog.messages
    line = _own_handler.__code__.co_firstlineno
    assert message.startswith("SIGTERM: other code has replaced the handler by ")
    assert f"._own_handler ({__file__}:{line})" in message


def test_a_handler_set_before_the_run_trains_is_named_in_a_command_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with handled(signal.SIGTERM, _own_handler):
        with InterruptHandler() as interrupts:  # a program's own is no surprise to it
            interrupts.warn_overridden()
        assert not caplog.messages
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with raise_on_signals():
            with InterruptHandler() as interrupts:
                interrupts.warn_overridden()
            assert not caplog.messages
            signal.signal(signal.SIGTERM, _own_handler)
            with InterruptHandler() as interrupts:
                interrupts.warn_overridden()
    (message,) = caplog.messages
    assert message.startswith("SIGTERM: other code has set the handler ")
    assert "._own_handler (" in message
