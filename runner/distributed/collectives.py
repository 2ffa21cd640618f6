"""Which collectives a step calls, as the dispatcher sees them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

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


def count_collectives(run: Run) -> dict[str, Any]:
    """Calls of each collective in a whole step, and the bytes of weights that it gathers.

    The step is made over the first batch, by all processes, and its update is not: forward and
    backward of every micro-batch, and the sum that the step's decision rests on.
    """
    calls: Counter[str] = Counter()
    gathered = 0

    def note(operator: Any, output: Any) -> None:
        nonlocal gathered
        namespace, _, name = operator.name().partition("::")
        if namespace == "c10d":
            calls[NAMES.get(name, name)] += 1
        if namespace == "c10d" and name == "_allgather_base_":
            gathered += output[0].nbytes

    with torch.compiler.set_stance("force_eager"), OperatorObserver(note):
        _step(run)
    return {"collectives": dict(calls), **({"gathered_bytes": gathered} if gathered else {})}


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
