"""Cross-entropy over a large vocabulary, computed in chunks of the logits; in training only.

The products are the same with less memory traffic, so it is also faster in eager mode. If the
whole step is one graph, the compiler fuses whole logits well: chunks then save half the memory but
take up to twice the time (measured on a CPU, 32,000 words).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.core.errors import error_text
from runner.core.interfaces.batch import batch_size_of
from runner.core.interfaces.nested import DeferredLogits, find_logits
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, RunBuilder
from runner.core.objectives.chunked_cross_entropy import OutputLayer, defer_logits, restore_forward
from runner.core.schemas.optimization import ChunkedLoss
from runner.core.techniques import model_calls, probe

SAMPLES = 2  # in the forwards that find the output layer
CHUNK_OF_DEVICE = {"cpu": 256}  # fits in a CPU's caches, measured with 32,000 words of width 256
# faster than longer ones; GPUs need long ones, as each chunk accumulates a gradient
DEFAULT_CHUNK = 2048


def apply(config: ChunkedLoss, builder: RunBuilder) -> str | None:
    """Find the layer that computes the logits, and make it return DeferredLogits."""
    if not builder.objective.takes_deferred:
        return f"{type(builder.objective).__name__} needs full logits"
    inputs, target = model_calls.sample_batch(builder, min(builder.micro_batch, SAMPLES))
    with model_calls.preserve_builder_state(builder), torch.no_grad():
        builder.model.eval()
        layer, shape = _find_output_layer(builder, inputs)
        if layer is None:
            return "its logits are not the output of a linear layer"
        tokens = shape.numel() // shape[-1] * builder.micro_batch // batch_size_of(target)
        size = tokens * shape[-1] * 4 / 2**20
        chunk = config.chunk or CHUNK_OF_DEVICE.get(builder.device.kind, DEFAULT_CHUNK)
        if size < config.min_mb:
            return f"the logits take {size:,.1f} MB (min_mb={config.min_mb}), little to save"
        if tokens <= chunk:
            return f"{tokens} tokens fit in one chunk (chunk={chunk})"
        defer_logits(layer, chunk)
        layer.training = True  # only this layer, so that the forward is otherwise unchanged
        try:
            output = find_logits(model_calls.forward(builder, inputs))
            problem = "the output is another tensor"
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            output, problem = None, error_text(error)
    if not isinstance(output, DeferredLogits):
        return f"the model needs its full logits after the last layer: {problem}"
    defer_logits(layer, chunk)
    builder.scope.callback(restore_forward, layer)
    return None


def _find_output_layer(builder: RunBuilder, inputs: Any) -> tuple[nn.Module | None, Any]:
    """Return the layer that outputs the model's logits, if it runs once, and their shape."""
    outputs: list[tuple[nn.Module, Any]] = []
    layers = [m for m in builder.model.modules() if type(m) in (nn.Linear, OutputLayer)]
    with probe.forward_hooks(layers, after=lambda layer, _, out: outputs.append((layer, out))):
        logits = find_logits(model_calls.forward(builder, inputs))
    last = next((layer for layer, output in outputs if output is logits), None)
    once = sum(layer is last for layer, _ in outputs) == 1
    return (last if once else None), getattr(logits, "shape", None)


def engaged(config: ChunkedLoss, run: Run) -> Evidence:
    """Return the size of the largest chunk of logits in a step, and of all logits."""
    deferred: list[DeferredLogits] = []
    elements: dict[int, int] = {}  # of the largest tensor, by size of the last dimension

    def record_deferred(layer: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, DeferredLogits):
            deferred.append(output)

    def record_size(operator: Any, output: Any) -> None:
        for tensor in () if operator.is_view else tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.ndim:
                width = tensor.shape[-1]
                elements[width] = max(elements.get(width, 0), tensor.numel())

    layers = [m for m in run.model.modules() if "forward" in vars(m)]
    with probe.forward_hooks(layers, after=record_deferred), probe.OperatorObserver(record_size):
        probe.dry_run_step(run)
    if not deferred:
        return Evidence(False, "no layer deferred its logits")
    *rows, vocab = deferred[0].shape
    tokens = prod(rows)
    largest, total = elements.get(vocab, 0), tokens * vocab
    facts = {
        "tokens": tokens,
        "vocab": vocab,
        "chunks": -(-tokens // deferred[0].chunk),
        "largest_mb": round(largest * 4 / 2**20, 1),
        "whole_mb": round(total * 4 / 2**20, 1),
    }
    is_chunked = largest < total
    return Evidence(is_chunked, "" if is_chunked else "the full logits were computed", facts)
