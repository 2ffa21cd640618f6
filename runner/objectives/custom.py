"""A loss of the user's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from runner.data.nested import named_leaves
from runner.errors import ConfigError
from runner.objectives import model_output
from runner.objectives.base import Objective

MISMATCH = re.compile(
    r"dtype|scalar type|[Tt]arget|size of tensor|shape|not implemented for|out of bounds|dimension"
)
"""In what torch says of outputs and targets that do not fit its losses."""


class Custom(Objective):
    """Any callable (output, target) -> mean loss over the batch; `loss` is its only metric.

    It gets the model's output as it is; one of torch's that compares number by number (`pairwise`)
    gets the output in fp32 or better, and targets of its dtype and shape. A module's buffers (class
    weights) follow the output to its device; parameters would not be trained, so there must be
    none.
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], Tensor],
        name: str,
        key: str = "objective._target_",
        pairwise: bool = False,
    ) -> None:
        self.loss, self.pairwise = loss, pairwise
        self.name, self.key = name, key  # for messages
        self.module = loss if isinstance(loss, nn.Module) else None
        if self.module is not None and any(p.requires_grad for p in self.module.parameters()):
            problem = f"{name} has parameters, and only the model's are trained"
            raise ConfigError(key, problem, "move them into the model, or freeze them")

    def __call__(self, output: Any, target: Any) -> Tensor:
        """The loss that the callable returns, 0-d."""
        if self.module is not None:
            self.module.to(_first(target).device)
            self.module = None  # once is enough: what a batch is on does not change
        if self.pairwise:
            output, target = self._alike(output, target)
        try:
            loss = self.loss(output, target)
        except (RuntimeError, ValueError, IndexError) as error:
            if self.name.startswith("torch.nn.") and MISMATCH.search(str(error)):
                raise self._misfit(output, target, str(error).partition("\n")[0]) from error
            raise
        if not isinstance(loss, Tensor) or loss.ndim:
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            fix = "return the mean loss over the batch, a tensor without dimensions"
            raise ConfigError(self.key, f"{self.name} returned {shape}", fix)
        return loss

    def _alike(self, output: Any, target: Any) -> tuple[Tensor, Tensor]:
        """Both of one shape, [n, 1] for [n] or the reverse, and of the output's dtype."""
        predicted = model_output.logits(output)
        if not isinstance(target, Tensor) or target.numel() != predicted.numel():
            raise self._misfit(predicted, target, "it compares number by number")
        return predicted, target.to(predicted.dtype).reshape(predicted.shape)

    def _misfit(self, output: Any, target: Any, reason: str) -> ConfigError:
        given = f"model outputs {_form(output)} with targets {_form(target)}"
        fix = "return what it takes from the model and the data set, or use objective=auto"
        return ConfigError(self.key, f"{self.name} cannot compare {given}: {reason}", fix)

    def weight(self, target: Any) -> int:
        """How many samples there are."""
        return _first(target).shape[0]

    def tally(self, output: Any, target: Any) -> dict[str, Tensor]:
        """The loss, summed over samples."""
        loss, count = self(output, target), self.weight(target)
        counts = torch.full((), count, device=loss.device)
        return {"loss": model_output.total(loss.detach() * count), "count": counts}

    def metric_names(self) -> list[str]:
        """Those of `metrics`."""
        return ["loss"]

    def metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """`loss`, the mean over all samples."""
        count = model_output.require_count(totals)
        return {"loss": totals["loss"].item() / count}


def _first(target: Any) -> Tensor:
    """The first tensor in it; its first dimension is the samples."""
    for _, tensor in named_leaves(target):
        return tensor
    raise ConfigError("data", f"the target is a {type(target).__name__} without a tensor in it")


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__
