"""Configs and runs to compare: the candidate, and the plain runs it is compared with."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

from runner.core.build.build import Components, build
from runner.core.config.run_config import RunConfig
from runner.core.interfaces.run import Run
from runner.core.schemas.debug import DebugConfig
from runner.core.schemas.optimization import Optimization
from runner.measure.parity.dropout import zero_dropout


def without_techniques(config: RunConfig) -> RunConfig:
    """Return the config with all techniques off: `optimization=none`."""
    config = copy(config)
    config.optimization = Optimization(level="none")
    return config


def keep_techniques(config: RunConfig, names: Collection[str]) -> RunConfig:
    """Return the config with only these techniques enabled."""
    config = deepcopy(config)
    for name, technique in config.optimization.techniques():
        technique.enabled = technique.enabled and name in names
    extra = config.optimization.extra
    config.optimization.extra = [one for one in extra if one.rpartition(".")[2] in names]
    config.optimization.strict = False
    return config


def without_side_effects(config: RunConfig) -> RunConfig:
    """Return the config with progress, checkpoints and debug tools off."""
    config = deepcopy(config)
    config.monitoring.progress = config.checkpoint.enabled = False
    config.debug = DebugConfig()
    config.optimization.measure = False  # use all requested techniques, as when it was measured
    if config.checkpoint.resume == "auto":
        config.checkpoint.resume = "none"
    return config


def with_micro_batch(config: RunConfig, micro_batch: int | None) -> RunConfig:
    """Return the config with that micro-batch size; None: unchanged."""
    config = deepcopy(config)
    if micro_batch is not None:
        config.training.micro_batch = micro_batch
    return config


def copy_components(
    given: Components | None, choices: Mapping[str, Any] | None = None
) -> Components:
    """Return copies of the caller's components, since training modifies them."""
    given = given or Components()
    parts = deepcopy((given.model, given.objective, given.optimizer))  # at once: shared tensors
    model, objective, optimizer = parts
    choices = {**given.choices, **(choices or {})}
    return replace(given, model=model, objective=objective, optimizer=optimizer, choices=choices)


@contextmanager
def open_run(
    config: RunConfig, dropout_off: bool = False, given: Components | None = None
) -> Iterator[Run]:
    """Build a run; `dropout_off` disables dropout."""
    with build(config, given=given) as run, run.own_random_state():
        if dropout_off:
            zero_dropout(run.model)
        yield run


@contextmanager
def eager_random_numbers() -> Iterator[None]:
    """Let code compiled within draw the same random numbers as eager code."""
    import torch._inductor.config as inductor

    with inductor.patch(fallback_random=True):
        yield
