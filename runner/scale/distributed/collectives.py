"""Counts of collectives, and the bytes of their results, in a step."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.core.techniques.probe import OperatorObserver
from runner.core.train.step import forward_backward

if TYPE_CHECKING:
    from runner.core.interfaces.run import Run

COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
}
"""Collective by name of the dispatcher's operator."""


def count_collectives(run: Run) -> dict[str, dict[str, int]]:
    """Count the calls of each collective in a step, and the bytes of their results.

    All processes make the step on the current batch, without the update: forward and backward of
    every micro-batch, and the sum for the step's decision.
    """
    calls: Counter[str] = Counter()
    sizes: Counter[str] = Counter()

    def count_call(operator: Any, output: Any) -> None:
        namespace, _, name = operator.name().partition("::")
        if namespace == "c10d":
            name = COLLECTIVES.get(name, name)
            calls[name] += 1
            sizes[name] += _output_bytes(output)

    compiled = run.compilation is not None
    parameters = [*run.model.parameters(), *run.update.parameters]
    gradients = [parameter.grad for parameter in parameters]
    phase_seconds = dict(run.stopwatch.phase_seconds)
    try:
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            with OperatorObserver(count_call):
                forward_backward(run, run.train.at(run.progress.step))
    finally:
        run.update.abandon()
        run.stopwatch.phase_seconds = phase_seconds  # this step does not count
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    return {"collectives": dict(calls), "collective_bytes": dict(sizes)}


def _output_bytes(output: Any) -> int:
    if isinstance(output, Tensor):
        return output.nbytes
    return sum(map(_output_bytes, output)) if isinstance(output, list | tuple) else 0
