"""The next token of a text."""

from __future__ import annotations

from math import exp, log
from typing import Any

from torch import Tensor

from runner.errors import ConfigError
from runner.objectives import reading
from runner.objectives.cross_entropy import CrossEntropy
from runner.run import Objective

BYTES = 256  # a vocabulary of this size is taken to be bytes
LARGEST = 700.0  # exp of more is no float any longer


class LanguageModelling(Objective):
    """Cross-entropy per token, and the same in bits and as perplexity.

    Output: logits [batch, sequence, vocab or more]; target: token ids [batch, sequence].
    """

    monitor = "val/loss"
    higher_is_better = False
    unit = "tokens"

    def __init__(self, vocab: int | None, ignore_index: int | None = -100) -> None:
        self.vocab = vocab
        self.bits = "bits_per_byte" if vocab == BYTES else "bits_per_token"
        self.loss = CrossEntropy(ignore_index)

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Mean cross-entropy per token, in nats, 0-d."""
        return self.loss.mean(*self._rows(output, target))

    def weight(self, target: Tensor) -> Tensor | int:
        """How many tokens count."""
        return self.loss.weight(target)

    def tally(self, output: Any, target: Any) -> dict[str, Tensor]:
        """Sums of the loss and of the tokens that were predicted."""
        logits, target = self._rows(output, target)
        counts = self.loss.counts(target)
        return {
            "loss": reading.total(self.loss.each(logits, target)),
            "count": counts.sum(),
            "correct": ((logits.argmax(1) == target) & counts).sum(),
        }

    def metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """`loss` (nats), `bits_per_byte` or `bits_per_token`, `perplexity` and `accuracy`."""
        count = reading.counted(totals)
        loss = totals["loss"].item() / count
        return {
            "loss": loss,
            self.bits: loss / log(2),
            "perplexity": exp(min(loss, LARGEST)),
            "accuracy": int(totals["correct"]) / count,
        }

    def _rows(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = reading.logits(output)
        if logits.shape[:-1] != target.shape:
            raise ConfigError(
                "model",
                f"returns {list(logits.shape)} for targets of {list(target.shape)}",
                "return [batch, sequence, vocab]: a row of logits for each token",
            )
        if self.vocab is not None and logits.shape[-1] < self.vocab:
            raise ConfigError(
                "model",
                f"returns {logits.shape[-1]} logits a token, and the data's ids go up to "
                f"{self.vocab - 1}",
                "name `vocab` in its constructor and size the last layer by it",
            )
        # rows lie as they are; with the classes second (as torch takes it) softmax would stride
        return logits.flatten(0, -2), target.flatten()
