"""The first call of model and loss in training: faults of their interface that raise no error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from runner.core.errors import ConfigError, RunnerError
from runner.core.format import join_names
from runner.core.interfaces.batch import Batch, call_model, slice_rows
from runner.core.interfaces.nested import find_logits, named_leaves, tensors
from runner.core.interfaces.run import Run
from runner.core.preserved_state import large_parameters, preserve_state

log = logging.getLogger("runner")

SAMPLES = 8  # of the batch that is called before a compiled step
ACTIVATIONS = {"SoftmaxBackward0": "softmax", "SigmoidBackward0": "sigmoid"}
SHAPE_OPERATIONS = ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Permute") + (
    *("Transpose", "T", "ToCopy", "Clone", "Alias", "Slice", "Select", "Clamp"),
)
"""Backward nodes, without `Backward0`, that keep what an activation has computed."""
ELEMENTWISE_LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div") + (
    *("poisson_nll_loss", "binary_cross_entropy", "soft_margin_loss"),
)
"""Functions of torch that broadcast output and target before their mean."""


def inspect_first_call(run: Run, batch: Batch, output: Any) -> Tensor:
    """Return the loss of the first forward, and record faults; ConfigError if a loss broadcasts."""
    run.uninspected = False
    for code, message in find_faults(run, batch, output):
        run.history.add(code, message, step=run.progress.step + 1, category="model")
    objective, target = run.objective, batch[1]
    if objective.loss_name is None and type(objective).__module__.startswith("runner."):
        return objective(output, target)
    name = objective.loss_name or type(objective).__qualname__
    with BroadcastCheck(name, output, target):
        return objective(output, target)


def inspect_before_graph(run: Run, batch: Batch) -> None:
    """Call model and loss eagerly for some samples, as a graph shows nothing; restore all state."""
    part: Batch = slice_rows(batch, slice(0, SAMPLES))
    roots, safe = (run.model, run.objective), large_parameters(run.model)
    logged: list[object] = []  # calls of the objective's `log`
    try:
        with ExitStack() as stack:
            stack.enter_context(preserve_state(*roots, device=run.device.torch, safe=safe))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for context in run.contexts:
                stack.enter_context(context())
            run.objective.write_log = lambda *row: logged.append(row)  # restored with its state
            inspect_first_call(run, part, call_model(run.model, part[0]))
    except RunnerError:
        raise
    except Exception as error:
        log.debug("the first call was not inspected: %s", error)
    run.uninspected = False
    if logged and run.step_graph is not None:
        from runner.core.techniques.compiler import replace_whole_step

        replace_whole_step(run, "the objective logs numbers in its call")


def find_faults(run: Run, batch: Batch, output: Any) -> Iterator[tuple[str, str]]:
    """Yield code and message of each fault that the output of a training forward shows."""
    objective, target = run.objective, batch[1]
    if objective.applies_activation and (name := last_activation(find_logits(output))):
        effect = "it learns slowly, and its probabilities are wrong"
        problem = f"the model ends in {name}, and its loss applies its own: {effect}"
        yield "double_activation", f"{problem}; return the values before it"
    if objective.loss_name is None and (names := unused_losses(output, objective)):
        problem = f"the model's output has {join_names(names)}, which is not trained"
        fix = "add it to the loss, in the model (objective=model) or in a loss of your own"
        yield "unused_loss", f"{problem}; {fix}"
    ids = next((x for name, x in named_leaves(batch[0]) if name in ("", "0", "input_ids")), None)
    predicts_tokens = objective.unit == "tokens" and not objective.from_model
    if predicts_tokens and isinstance(target, Tensor) and ids is not None:
        if ids.shape == target.shape and bool((ids == target).all()):  # host sync, once
            problem = "the target is the input itself, so the model learns to copy"
            fix = "return the tokens that follow; objective=model if the model shifts its labels"
            yield "copied_target", f"{problem}; {fix}"


def last_activation(output: Any) -> str:
    """Return softmax or sigmoid if the output is its result, but for its shape; else ""."""
    node = output.grad_fn if isinstance(output, Tensor) else None
    while node is not None:
        name = node.name()
        if name in ACTIVATIONS:
            return ACTIVATIONS[name]
        if name.partition("Backward")[0] not in SHAPE_OPERATIONS or not node.next_functions:
            return ""
        node = node.next_functions[0][0]
    return ""


def unused_losses(output: Any, objective: Any) -> list[str]:
    """Return the names of single trainable numbers in the output that the loss does not contain."""
    used = objective.used_tensors(output)
    is_nest = isinstance(output, dict | tuple | list | Tensor)
    fields = output if is_nest else getattr(output, "__dict__", {})
    return [
        f"`{name}`" if not name.isdecimal() else f"a single number at index {name}"
        for name, leaf in named_leaves(fields)
        if leaf.requires_grad and leaf.numel() == 1 and leaf.ndim < 2
        if not any(leaf is tensor for tensor in used)
    ]


class BroadcastCheck(TorchFunctionMode):
    """Raises ConfigError where output and target, of as many values, become all their pairs.

    It follows both through operations that keep their shape.
    """

    def __init__(self, loss_name: str, output: Any, target: Any) -> None:
        self.loss_name = loss_name
        sides = (("output", output), ("target", target))
        tensors_by_side = {side: tensors(value) for side, value in sides}
        if (logits := find_logits(output)) is not None and isinstance(logits, Tensor):
            tensors_by_side["output"].append(logits)
        # the tensors are kept, so that ids stay unique
        self.sides = {id(t): (side, t) for side in tensors_by_side for t in tensors_by_side[side]}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = tensors([*args, *kwargs.values()])
        known = [self.sides[id(t)] for t in operands if id(t) in self.sides]
        name = getattr(function, "__name__", "")
        outputs = [tensor for side, tensor in known if side == "output"]
        targets = [tensor for side, tensor in known if side == "target"]
        result = function(*args, **kwargs)
        if not isinstance(result, Tensor) or name == "einsum":  # states its pairs
            return result
        for output, target in product(outputs, targets):
            pairs = _all_pairs(output, target)
            if pairs is not None and (result.shape == pairs or name in ELEMENTWISE_LOSSES):
                raise self._error(output, target, pairs)
        same_shape = [side for side, tensor in known if tensor.shape == result.shape]
        if same_shape and not (outputs and targets):
            self.sides[id(result)] = same_shape[0], result
        return result

    def _error(self, output: Tensor, target: Tensor, pairs: torch.Size) -> ConfigError:
        shapes = f"the output {list(output.shape)} with the target {list(target.shape)}"
        problem = f"{self.loss_name} compares {shapes} as {list(pairs)}, all pairs{_user_line()}"
        wider, other = ("output", "target") if output.ndim > target.ndim else ("target", "output")
        shape = (output if wider == "output" else target).shape
        is_column = len(shape) == 2 and shape[1] == 1
        fix = f"use {wider}.{'squeeze(1)' if is_column else f'reshape({other}.shape)'}"
        return ConfigError("objective._target_", problem, fix)


def _all_pairs(output: Tensor, target: Tensor) -> torch.Size | None:
    """Return the shape to which tensors of as many values broadcast, if it has more of them."""
    if output.ndim == target.ndim or not output.numel() == target.numel() > 1:
        return None
    with suppress(RuntimeError):  # they do not broadcast
        shapes = output.shape, target.shape
        pairs: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        return pairs if pairs.numel() > output.numel() else None
    return None


def _user_line() -> str:
    """Return the innermost line outside of torch and this module, as text."""
    folder = str(Path(torch.__file__).parent)
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = frame.f_code.co_filename
        if path != __file__ and not path.startswith((folder, "<")):
            return f" ({Path(path).name}, line {frame.f_lineno})"
        frame = frame.f_back
    return ""
