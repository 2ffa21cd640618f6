"""The `objective` config group."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from runner.core.bounds import bounded, check_bounds
from runner.core.errors import ConfigError

KINDS = ("auto", "classification", "language_modelling", "regression", "model")


@dataclass
class ObjectiveConfig:
    """The training loss and the metrics."""

    # auto (by the data), classification, language_modelling, regression, or model: the model's own
    kind: str = "auto"
    _target_: str | None = None  # your own loss: (output, target) -> mean; null: a built-in one
    arguments: dict[str, Any] = field(default_factory=dict)  # arguments for `_target_`
    # classification: cross_entropy | focal; regression: mse | mae | huber; null: the first of these
    loss: str | None = None
    gamma: float = bounded(2.0, min=0)  # focal: larger values weight well-classified samples less
    delta: float = bounded(1.0, above=0)  # huber: linear beyond this error, in standard deviations
    # null | balanced | a weight for each class, in the training loss only; balanced: training
    # samples / (classes * samples of the class)
    class_weights: Any = None
    label_smoothing: float = bounded(0.0, min=0, below=1)  # cross_entropy: smoothing share; 0: off
    top_k: int = bounded(5, min=1)  # classification: k of a second, top-k accuracy; 1: none
    metrics: list[str] = field(default_factory=list)  # of torchmetrics, e.g. [F1Score, AUROC]
    # targets of this value are ignored; null: none, which saves counting them in each micro-batch
    ignore_index: int | None = -100

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                "objective.kind", f"unknown objective {self.kind!r}", f"use one of {KINDS}"
            )
        check_bounds(self, "objective")
        weights = self.class_weights
        numbers = isinstance(weights, list) and all(
            type(x) in (int, float) and 0 < x < math.inf for x in weights
        )
        if weights not in (None, "balanced") and not numbers:
            fix = "use balanced, null, or a number above 0 for each class: [1, 2.5]"
            raise ConfigError("objective.class_weights", f"cannot be {weights!r}", fix)
