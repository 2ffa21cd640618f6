"""Class weights of the training loss, and a hint on rare classes."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from runner.core.errors import ConfigError
from runner.core.findings import Choice
from runner.core.interfaces.batch import Sizes
from runner.core.schemas.data import LABELS_UNKNOWN
from runner.core.schemas.models import ObjectiveConfig

log = logging.getLogger("runner")
KEY = "objective.class_weights"


def choose_class_weights(
    config: ObjectiveConfig, sizes: Sizes, counts: np.ndarray | None
) -> tuple[Tensor | None, list[Choice]]:
    """Return the class weights of the training loss (or None), and the choices.

    `counts` are the training samples per class. Without weights a choice names the rarest class.
    """
    key, weights, classes = KEY, config.class_weights, sizes.classes
    if sizes.task != "classification" or config._target_ is not None or not classes:
        return None, []
    if isinstance(weights, list):
        if len(weights) != classes:
            fix = f"in this order: {', '.join(sizes.class_names)}"
            raise ConfigError(key, f"has {len(weights)} weights for {classes} classes", fix)
        return torch.tensor(weights, dtype=torch.float32), []
    if counts is None:
        raise ConfigError(key, LABELS_UNKNOWN, "list a weight for each class")
    names = sizes.class_names or tuple(map(str, range(classes)))
    total, rarest, commonest = counts.sum(), int(counts.argmin()), int(counts.argmax())
    share = counts[rarest] / max(total, 1)
    if weights is None:
        problem = f"class {names[rarest]!r} has {share:.2%} of the training samples"
        reason = f"{problem}; {key}=balanced or data.sampler=balanced would compensate for it"
        return None, [Choice(key, None, reason)]
    balanced = total / (classes * np.maximum(counts, 1))
    extremes = (f"{names[i]!r} {balanced[i]:.3g}" for i in (commonest, rarest))
    reason = "training samples / (classes * those of the class): " + " to ".join(extremes)
    return torch.tensor(balanced, dtype=torch.float32), [Choice(key, "balanced", reason)]


def check_balance(objective: ObjectiveConfig, is_new: bool) -> None:
    """Raise ConfigError if the loss of a new run balances the classes as its sampler does."""
    has_own_loss = objective._target_ is not None or objective.kind == "model"
    if objective.class_weights != "balanced" or has_own_loss:
        return
    key, problem = KEY, "balanced evens out the classes a second time, after data.sampler=balanced"
    fix = "leave one of them out: objective.class_weights=null or data.sampler=null"
    if is_new:
        raise ConfigError(key, problem, fix)
    log.warning("%s %s; kept from the resumed run; for a new one %s", key, problem, fix)
