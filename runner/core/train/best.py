"""What the best value of a run is of: its metric, direction and validation samples."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.core.interfaces.run import Progress

log = logging.getLogger("runner")

LOSS_KEYS = ("kind", "_target_", "loss", "gamma", "delta", "label_smoothing", "ignore_index")
"""Keys of `objective` that determine the value of the loss."""


@dataclass(frozen=True)
class BestCriterion:
    """By what the best checkpoint is chosen; values of different ones are not compared."""

    metric: str
    mode: str  # min | max
    validation: str  # sha256 of the validation indices and the data's digest

    @classmethod
    def of_state(cls, state: Mapping[str, Any], now: BestCriterion, default: str) -> BestCriterion:
        """Return that of a checkpoint.

        An older one does not have it: its metric is that of its settings, or `default`, and the
        rest counts as unchanged.
        """
        if "criterion" in state:
            return cls(**state["criterion"])
        metric = state["settings"].get("training.monitor", "None")
        return cls(default if metric == "None" else metric, now.mode, now.validation)


def digest_validation(indices: np.ndarray, data_digest: str) -> str:
    """Return a sha256 of the samples that are validated on, from their indices alone."""
    sha256 = hashlib.sha256(indices.astype("<i8").tobytes())
    sha256.update(data_digest.encode())
    return sha256.hexdigest()


def describe_difference(
    before: BestCriterion, now: BestCriterion, settings: Mapping[str, str], after: Mapping[str, str]
) -> str:
    """Return why values of both are not comparable, or ""; `settings` are those of `before`."""
    texts = []
    if before.metric != now.metric:
        texts.append(f"of {before.metric}, not {now.metric}")
    elif before.mode != now.mode:
        texts.append(f"the {before.mode} of {before.metric}, not the {now.mode}")
    elif now.metric.startswith("val/loss"):
        keys = [f"objective.{key}" for key in LOSS_KEYS]
        changed = [k for k in keys if settings.get(k, after.get(k)) != after.get(k)]
        texts += [f"of another loss ({k}={settings[k]})" for k in changed[:1]]
    if before.validation != now.validation:
        texts.append("of other validation samples")
    return ", ".join(texts)


def restart_best(progress: Progress, problem: str) -> None:
    """Forget the best value so far, which has a `problem`; patience starts over, too."""
    if progress.best is not None:
        log.warning(
            "the best so far, %.5g at step %d, %s: it starts over",
            progress.best, progress.best_step, problem,
        )  # fmt: skip
    progress.best = progress.best_loss = None
    progress.best_step = progress.stale_validations = 0


def warn_trained_samples(indices: np.ndarray, trained: np.ndarray | None) -> None:
    """Log how many samples of a changed validation set were trained on; None: unknown."""
    count = "an unknown number" if trained is None else f"{np.isin(indices, trained).sum():,}"
    log.warning(
        "the validation set changed: %s of its %s samples were trained on before",
        count, f"{len(indices):,}",
    )  # fmt: skip
