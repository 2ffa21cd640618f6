"""One of several classes per sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runner.errors import ConfigError
from runner.objectives import model_output
from runner.objectives.base import Objective
from runner.objectives.cross_entropy import CrossEntropy

NAMED = 20  # classes up to which each one's accuracy is a metric, so that a summary stays readable
MATRIX = 200  # classes up to which all pairs are counted


class Classification(Objective):
    """Cross-entropy, accuracy, top-k accuracy, accuracy per class, and the confusion matrix.

    Output: logits [batch, classes, …]; target: class indices [batch, …].
    """

    monitor = "val/accuracy"
    higher_is_better = True

    def __init__(
        self,
        classes: int,
        class_names: tuple[str, ...] = (),
        label_smoothing: float = 0.0,
        top_k: int = 5,
        ignore_index: int | None = -100,
    ) -> None:
        self.classes = classes
        known = len(class_names) == classes
        self.class_names = class_names if known else tuple(map(str, range(classes)))
        self.top_k = top_k if 1 < top_k < classes else None  # else it says 1, or accuracy again
        self.loss = CrossEntropy(ignore_index, label_smoothing)
        self.indices, self.ignored = classes, ignore_index

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Mean cross-entropy, 0-d."""
        logits = self._logits(output)
        return self.loss.mean(logits, target)

    def weight(self, target: Tensor) -> Tensor | int:
        """How many targets count."""
        return self.loss.weight(target)

    def tally(self, output: Any, target: Any) -> dict[str, Tensor]:
        """Sums of the loss and of what was right, and the confusion matrix's counts."""
        logits = self._logits(output)
        logits, target = logits.movedim(1, -1).flatten(0, -2), target.flatten()
        counts = self.loss.counts(target)
        predicted = logits.argmax(1)
        sums = {
            "loss": model_output.total(self.loss.each(logits, target)),
            "count": counts.sum(),
            "correct": ((predicted == target) & counts).sum(),
        }
        if self.top_k is not None:
            best = logits.topk(self.top_k, dim=1).indices
            sums["top_k_correct"] = ((best == target.unsqueeze(1)).any(1) & counts).sum()
        if self.classes <= MATRIX:
            # the same as bincount, which would make the host wait for its size
            pair = torch.where(counts, target, 0).long() * self.classes + predicted
            matrix = torch.zeros(self.classes**2, dtype=torch.int64, device=logits.device)
            matrix = matrix.index_add_(0, pair, counts.long())
            sums["confusion"] = matrix.view(self.classes, self.classes)
        return sums

    def metric_names(self) -> list[str]:
        """Those of `metrics`; each class's accuracy last."""
        top = [] if self.top_k is None else [f"top{self.top_k}"]
        named = self.class_names if self.classes <= NAMED else ()
        return ["loss", "accuracy", *top, *(f"accuracy/{name}" for name in named)]

    def metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """`loss`, `accuracy`, `top<k>`, and `accuracy/<class>` of each class that occurred."""
        count = model_output.require_count(totals)
        values = {"loss": totals["loss"].item() / count, "accuracy": int(totals["correct"]) / count}
        if self.top_k is not None:
            values[f"top{self.top_k}"] = int(totals["top_k_correct"]) / count
        if self.classes <= NAMED:
            for i, row in enumerate(totals["confusion"].tolist()):
                if sum(row):
                    values[f"accuracy/{self.class_names[i]}"] = row[i] / sum(row)
        return values

    def confusion(self, totals: dict[str, Tensor]) -> Tensor | None:
        """Counts [true class, predicted class], on the host; None above 200 classes."""
        matrix = totals.get("confusion")
        return None if matrix is None else matrix.cpu()

    def _logits(self, output: Any) -> Tensor:
        logits = model_output.logits(output)
        if logits.ndim > 1 and logits.shape[1] != self.classes:
            problem = (
                f"returns {logits.shape[1]} outputs a sample, and the data has {self.classes} "
            )
            fix = "name `classes` in its constructor and size the last layer by it"
            raise ConfigError("model", f"{problem}classes", fix)
        return logits
