"""Language modelling: prediction of the next token."""

from __future__ import annotations

from math import exp, log
from typing import Any

import torch
from torch import Tensor

from runner.core.errors import ConfigError
from runner.core.interfaces.nested import DeferredLogits, find_logits
from runner.core.interfaces.objective import Objective
from runner.core.objectives import model_output
from runner.core.objectives.cross_entropy import CrossEntropy

BYTE_VOCAB = 256  # a vocabulary of this size is assumed to be bytes
LOGITS_PER_SLICE = 2**24  # logits tallied at once: 128 MB with their fp32 copy and softmax
MAX_EXPONENT = 700.0  # exp overflows float64 beyond it


class LanguageModellingObjective(Objective):
    """Cross-entropy per token, bits per token or byte, perplexity and accuracy.

    Output: logits [batch, sequence, vocab or more]; target: token ids [batch, sequence].
    """

    monitor = "val/loss"
    higher_is_better = False
    unit = "tokens"
    takes_deferred = True
    applies_activation = True

    def __init__(self, vocab: int | None, ignore_index: int | None = -100) -> None:
        self.vocab = vocab
        self.bits = "bits_per_byte" if vocab == BYTE_VOCAB else "bits_per_token"
        self.loss = CrossEntropy(ignore_index)
        self.indices, self.ignored = vocab, ignore_index

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the mean cross-entropy per token, in nats, 0-d."""
        logits = find_logits(output)
        if isinstance(logits, DeferredLogits):
            self._check_shapes(logits.shape, target)
            return self.loss.mean_deferred(logits, target)
        return self.loss.mean(*self._flatten(model_output.logits(output), target))

    def weight(self, target: Tensor) -> Tensor | int:
        """Return the number of tokens that are not ignored."""
        return self.loss.weight(target)

    def batch_sums(self, output: Any, target: Any) -> dict[str, Tensor]:
        """Return sums of losses, tokens and correct predictions."""
        logits, target = self._flatten(model_output.raw_logits(output), target)
        rows = max(1, LOGITS_PER_SLICE // logits.shape[-1])
        sums: dict[str, Tensor] = {}
        for start in range(0, max(1, len(target)), rows):
            part_target = target[start : start + rows]
            part = model_output.float_logits(logits[start : start + rows])
            mask = self.loss.valid_mask(part_target)
            part_sums = {
                "loss": model_output.sum_float64(self.loss.per_target(part, part_target)),
                "count": mask.sum(),
                "correct": ((part.argmax(1) == part_target) & mask).sum(),
            }
            sums = {name: sums[name] + part_sums[name] for name in sums} or part_sums
        return sums

    def metric_names(self) -> list[str]:
        """Return the names of `metrics`."""
        return ["loss", self.bits, "perplexity", "accuracy"]

    def metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """Return `loss` (nats), `bits_per_byte` or `bits_per_token`, `perplexity`, `accuracy`."""
        count = model_output.require_count(totals)
        loss = totals["loss"].item() / count
        return {
            "loss": loss,
            self.bits: loss / log(2),
            "perplexity": exp(min(loss, MAX_EXPONENT)),
            "accuracy": int(totals["correct"]) / count,
        }

    def _flatten(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        self._check_shapes(logits.shape, target)
        # flat rows are contiguous; with classes in dimension 1 softmax would be strided
        return logits.flatten(0, -2), target.flatten()

    def _check_shapes(self, shape: torch.Size, target: Tensor) -> None:
        if shape[:-1] != target.shape:
            problem = f"returns {list(shape)} for targets of {list(target.shape)}"
            fix = "return [batch, sequence, vocab]: a row of logits for each token"
            raise ConfigError("model", problem, fix)
        if self.vocab is not None and shape[-1] < self.vocab:
            problem = f"returns {shape[-1]} logits a token for {self.vocab} ids"
            fix = "take `vocab` in its constructor to size the last layer"
            raise ConfigError("model", problem, fix)
