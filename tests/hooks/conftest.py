"""A run of real parts, small enough to build for each test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.checkpoint.checkpointer import Checkpointer
from runner.data.batch import Batch, Sizes
from runner.device.config import DeviceConfig
from runner.device.device import select
from runner.objectives.base import Objective
from runner.optim.optimizer_step import OptimizerStep
from runner.record.config import MonitoringConfig
from runner.record.history import History
from runner.record.recorder import Recorder
from runner.stability.config import StabilityConfig
from runner.stability.controller import StabilityController
from runner.techniques.base import Choice
from runner.training.metrics import Reader
from runner.training.run import Run
from runner.training.timing import Stopwatch


class Batches:
    """The same batch, again and again."""

    steps_per_epoch = 4
    choices: list[Choice] = []

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.asked = 0

    def batches(self, start: int) -> Iterator[Batch]:
        self.asked += 1
        while True:
            yield self.batch

    def peek(self) -> Batch:
        return self.batch

    def at(self, step: int) -> Batch:
        return self.batch

    def indices(self, step: int) -> list[int]:
        return list(range(len(self.batch[1])))

    def samples(self, step: int) -> int:
        return len(self.batch[1])

    def close(self) -> None:
        pass


class Mean(Objective):
    """The mean output: enough to call itself an objective."""

    def __call__(self, output: Any, target: Any) -> Tensor:
        return output.mean()

    def weight(self, target: Any) -> int:
        return len(target)

    def tally(self, output: Any, target: Any) -> dict[str, Tensor]:
        return {"loss": output.sum()}

    def metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return {"loss": float(totals["loss"])}


MakeRun = Callable[..., Run]


@pytest.fixture
def make_run() -> Iterator[MakeRun]:
    scope = ExitStack()

    def make(
        folder: Path | None, model: nn.Module, batch: Batch, sizes: Sizes, unit: str = "samples"
    ) -> Run:
        device = select(DeviceConfig(), scope)
        objective = Mean()
        objective.unit = unit
        recorder = Recorder(folder, MonitoringConfig())
        recorder.open()
        scope.callback(recorder.close)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        update = OptimizerStep(model, optimizer, StabilityConfig(), 0.1, [1.0])
        return Run(
            name="trial",
            seed=0,
            config_hash="",
            settings={},
            folder=folder,
            device=device,
            sizes=sizes,
            model=model,
            forward=model,
            contexts=[],
            objective=objective,
            update=update,
            guardian=StabilityController(StabilityConfig(), update, model),
            train=Batches(batch),
            validation=Batches(batch),
            micro_batch=4,
            total_steps=100,
            validate_every=10,
            checkpoint_every=10,
            patience=None,
            monitor="val/accuracy",
            higher_is_better=True,
            recorder=recorder,
            history=History(None),
            checkpointer=Checkpointer(None, 1),
            hooks=[],
            techniques=[],
            engagements=[],
            choices=[],
            scope=scope,
            started=time.monotonic(),
            grace_s=20.0,
            watch=Stopwatch(device.torch),
            reader=Reader(device.torch),
        )

    with scope:
        yield make
