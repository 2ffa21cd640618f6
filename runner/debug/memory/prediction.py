"""What `predict` says of a run that is built, and of the same run a little different."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from runner.batch import rows
from runner.data.config import DataConfig
from runner.predict import Prediction, predict
from runner.run import Run
from runner.technique import Draft

Context = Callable[[], AbstractContextManager[Any]]


def of_run(run: Run, samples: int | None = None, also: Sequence[Context] = ()) -> Prediction:
    """A step's memory with `samples` per backward (None: as now), in further contexts.

    Nothing of the run changes; what the model raises when it is traced passes through, also that
    it cannot do without data. A tenth of a second, and hardly any memory: tensors are traced
    without theirs.
    """
    draft = Draft(
        device=run.device,
        sizes=run.sizes,
        model=run.model,
        optimizer_class=type(run.update.optimizer),
        objective=run.objective,
        batch_size=run.train.samples(0),
        micro_batch=min(run.micro_batch, run.train.samples(0)),
        micro_batch_asked=None,
        tf32_asked=None,
        threads_asked=None,
        sample=lambda count: rows(run.train.peek(), slice(count)),  # placed already
        data=DataConfig(kind=""),
        in_memory=True,
        loader=lambda how: run.train,
        total_steps=run.total_steps,
        scope=ExitStack(),
        forward=run.forward,
        make_optimizer=lambda model: _like(run.update.optimizer, model),
        ema=bool(run.update.average),
        contexts=[*run.contexts, *also],
    )
    with torch.compiler.set_stance("force_eager"):
        return predict(draft, samples, live=True)


def _like(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """Another one that keeps the same state; its rates are of no consequence."""
    known = inspect.signature(type(optimizer)).parameters
    kept = {
        name: value
        for name, value in optimizer.defaults.items()
        if name in known and name not in ("lr", "fused", "foreach", "capturable")
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    make: Any = type(optimizer)
    made: Optimizer = make(trained, lr=1e-3, **kept)
    return made
