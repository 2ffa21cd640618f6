"""User code in which one process of a run does something wrong, once, at a point of a step.

FAULT is `rank:point:kind:number`: the number of times that this process comes to the point before.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import IterableDataset, get_worker_info

from runner import Hook
from runner.core.device.device import Device
from runner.core.errors import DataError
from runner.core.interfaces.hook import Evaluation, Report, Step, Verdict

SAMPLES, FEATURES = 96, 6
visits: Counter[str] = Counter()


def planted(point: str) -> str:
    """Do the fault if it is due here; returns the kind of one that is the caller's to do."""
    if not visits["begun"] and point != "build":
        return ""
    visits[point] += 1
    for fault in filter(None, os.environ.get("FAULT", "").split(",")):
        rank, where, kind, number = fault.split(":")
        if (rank, where, int(number)) == (os.environ.get("RANK"), point, visits[point]):
            if _is_first(fault):
                _do(kind)
                return kind
    return ""


def _is_first(fault: str) -> bool:
    """Whether it was not done by an earlier attempt, where FAULT_ONCE names a folder."""
    folder = os.environ.get("FAULT_ONCE")
    if folder is None:
        return True
    try:
        (Path(folder) / fault.replace(":", "_")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _do(kind: str) -> None:
    if kind == "raise":
        raise ValueError("planted")
    if kind == "usage":
        raise DataError("planted")
    if kind == "oom":
        torch.empty(2**60)  # the allocator's own error
    if kind == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "exit":
        os._exit(3)
    if kind == "hang":
        time.sleep(600)
    if kind == "spin":  # and no other thread of Python's runs
        re.match("(a+)+$", "a" * 99 + "b")
    if kind == "lock":  # no signal's handler is run there
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)


class Data:
    """Two classes that can be told apart."""

    sizes = {"task": "classification", "in_features": FEATURES, "classes": 2}

    def __init__(self) -> None:
        planted("build")

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = torch.Generator().manual_seed(index)
        x = torch.randn(FEATURES, generator=drawn) + index % 2
        return (x * float("nan") if planted("data") == "nan" else x), index % 2


class Numbers(IterableDataset):
    """A stream of samples that are numbered by their first feature, each for one reader."""

    classes = 2

    def __init__(self, split: str = "train") -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        info = get_worker_info()
        first, readers = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, 80, readers)[self.taken :]:
            self.taken += 1
            x = torch.randn(FEATURES) + number % 2
            x[0] = number
            if (folder := os.environ.get("SEEN")) and readers > 1:
                with open(f"{folder}/{first}", "a") as file:
                    file.write(f"{number}\n")
            planted("data")
            yield x, number % 2
        self.taken = 0

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


class Unsaved(Numbers):
    """The same, which is continued by skipping."""

    state_dict = None  # type: ignore[assignment]


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (float("nan") if planted("backward") == "nan" else 1.0)


class Net(nn.Module):
    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(in_features, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2)
        )
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        kind = planted("forward" if self.training else "validation")
        x = _Backward.apply(self.layers(x)) if self.training else self.layers(x)
        return self.head(x) * (float("nan") if kind == "nan" else 1.0)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        planted("saving")
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        planted("restore")
        return super().load_state_dict(*args, **kwargs)


class _StalledDevice(TorchDispatchMode):
    """A device whose kernels wait for a lost process: each use of it is written to a file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(str(func))
        return func(*args, **(kwargs or {}))

    def note(self, use: str) -> None:
        with self.file.open("a") as file:
            file.write(f"{use}\n")


def _stall_after_loss(run: Any, backend: str, folder: Path) -> None:
    """Report another backend, and count what uses the device once a process is lost."""
    world, device = run.world, _StalledDevice(folder / f"used-{run.world.rank}")
    world.backend, own_leave = backend, world.leave
    synchronize, save = Device.synchronize, run.checkpointer.save

    def leave(error: BaseException) -> None:
        own_leave(error)
        device.__enter__()
        Device.synchronize = lambda own: (device.note("synchronize"), synchronize(own))[1]
        run.checkpointer.save = lambda *args: (device.note("save"), save(*args))[1]

    world.leave = leave


class Watch(Hook):
    @contextmanager
    def session(self, run: Any) -> Iterator[None]:
        """From here on visits are counted: what tries the model before is no step."""
        visits["begun"] = 1
        folder = Path(os.environ["FAULT_FOLDER"])
        (folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
        if "BACKEND" in os.environ:
            _stall_after_loss(run, os.environ["BACKEND"], folder)
        planted("session")
        yield
        planted("end")

    def on_gradients(self, run: Any, step: Step) -> Verdict:
        return _verdict("on_gradients")

    def on_step(self, run: Any, step: Step) -> Verdict:
        time.sleep(float(os.environ.get("STEP_S", "0")))
        verdict = _verdict("on_step")
        if verdict is Verdict.STOP and "END_BY" in os.environ:
            run.request_stop(os.environ["END_BY"], "planted")
        return verdict

    def on_report(self, run: Any, report: Report) -> Verdict:
        return _verdict("on_report")

    def on_validation(self, run: Any, evaluation: Evaluation) -> Verdict:
        return _verdict("on_validation")


def _verdict(point: str) -> Verdict:
    kind = planted(point)
    verdicts = {"skip": Verdict.SKIP, "rollback": Verdict.ROLLBACK, "end": Verdict.STOP}
    return verdicts.get(kind, Verdict.KEEP)
