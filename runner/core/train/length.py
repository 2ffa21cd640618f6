"""Resolution of batch size, number of steps, and the interval of debug tools."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from runner.core.bounds import check_count
from runner.core.config.run_config import RunConfig
from runner.core.errors import ConfigError
from runner.core.findings import Choice
from runner.core.interfaces.batch import largest_slice
from runner.core.schemas.debug import DebugConfig
from runner.core.schemas.training import MICRO_BATCH

log = logging.getLogger("runner")

OBSERVATIONS, MIN_OBSERVATIONS = 6, 3  # of a debug tool in a run; its verdicts need three


def resolve_batches(config: RunConfig, samples: int) -> tuple[int, int]:
    """Return the batch size, limited to all samples, and the batches per epoch."""
    size = config.training.batch_size
    steps = samples // size if config.data.drop_last else -(-samples // size)
    if steps == 0:
        problem = f"{size} exceeds the {samples} training samples, with data.drop_last=true"
        fix = "use a smaller batch or data.drop_last=false"
        raise ConfigError("training.batch_size", problem, fix)
    if size > samples:
        message = "training.batch_size=%d exceeds the %d training samples: each batch holds all"
        log.warning(message, size, samples)
    return min(size, samples), steps


def resolve_epochs(config: RunConfig) -> float | None:
    """Return the number of epochs to train; None if the number of steps is set instead."""
    data, training = config.data, config.training
    if training.steps is not None or training.epochs is not None:
        return training.epochs if training.steps is None else None
    return None if data.default_steps is not None else data.default_epochs or 10


def resolve_steps(config: RunConfig, steps_per_epoch: int) -> tuple[int, list[Choice]]:
    """Return the number of training steps, and the choice if the config sets none."""
    data, training, epochs = config.data, config.training, resolve_epochs(config)
    steps = training.steps if training.steps is not None else data.default_steps or 0
    if epochs is not None:
        steps = round(epochs * steps_per_epoch)
    steps = max(1, steps)
    check_count("training.steps", steps)
    if training.steps is not None or training.epochs is not None:
        return steps, []
    unit = "steps" if epochs is None else "epochs"
    reason = f"no training.steps or training.epochs: data.default_{unit} of {data.kind}"
    return steps, [Choice("training.steps", steps, reason)]


def resolve_every(debug: DebugConfig, steps: int) -> tuple[DebugConfig, list[Choice]]:
    """Set `debug.every` so that `steps` have six observations; return the choice if changed.

    An `every` that is not the default was set by the user and is kept. In a run of less than twelve
    steps every second step is observed if that gives three: an observed step is not compiled.
    """
    span = min(steps, debug.max_iterations or steps)
    every = max(1, span // OBSERVATIONS, min(2, span // MIN_OBSERVATIONS))
    tools = [getattr(debug, field.name) for field in fields(debug)]
    repeated = [t for t in tools if getattr(t, "enabled", False) and hasattr(t, "every")]
    anomaly = debug.anomaly  # with `every` null it observes every step
    depends_on_every = any(tool is not anomaly or anomaly.every for tool in repeated)
    if not depends_on_every or debug.every != DebugConfig.every or every >= debug.every:
        return debug, []
    if anomaly.every == debug.every:
        anomaly = replace(anomaly, every=every)
    fewer = f"debug.every={debug.every} would give {span // debug.every}"
    reason = f"{span // every} observations in {span} steps; {fewer}"
    return replace(debug, every=every, anomaly=anomaly), [Choice("debug.every", every, reason)]


def resolve_micro_batch(requested: int | None, batch_size: int, recorded: Mapping[str, Any]) -> int:
    """Return the samples per backward: at most `requested`, and at most the resumed run's value."""
    limit = min(requested or batch_size, batch_size, int(recorded.get(MICRO_BATCH, batch_size)))
    return largest_slice(batch_size, limit)
