"""Constant predictions: their metrics, which a model has to beat."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.core.findings import notice
from runner.core.format import join_names
from runner.core.interfaces.batch import Sizes
from runner.core.interfaces.run import Run
from runner.core.record.summary import unbeaten

log = logging.getLogger("runner")

MAX_SECONDS = 0.5  # for reading the targets of a data set that does not hold them
CHUNK = 1024  # samples read at a time
OTHER_NAMES = {  # of torchmetrics
    "accuracy": "Accuracy", "mse": "MeanSquaredError", "mae": "MeanAbsoluteError", "r2": "R2Score",
}  # fmt: skip
LABEL_LOSS = "objective._target_=torch.nn.BCEWithLogitsLoss"


def record_baseline(run: Run) -> None:
    """Compute `run.baseline`, with the names in the run's metrics; warn where it is not beaten."""
    try:
        values = baseline_metrics(run)
    except Exception as error:  # must not end the run
        log.debug("no baseline: %s", error)
        return
    values |= {OTHER_NAMES[name]: x for name, x in values.items() if name in OTHER_NAMES}
    metrics = run.progress.metrics
    run.baseline = {f"val/{n}": x for n, x in values.items() if f"val/{n}" in metrics}
    names = unbeaten(run.baseline, metrics, run.monitor, run.progress.best)
    if names:
        kind = "most frequent class" if run.sizes.task == "classification" else "mean or median"
        texts = [f"{n} {metrics[n]:.4g} (baseline {run.baseline[n]:.4g})" for n in names]
        message = "the model does not beat the %s of the training targets: %s"
        log.warning(message, kind, join_names(texts))


def baseline_metrics(run: Run) -> dict[str, float]:
    """Return metrics of the validation set for constants fitted on the training split.

    The most frequent class for `accuracy`, the mean for `mse`, `rmse` and `r2`, the median for
    `mae`. {} for other tasks, and if reading the targets would take too long.
    """
    source, held_out = run.train.fetch.source, run.validation.fetch
    trained = _targets(source, source.train, run.sizes)
    validated = _targets(held_out.source, np.asarray(held_out.order.indices), run.sizes)
    if trained is None or validated is None:
        return {}
    if run.sizes.task == "classification":
        ignored = run.objective.ignored
        trained, validated = (x[(x >= 0) & (x != ignored)] for x in (trained, validated))
        majority = torch.bincount(trained.flatten()).argmax()
        return {"accuracy": float((validated == majority).double().mean())}
    trained, validated = (x.double().reshape(len(x), -1) for x in (trained, validated))
    is_said = any(LABEL_LOSS in choice.reason for choice in run.choices)
    if "val/mse" in run.progress.metrics and not is_said and bool((trained == trained.ne(0)).all()):
        run.choices.append(notice("objective", "regression", f"labels 0 and 1 need {LABEL_LOSS}"))
    squares = (validated - trained.mean(0)).square()
    mse, median = float(squares.mean()), torch.from_numpy(np.median(trained.numpy(), axis=0))
    values = {"mse": mse, "rmse": mse**0.5, "mae": float((validated - median).abs().mean())}
    deviation = (validated - validated.mean(0)).square().sum(0)
    varies = deviation > 1e-12 * validated.square().sum(0)
    if bool(varies.any()):
        values["r2"] = float((1 - squares.sum(0) / deviation)[varies].mean())
    return values


def _targets(source: Any, indices: np.ndarray, sizes: Sizes) -> Tensor | None:
    """Return the targets of these samples; None if there are none, or not in a short time."""
    if sizes.task not in ("classification", "regression"):
        return None
    if sizes.task == "classification" and (labels := source.labels()) is not None:
        return torch.from_numpy(labels[indices])
    if isinstance(target := getattr(source, "target", None), Tensor):
        return target[torch.from_numpy(indices)]
    if (source.sample_seconds or MAX_SECONDS) * len(indices) > MAX_SECONDS:
        return None
    chunks = [indices[start : start + CHUNK] for start in range(0, len(indices), CHUNK)]
    return torch.cat([source.fetch(chunk, None)[1] for chunk in chunks])
