"""Configs and runs to compare: the candidate, and the plain runs it is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

from runner.core.build.build import Components, build
from runner.core.config.run_config import RunConfig
from runner.core.interfaces.run import Run
from runner.measure.parity.dropout import zero_dropout


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
