"""Cross-entropy over a large vocabulary without the whole logits."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from runner.data.batch import count
from runner.errors import ConfigError
from runner.techniques.base import Evidence, RunBuilder, Technique
from runner.training.run import Run

if TYPE_CHECKING:
    from torch import nn

SAMPLES = 2  # that the model's output is looked at with


@dataclass
class ChunkedLoss(Technique):
    """Logits of some tokens at a time, gone before the next ones are made.

    For language models whose vocabulary is large: their logits can take more memory than all the
    rest. The same products as without it, and less to read and write: eager it is faster too.
    Where the whole step is one graph, the compiler fuses whole logits well, and this saves half
    the memory for a step that is up to twice as long (measured on a CPU, 32,000 words). In
    training only; what the model puts out in eval mode is what it always was.
    """

    chunk: int | None = None  # tokens at a time; null: 256 on a CPU, 2,048 elsewhere
    min_mb: int = 64  # logits of a micro-batch that take less (in fp32) stay whole

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise ConfigError(
                "optimization.chunked_loss.chunk", f"{self.chunk} is no count", "use 1 or more"
            )
        if self.min_mb < 0:
            raise ConfigError("optimization.chunked_loss.min_mb", "is negative", "use 0 or more")

    def apply(self, draft: RunBuilder) -> str | None:
        """Find the layer that the logits come from, and have it put them off."""
        import torch

        from runner.objectives import deferred_logits as deferred
        from runner.techniques import trial

        if not draft.objective.takes_deferred:
            return f"{type(draft.objective).__name__} takes whole logits only"
        samples = min(draft.micro_batch, SAMPLES)
        inputs, target = trial.batch(draft, samples)
        with trial.untouched(draft), torch.no_grad():
            draft.model.eval()
            layer, shape = _last_layer(draft, inputs)
            if layer is None:
                return "its logits do not come as they are out of a linear layer"
            tokens = shape.numel() // shape[-1] * draft.micro_batch // count(target)
            size = tokens * shape[-1] * 4 / 2**20
            if size < self.min_mb:
                return f"the logits take {size:,.1f} MB (min_mb={self.min_mb}), little to save"
            chunk = self.chunk or self._chosen(draft)
            if tokens <= chunk:
                return f"{tokens} tokens are one chunk (chunk={chunk})"
            deferred.defer(layer, chunk)
            layer.training = True  # it alone, so that this forward is like the one before
            try:
                output = deferred.find_logits(trial.forward(draft, inputs))
                why = "another tensor comes out"
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
                output, why = None, f"{type(error).__name__}: {error}"
        if not isinstance(output, deferred.DeferredLogits):
            return f"the model does more with its logits, for which it needs them whole: {why}"
        deferred.defer(layer, chunk)
        draft.scope.callback(deferred.undo, layer)
        return None

    def _chosen(self, draft: RunBuilder) -> int:
        # measured with 32,000 words of width 256: what stays in a CPU's caches beats longer
        # products, and a GPU wants long ones, for each chunk adds up a gradient of the weight
        small = draft.device.kind == "cpu"
        reason = "fits a CPU's caches" if small else "long enough to keep a GPU busy"
        key = "optimization.chunked_loss.chunk"
        return int(draft.choose(key, lambda: (256 if small else 2048, reason)))

    def engaged(self, run: Run) -> Evidence:
        """The largest slice of the logits that a step made, and what all of them would take."""
        from runner.objectives.deferred_logits import DeferredLogits
        from runner.techniques import operators

        seen: list[DeferredLogits] = []

        def look(output: Any) -> None:
            if isinstance(output, DeferredLogits):
                seen.append(output)

        layers = [m for m in run.model.modules() if "forward" in vars(m)]
        largest = operators.largest_tensors(run, look, layers)
        if not seen:
            return Evidence(False, "no layer put off its logits")
        *rows, vocab = seen[0].shape
        tokens = prod(rows)
        held, whole = largest.get(vocab, 0), tokens * vocab
        facts = {
            "tokens": tokens,
            "vocab": vocab,
            "chunks": -(-tokens // seen[0].chunk),
            "largest_mb": round(held * 4 / 2**20, 1),
            "whole_mb": round(whole * 4 / 2**20, 1),
        }
        took = held < whole
        return Evidence(took, "" if took else "logits of all tokens were made", facts)


def _last_layer(draft: RunBuilder, inputs: Any) -> tuple[nn.Module | None, Any]:
    """The layer whose output is the model's logits, and their shape."""
    import torch

    from runner.objectives import deferred_logits as deferred
    from runner.techniques import trial

    kinds = (torch.nn.Linear, deferred.OutputLayer)
    layers = [m for m in draft.model.modules() if type(m) in kinds]
    came: list[tuple[nn.Module, Any]] = []
    handles = [
        layer.register_forward_hook(lambda module, _, output: came.append((module, output)))
        for layer in layers
    ]
    try:
        logits = deferred.find_logits(trial.forward(draft, inputs))
    finally:
        for handle in handles:
            handle.remove()
    last = next((module for module, output in came if output is logits), None)
    if sum(module is last for module, _ in came) > 1:
        last = None  # it is used elsewhere too
    return last, getattr(logits, "shape", None)
