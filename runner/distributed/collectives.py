"""Which collectives a step calls, and over how many bytes, as the dispatcher sees them."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.techniques.probe import OperatorObserver
from runner.training.step import forward_backward

if TYPE_CHECKING:
    from runner.training.run import Run

NAMES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
}


def count_collectives(run: Run) -> dict[str, dict[str, int]]:
    """Calls of each collective in a whole step, and the bytes that they leave in a process.

    The step is made over the first batch, by all processes, and its update is not: forward and
    backward of every micro-batch, and the sum that the step's decision rests on.
    """
    calls: Counter[str] = Counter()
    sizes: Counter[str] = Counter()

    def note(operator: Any, output: Any) -> None:
        namespace, _, name = operator.name().partition("::")
        if namespace == "c10d":
            name = NAMES.get(name, name)
            calls[name] += 1
            sizes[name] += _bytes(output)

    compiled = run.compilation is not None
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        with OperatorObserver(note):
            _step(run)
    return {"collectives": dict(calls), "collective_bytes": dict(sizes)}


def _bytes(output: Any) -> int:
    if isinstance(output, Tensor):
        return output.nbytes
    return sum(map(_bytes, output)) if isinstance(output, list | tuple) else 0


def _step(run: Run) -> None:
    parameters = [*run.model.parameters(), *run.update.parameters]
    gradients = [parameter.grad for parameter in parameters]
    spent = dict(run.watch.spent)  # this step is none of the run's
    try:
        forward_backward(run, run.train.at(run.progress.step))
    finally:
        run.update.abandon()
        run.watch.spent = spent
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
