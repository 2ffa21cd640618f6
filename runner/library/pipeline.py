"""A whole run around a model and data that a program has made: no command line, no config file."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from runner.benchmark.auto.resolve import resolve_auto
from runner.build import Given, build
from runner.errors import UsageError
from runner.evaluation import evaluate
from runner.hook import Hook
from runner.library.assembly import check_loss_fn, check_module, check_optimizer, check_overrides
from runner.library.parts import config_of, source_of
from runner.loop import train
from runner.objectives.custom import Custom
from runner.optim.optimizer import Optimizer
from runner.report import run as report
from runner.run import Run
from runner.summary import Summary

WHO = "create_training_pipeline"


def create_training_pipeline(
    model: nn.Module,
    data: Any,
    *,
    validation: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Optimizer | None = None,
    level: str = "advanced",
    name: str | None = None,
    folder: str | Path | None = None,
    record: bool = True,
    hooks: Sequence[Hook] = (),
    overrides: Sequence[str] = (),
) -> Pipeline:
    """A run that trains `model` on `data`, with checkpoints, metrics and TensorBoard.

    `data` is a map-style data set, or (inputs, target) as tensors or arrays, the sample first;
    `validation` is another such, or None to hold `data.validation` of it out. Without a `loss_fn`
    (the mean of (output, target)) the objective follows from the targets. An `optimizer` of the
    caller's keeps its learning rates; without one it is that of the config. All that `python -m
    runner` has is there by `overrides`, such as `training.epochs=5` or `device=cpu`.

    It is recorded in `folder`, or in a new one under `outputs/runs/<name>/`; `record=False` writes
    nothing. Raises UsageError, ConfigError, DataError or DeviceError.
    """
    check_module(WHO, model)
    check_overrides(WHO, overrides)
    if loss_fn is not None:
        check_loss_fn(WHO, loss_fn)
    if optimizer is not None:
        check_optimizer(WHO, model, optimizer)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(f"{WHO}: no parameter of the model needs a gradient: nothing to train")
    config = config_of(model, data, level, name, overrides)
    source = source_of(WHO, data, validation, config, own_loss=loss_fn is not None)
    objective = None
    if loss_fn is not None:
        named = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        objective = Custom(loss_fn, named, "loss_fn")
    where = _folder(folder, config.name) if record else None
    given = Given(model, source, objective, optimizer)
    run = build(config, where, resolve_auto(config, where, given))
    run.hooks += hooks
    return Pipeline(run)


@final
class Pipeline:
    """A run, ready; close it when done, or use it as a context manager."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    def folder(self) -> Path | None:
        """Where the run is recorded."""
        return self.run.folder

    def train(self) -> Summary:
        """Train to the end and say how it went; a report is left in the folder."""
        try:
            return train(self.run)
        finally:
            if self.folder is not None and (self.folder / "summary.json").exists():
                report.write(Summary.read(self.folder), self.folder)

    def evaluate(self) -> dict[str, float]:
        """The metrics of the model as it is, over the validation set (`val/accuracy`, …)."""
        return evaluate(self.run).metrics

    def close(self) -> None:
        """Undo every global switch, and wait for what is being written."""
        self.run.scope.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _folder(folder: str | Path | None, name: str) -> Path:
    if folder is not None:
        return Path(folder)
    return (
        Path("outputs/runs") / name / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(3)}"
    )
