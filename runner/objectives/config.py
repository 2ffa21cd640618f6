"""The `objective` config group."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from runner.bounds import bounded, check_bounds
from runner.errors import ConfigError

KINDS = ("auto", "classification", "language_modelling", "regression")


@dataclass
class ObjectiveConfig:
    """What is minimised and which metrics say how well it went."""

    kind: str = "auto"  # auto: the one that fits the data's task
    _target_: str | None = None  # a callable of the user's own: (output, target) -> mean loss
    arguments: dict[str, Any] = field(default_factory=dict)
    # classification: cross_entropy | focal; regression: mse | mae | huber; null: the first
    loss: str | None = None
    gamma: float = bounded(2.0, min=0)  # focal: how much less samples count that are right already
    delta: float = bounded(1.0, above=0)  # huber: the error, in deviations, from which it is linear
    # null | balanced (training samples / (classes * those of the class)) | a weight for each class;
    # for the training loss, metrics are not weighted
    class_weights: Any = None
    label_smoothing: float = bounded(0.0, min=0, below=1)  # classification
    top_k: int = bounded(5, min=1)  # classification: a second accuracy
    metrics: list[str] = field(default_factory=list)  # of torchmetrics: [F1Score, AUROC, R2Score]
    # Targets of this value carry no loss. None: there are none, which saves counting them on the
    # device for each micro-batch.
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
