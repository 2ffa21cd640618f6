"""A user's loss function as an objective."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runner.core.data.target_scale import TRANSFORM_KEY, in_model_unit
from runner.core.errors import ConfigError
from runner.core.interfaces.batch import Sizes
from runner.core.interfaces.nested import describe, named_leaves
from runner.core.interfaces.objective import Objective
from runner.core.objectives import model_output
from runner.core.schemas.models import ObjectiveConfig
from runner.core.security.registry import construct, instantiate_nested

TARGET_KEY = "objective._target_"
MISMATCH = re.compile(
    r"dtype|scalar type|[Tt]arget|size of tensor|shape|not implemented for|out of bounds|dimension"
)
"""Words in torch's errors for outputs and targets that do not fit its losses."""
LOGIT_LOSSES = ("CrossEntropyLoss", "cross_entropy", "MultiLabelSoftMarginLoss") + (
    *("BCEWithLogitsLoss", "binary_cross_entropy_with_logits", "sigmoid_focal_loss"),
)
"""Losses, by name, that apply softmax or sigmoid."""


class CustomObjective(Objective):
    """A callable (output, target) -> mean loss over the batch; `loss` is the only metric.

    It gets the model's output unchanged; with `elementwise`, a loss of torch.nn gets the output in
    fp32 or better, and targets of its dtype and shape, after `scale`. A module's buffers (class
    weights) move to the target's device; trainable parameters, never trained, are an error.
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], Tensor],
        name: str,
        key: str = TARGET_KEY,
        elementwise: bool = False,
        scale: Sizes | None = None,
    ) -> None:
        self.loss, self.elementwise, self.scale = loss, elementwise, scale
        self.name, self.loss_name, self.key = name, name, key  # for messages
        self.applies_activation = name.rpartition(".")[2] in LOGIT_LOSSES
        self.module = loss if isinstance(loss, nn.Module) else None
        if self.module is not None and any(p.requires_grad for p in self.module.parameters()):
            problem = f"{name} has parameters, but only the model's are trained"
            raise ConfigError(key, problem, "move them into the model, or freeze them")

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the loss of the callable, 0-d; ConfigError for any other result."""
        if self.module is not None:
            self.module.to(_first_tensor(target).device)
            self.module = None  # once is enough: the device of batches does not change
        if self.scale is not None:
            dtype = model_output.logits(output).dtype
            target = in_model_unit(self.scale, target).to(dtype)
        if self.elementwise:
            output, target = self._match_target(output, target)
        try:
            loss = self.loss(output, target)
        except (RuntimeError, ValueError, IndexError) as error:
            if self.name.startswith("torch.nn.") and MISMATCH.search(str(error)):
                raise self._mismatch_error(output, target, str(error).partition("\n")[0]) from error
            raise
        if not isinstance(loss, Tensor) or loss.ndim:
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            fix = "return the mean loss over the batch, a tensor without dimensions"
            raise ConfigError(self.key, f"{self.name} returned {shape}", fix)
        return loss

    def _match_target(self, output: Any, target: Any) -> tuple[Tensor, Tensor]:
        """Return the logits, and the target in their shape and dtype."""
        predicted = model_output.logits(output)
        if not isinstance(target, Tensor) or target.numel() != predicted.numel():
            raise self._mismatch_error(predicted, target, "it compares element by element")
        return predicted, target.to(predicted.dtype).reshape(predicted.shape)

    def _mismatch_error(self, output: Any, target: Any, reason: str) -> ConfigError:
        inputs = f"model outputs {describe(output)} with targets {describe(target)}"
        fix = "return what it expects from model and data set, or use objective=auto"
        return ConfigError(self.key, f"{self.name} cannot compare {inputs}: {reason}", fix)

    def weight(self, target: Any) -> int:
        """Return the number of samples."""
        return _first_tensor(target).shape[0]

    def batch_sums(self, output: Any, target: Any) -> dict[str, Tensor]:
        """Return the loss summed over samples, and their number."""
        loss, count = self(output, target), self.weight(target)
        counts = torch.full((), count, dtype=torch.int64, device=loss.device)
        return {"loss": model_output.sum_float64(loss.detach() * count), "count": counts}

    def metric_names(self) -> list[str]:
        """Return the names of `metrics`."""
        return ["loss"]

    def metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """Return `loss`, the mean over all samples."""
        count = model_output.require_count(totals)
        return {"loss": totals["loss"].item() / count}


def constructor_sizes(sizes: Sizes) -> dict[str, Any]:
    """Return the known sizes and the names of the classes, by parameter name."""
    known: dict[str, Any] = sizes.for_constructor()
    if sizes.task == "classification" and sizes.classes:
        known["class_names"] = sizes.class_names or tuple(map(str, range(sizes.classes)))
    return known


def build_custom(
    config: ObjectiveConfig,
    target: str,
    sizes: Sizes,
    resolve: Callable[[str, str], Any],
    elementwise: bool,
) -> Objective:
    """Construct the loss `target` as an objective; ConfigError if it cannot be called as one."""
    loss = resolve(target, TARGET_KEY)
    arguments = instantiate_nested(config.arguments, resolve, "objective")
    if isinstance(loss, type):
        loss, arguments = construct(loss, arguments, constructor_sizes(sizes), "objective"), {}
    is_scaled = sizes.task == "regression" and sizes != sizes.unscaled()
    if isinstance(loss, Objective):
        if is_scaled:
            problem = f"{target} is an Objective, which gets targets in their own unit"
            raise ConfigError(TRANSFORM_KEY, problem, "leave it out")
        return loss
    if not callable(loss):
        fix = "define __call__(output, target)"
        raise ConfigError(TARGET_KEY, f"{target} is not callable", fix)
    function = loss.forward if isinstance(loss, nn.Module) else loss
    keywords = "".join(f", {name}=…" for name in arguments)
    problem = f"{target} cannot be called as loss(output, target{keywords})"
    fix = "it takes these two and the keys added with +objective."
    check_call(function, problem, TARGET_KEY, fix, **arguments)
    loss = partial(loss, **arguments) if arguments else loss
    scale = sizes if is_scaled else None
    return CustomObjective(loss, target, elementwise=elementwise, scale=scale)


def check_call(
    function: Callable[..., Any], problem: str, key: str, fix: str, **arguments: Any
) -> None:
    """Raise ConfigError unless the function takes an output, a target and the arguments."""
    try:
        inspect.signature(function).bind(None, None, **arguments)
    except ValueError:  # written in C without a signature: checked at the first call
        return
    except TypeError as error:
        raise ConfigError(key, f"{problem}: {error}", fix) from error


def _first_tensor(target: Any) -> Tensor:
    """Return the first tensor in a nest; its first dimension is the samples."""
    for _, tensor in named_leaves(target):
        return tensor
    raise ConfigError("data", f"the target is a {type(target).__name__} without a tensor in it")
