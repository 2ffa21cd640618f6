"""objective=model: the loss that the model itself returns."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

import torch
from torch import Tensor, nn

from runner.core.errors import ConfigError
from runner.core.interfaces.batch import LABEL_KEYS, Batch
from runner.core.interfaces.nested import describe, find_logits, named_leaves
from runner.core.interfaces.objective import Objective
from runner.core.objectives import model_output
from runner.core.objectives.language_modelling import MAX_EXPONENT

PART = "part "  # prefix of the parts of a loss among the sums


def find_loss(output: Any) -> dict[str, Tensor] | None:
    """Return the loss in a model's output as {"loss": …}, or the parts whose sum it is, by name.

    It is the output itself if that is a single number, its `loss` (attribute or key), the first
    single number of a tuple, or the sum of a dict of single numbers. None if there is none.
    """
    if isinstance(output, Tensor):
        return {"loss": output} if _is_number(output) else None
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, Tensor) and _is_number(loss):
        return {"loss": loss}
    if isinstance(output, dict):
        return dict(output) if output and all(map(_is_number, output.values())) else None
    items = output if isinstance(output, tuple | list) else ()
    return next(({"loss": item} for item in items if _is_number(item)), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


class ModelLossObjective(Objective):
    """The loss in the model's output, weighted by samples or tokens; also perplexity and accuracy.

    `shifts` says that the model compares its logits with the target of the next position.
    """

    monitor = "val/loss"
    higher_is_better = False
    from_model = True

    def __init__(self, task: str, ignore_index: int | None = -100, shifts: bool = False) -> None:
        self.predicts_tokens, self.shifts = task == "language_modelling", shifts
        self.unit = "tokens" if self.predicts_tokens else "samples"
        self.ignored = ignore_index

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the loss in the output, 0-d; ConfigError if there is none."""
        parts = find_loss(output)
        if parts is None:
            problem = f"the model returns {describe(output)}, without a loss"
            fix = "return `loss`, a tuple with a number, or a dict of numbers; or use another"
            raise ConfigError("objective", problem, fix)
        return _total(parts)

    def used_tensors(self, output: Any) -> list[Any]:
        """Return the tensors whose sum is the loss."""
        return list((find_loss(output) or {}).values())

    def weight(self, target: Any) -> Tensor | int:
        """Return the number of samples, or of tokens that are not ignored."""
        first = next(leaf for _, leaf in named_leaves(target))
        if not self.predicts_tokens or first.ndim < 2:
            return int(first.shape[0])
        compared = self._compared_target(first)
        return compared.numel() if self.ignored is None else (compared != self.ignored).sum()

    def batch_sums(self, output: Any, target: Any) -> dict[str, Tensor]:
        """Return weighted sums of the loss and its parts; of tokens, the correct ones."""
        weight, parts = self.weight(target), find_loss(output)
        first = next(leaf for _, leaf in named_leaves(target))
        sums: dict[str, Any] = {"count": first.new_zeros((), dtype=torch.int64) + weight}
        if parts is None:
            if self.named:
                return sums
            problem = f"the model returns {describe(output)} in evaluation mode, without a loss"
            fix = "type objective.metrics=[…] and one of them as training.monitor=val/…"
            raise ConfigError("objective", problem, fix)
        losses = {"loss": _total(parts), **{PART + n: x for n, x in parts.items() if n != "loss"}}
        for name, loss in losses.items():
            # a batch with all tokens ignored has the mean 0/0 and the weight 0
            total = torch.where(sums["count"] > 0, loss.detach().double() * weight, 0.0)
            sums[name] = model_output.sum_float64(total)
        logits = find_logits(output)
        if self.predicts_tokens and isinstance(logits, Tensor) and isinstance(target, Tensor):
            logits = logits[:, :-1] if self.shifts and logits.ndim == 3 else logits
            compared = self._compared_target(target)
            if logits.shape[:-1] == compared.shape:
                right = logits.argmax(-1) == compared
                sums["correct"] = (right & (compared != self.ignored)).sum()
        return sums

    def metrics(self, totals: dict[str, Any]) -> dict[str, float]:
        """Return `loss`, `loss/<part>`, and of tokens `perplexity` and `accuracy`."""
        count, values = model_output.require_count(totals), dict[str, float]()
        for name, total in totals.items():
            if name == "loss" or name.startswith(PART):
                values[name.replace(PART, "loss/", 1)] = total.item() / count
        if self.predicts_tokens and "loss" in values:
            values["bits_per_token"] = values["loss"] / log(2)
            values["perplexity"] = exp(min(values["loss"], MAX_EXPONENT))
        if "correct" in totals:
            values["accuracy"] = int(totals["correct"]) / count
        return values

    def rises(self, metric: str) -> bool | None:
        """Whether a higher value of `metric` is better: not of a loss's part."""
        return False if metric.startswith("val/loss/") else super().rises(metric)

    def _compared_target(self, target: Tensor) -> Tensor:
        return target[:, 1:] if self.shifts and target.ndim > 1 else target


def _total(parts: dict[str, Tensor]) -> Tensor:
    """Return the sum of the parts, 0-d, in fp32 or better."""
    first, *others = (model_output.float_logits(part).reshape(()) for part in parts.values())
    return sum(others, start=first)


@dataclass(frozen=True)
class TargetInput:
    """Adds the target of a batch to the model's inputs, which then are a dict."""

    name: str  # of the parameter of forward
    parameters: Sequence[str]  # of forward, in order

    @classmethod
    def of(cls, model: nn.Module, key: str | None) -> TargetInput | None:
        """Return it for a forward that names the target, by `key` or LABEL_KEYS; else None."""
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        parameters = inspect.signature(model.forward).parameters.values()
        names = [parameter.name for parameter in parameters if parameter.kind in kinds]
        keys = [key, *LABEL_KEYS] if key else LABEL_KEYS
        name = next((candidate for candidate in keys if candidate in names), None)
        return None if name is None else cls(name, names)

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with its target in the inputs, unless they have it."""
        inputs, target = batch
        if not isinstance(inputs, dict):
            values = inputs if isinstance(inputs, tuple | list) else (inputs,)
            inputs = dict(zip(self.parameters, values, strict=False))
        return {self.name: target, **inputs}, target


def shifts_labels(model: Any) -> bool:
    """Whether a transformers model compares its logits with the labels of the next position."""
    is_decoder = not getattr(getattr(model, "config", None), "is_encoder_decoder", True)
    return is_decoder and getattr(model, "loss_type", "") in (None, "ForCausalLM")
