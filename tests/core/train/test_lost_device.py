"""A device-side assert: every later call raises, and the record says failed all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runner import compose, train
from runner.core.device import memory
from runner.core.device.device import Device
from runner.core.device.device_errors import is_device_error, suppress_device_errors
from runner.core.interfaces.hook import Hook
from runner.core.interfaces.run import Run
from runner.core.jobs import evaluate
from runner.core.record.history import History
from runner.core.record.summary import SUMMARY_FILE, Summary
from runner.core.train.timing import Stopwatch
from tests import runs

ASSERT = "CUDA error: device-side assert triggered"
OVERRIDES = [
    *["optimization=none", "data=cancer", "model.width=8", "training.steps=6"],
    *["training.validate_every=3", "monitoring.every=2"],
]


class LostDevice(TorchDispatchMode):
    """Raises at operator `dies_at`, and at each one after it."""

    def __init__(self, dies_at: int) -> None:
        super().__init__()
        self.dies_at, self.operators = dies_at, 0

    def call(self, *_: Any) -> None:
        self.operators += 1
        if self.operators >= self.dies_at:
            raise torch.AcceleratorError(ASSERT)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.call()
        return func(*args, **(kwargs or {}))


class AtEnd(Hook):
    """Calls an action when the session ends, however it does."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.action = action

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        try:
            yield
        finally:
            self.action()


def train_until(dies_at: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> LostDevice:
    device = LostDevice(dies_at)

    def check(*_: Any) -> None:
        if device.operators >= dies_at:
            device.call()

    def pause(stopwatch: Stopwatch, wait: bool = True) -> None:
        if wait:  # for events of the device
            check()

    def peak(device: Device) -> int:
        check()
        return 0

    with runs.opened(*OVERRIDES, folder=folder) as run, monkeypatch.context() as patched:
        patched.setattr(Device, "synchronize", check)
        patched.setattr(Stopwatch, "pause", pause)
        patched.setattr(memory, "peak_device_bytes", peak)
        run.hooks.append(AtEnd(lambda: torch.zeros(1).add_(1)))
        with device:
            train(run)
    return device


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The operators of the whole training."""
    with pytest.MonkeyPatch.context() as patched:
        return train_until(10**9, tmp_path_factory.mktemp("whole"), patched).operators


@pytest.mark.parametrize(
    "part",
    [n if n in (1, 5, 9, 12) else pytest.param(n, marks=pytest.mark.slow) for n in range(1, 13)],
)
def test_a_run_with_a_lost_device_ends_as_failed_with_reason_and_history(
    part: int, operators: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spread over the first save, forward, backward, update, reports, validation, the last save
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        train_until(1 + part * operators // 13, tmp_path, monkeypatch)
    summary = Summary.read(tmp_path)
    assert (summary.status, summary.reason) == ("failed", f"AcceleratorError: {ASSERT}")
    assert summary.faults["exception"] == 1
    (fault,) = History.read(tmp_path)
    assert fault.message == summary.reason and "Traceback" in fault.traceback
    assert fault.steps == [summary.steps + 1]


def test_the_status_is_written_before_anything_asks_the_device_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: list[str] = []
    with runs.opened(*OVERRIDES, folder=tmp_path) as run:
        forward = run.forward

        def lost(*args: Any) -> Any:
            if run.progress.step == 4:
                raise torch.AcceleratorError(ASSERT)
            return forward(*args)

        run.forward = lost
        run.hooks.append(AtEnd(lambda: statuses.append(Summary.read(tmp_path).status)))
        with pytest.raises(torch.AcceleratorError):
            train(run)
    assert statuses == ["failed"]
    summary = Summary.read(tmp_path)
    assert summary.throughput.samples_per_second > 0  # the device was not lost
    assert summary.faults["exception"] == 1 and History.read(tmp_path)[0].capture == ""


def test_an_evaluation_on_a_lost_device_leaves_no_record_of_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.trained(*OVERRIDES, folder=tmp_path / "trained")
    config = compose(
        [*runs.QUICK, *OVERRIDES, "job=evaluate", f"checkpoint.resume={tmp_path / 'trained'}"]
    )
    lost = Mock(side_effect=torch.AcceleratorError(ASSERT))
    monkeypatch.setattr(evaluate, "evaluate", lost)
    with pytest.raises(torch.AcceleratorError):
        evaluate.main(config, tmp_path / "evaluated")
    assert not (tmp_path / "evaluated" / SUMMARY_FILE).exists()


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (torch.AcceleratorError(ASSERT), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (RuntimeError("CUDA driver error: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: device-side assert triggered"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), False),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError(ASSERT), False),
    ],
    ids=repr,
)
def test_errors_of_a_lost_device_are_told_from_memory_and_code(
    error: Exception, lost: bool
) -> None:
    assert is_device_error(error) is lost
    with suppress_device_errors() if lost else pytest.raises(type(error)):
        raise error
