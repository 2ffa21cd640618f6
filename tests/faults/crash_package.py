"""User code of the runs that are killed; PLANT names a defect of resuming that it makes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from runner import Hook
from runner.core.interfaces.hook import Step
from runner.core.interfaces.run import Run


class Points:
    """Two classes of points with noise from torch, Python and NumPy.

    Those in `poison` are NaN; those in `bad` cannot be read.
    """

    def __init__(
        self, samples: int = 160, poison: tuple[int, ...] = (), bad: tuple[int, ...] = ()
    ) -> None:
        self.samples, self.poison, self.bad = samples, {*poison}, {*bad}
        self.sizes = {"task": "classification", "in_features": 6, "classes": 2}

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index in self.bad:
            raise OSError(f"point {index} is torn")
        noise = torch.randn(6) + float(np.random.randn()) * 0.1 + random.random() * 0.1
        inputs = noise + 2.0 * (index % 2)
        return (inputs * float("nan") if index in self.poison else inputs), index % 2


class Stream(IterableDataset):
    """The same points in order, each for one worker; those to validate on are others."""

    classes = 2

    def __init__(self, samples: int = 160, split: str = "train") -> None:
        self.points, self.taken = Points(samples), 0

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, len(self.points), every)[self.taken :]:
            self.taken += 1
            yield self.points[index]
        self.taken = 0


class Continued(Stream):
    """The same, which can be continued."""

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


class Net(torch.nn.Module):
    """BatchNorm and dropout."""

    def __init__(self, in_features: int, classes: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(in_features, 8), torch.nn.BatchNorm1d(8),
            torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(8, classes),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Draws(Hook):
    """Draws from the generators of Python and NumPy at every step."""

    def on_step(self, run: Run, step: Step) -> None:
        random.random()
        np.random.random()


def _plant(name: str) -> None:
    from runner.core.optim.optimizer_step import OptimizerStep
    from runner.core.record import recorder, tensorboard
    from runner.core.stability.controller import StabilityController
    from runner.core.train import resume

    def ignore(*_: Any, **__: Any) -> None:
        """Do nothing."""

    def leave_out(key: str) -> None:
        load = OptimizerStep.load

        def load_rest(self: OptimizerStep, state: dict[str, Any]) -> None:
            own = self.state()[key]
            load(self, state | {key: own})

        OptimizerStep.load = load_rest  # type: ignore[method-assign]

    if name == "rng":
        resume.restore_random_state = ignore
    elif name == "guard":
        StabilityController.load = ignore  # type: ignore[method-assign]
    elif name == "metrics":
        recorder._prepare_rows = lambda path, *_: path
    elif name == "tensorboard":
        tensorboard.TensorBoard.purge = ignore  # type: ignore[method-assign]
        tensorboard.truncate_events = lambda *_: True
    elif name:
        leave_out({"optimizer": "optimizer", "ema": "average", "scaler": "scale"}[name])


_plant(os.environ.get("PLANT", ""))
