"""Classification: one of several classes per sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runner.core.errors import ConfigError
from runner.core.interfaces.objective import Objective
from runner.core.objectives import model_output
from runner.core.objectives.cross_entropy import CrossEntropy

MAX_NAMED_CLASSES = 20  # most classes with an accuracy each, so that a summary stays readable
MAX_MATRIX_CLASSES = 200  # most classes with a confusion matrix


class ClassificationObjective(Objective):
    """Cross-entropy, accuracies (top-k, per class), macro-F1, AUROC, and the confusion matrix.

    Output: logits [batch, classes, …]; target: class indices [batch, …]. `class_weights` apply to
    the training loss, not to metrics. `gamma` selects the focal loss.
    """

    monitor = "val/accuracy"
    higher_is_better = True
    applies_activation = True

    def __init__(
        self,
        classes: int,
        class_names: tuple[str, ...] = (),
        label_smoothing: float = 0.0,
        top_k: int = 5,
        ignore_index: int | None = -100,
        class_weights: Tensor | None = None,
        gamma: float | None = None,
    ) -> None:
        self.classes = classes
        has_names = len(class_names) == classes
        self.class_names = class_names if has_names else tuple(map(str, range(classes)))
        self.top_k = top_k if 1 < top_k < classes else None  # else it is 1, or equals the accuracy
        self.loss = CrossEntropy(ignore_index, label_smoothing, class_weights, gamma)
        self.indices, self.ignored = classes, ignore_index

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the mean loss, 0-d."""
        logits = self._logits(output)
        return self.loss.mean(logits, target)

    def weight(self, target: Tensor) -> Tensor | int:
        """Return the divisor of the mean: targets not ignored, or the sum of their weights."""
        return self.loss.weight(target)

    def batch_sums(self, output: Any, target: Any) -> dict[str, Any]:
        """Return sums of losses and correct targets, the confusion matrix, and logits."""
        logits = self._logits(output)
        logits, target = logits.movedim(1, -1).flatten(0, -2), target.flatten()
        mask = self.loss.valid_mask(target)
        predicted = logits.argmax(1)
        sums: dict[str, Any] = {
            "loss": model_output.sum_float64(self.loss.per_target(logits, target)),
            "count": mask.sum(),
            "correct": ((predicted == target) & mask).sum(),
        }
        if self.top_k is not None:
            top_classes = logits.topk(self.top_k, dim=1).indices
            sums["top_k_correct"] = ((top_classes == target.unsqueeze(1)).any(1) & mask).sum()
        if self.classes <= MAX_MATRIX_CLASSES:
            # like bincount, which would need a host sync for its size
            cell = torch.where(mask, target, 0).long() * self.classes + predicted
            matrix = torch.zeros(self.classes**2, dtype=torch.int64, device=logits.device)
            matrix = matrix.index_add_(0, cell, mask.long())
            sums["confusion"] = matrix.view(self.classes, self.classes)
            sums["scores"] = model_output.TensorRows(logits, target)
        return sums

    def metric_names(self) -> list[str]:
        """Return the names of `metrics`; accuracies by class are last."""
        names = ["loss", "accuracy"]
        if self.top_k is not None:
            names.append(f"top{self.top_k}")
        if self.classes <= MAX_MATRIX_CLASSES:
            names += ["f1", "auroc"]
        if self.classes <= MAX_NAMED_CLASSES:
            names += [f"accuracy/{name}" for name in self.class_names]
        return names

    def rises(self, metric: str) -> bool | None:
        """Whether a higher value of `metric` is better, as it is of the accuracy of a class."""
        return True if metric.startswith("val/accuracy/") else super().rises(metric)

    def metrics(self, totals: dict[str, Any]) -> dict[str, float]:
        """Return `loss`, `accuracy`, `top<k>`, `f1`, `auroc`, and `accuracy/<class>` if it occurs.

        `f1` is the mean over classes that occur or were predicted. `auroc` is that of class 1 of
        two, or the one-vs-rest mean over classes that occur; exact, ties count half. It is absent
        if undefined, and above `model_output.MAX_KEPT_VALUES` scores.
        """
        count = model_output.require_count(totals)
        values = {"loss": totals["loss"].item() / count, "accuracy": int(totals["correct"]) / count}
        if self.top_k is not None:
            values[f"top{self.top_k}"] = int(totals["top_k_correct"]) / count
        if self.classes <= MAX_MATRIX_CLASSES:
            values["f1"] = macro_f1(totals["confusion"])
            if (area := self._auroc(*totals["scores"].concatenate())) is not None:
                values["auroc"] = area
        if self.classes <= MAX_NAMED_CLASSES:
            for i, row in enumerate(totals["confusion"].tolist()):
                if sum(row):
                    values[f"accuracy/{self.class_names[i]}"] = row[i] / sum(row)
        return values

    def _auroc(self, logits: Tensor | None = None, target: Tensor | None = None) -> float | None:
        if logits is None or target is None:
            return None
        mask = self.loss.valid_mask(target)
        logits, target = logits[mask].float(), target[mask]
        if self.classes == 2:
            return auroc(logits[:, 1] - logits[:, 0], target == 1)
        # log-probabilities, so that fewer are rounded to the same 0
        scores = logits.log_softmax(1)
        areas = [auroc(scores[:, c], target == c) for c in range(self.classes)]
        defined = [area for area in areas if area is not None]
        return sum(defined) / len(defined) if defined else None

    def confusion(self, totals: dict[str, Any]) -> Tensor | None:
        """Return counts [true class, predicted class] on the host; None above 200 classes."""
        matrix = totals.get("confusion")
        return None if matrix is None else matrix.cpu()

    def _logits(self, output: Any) -> Tensor:
        logits = model_output.logits(output)
        if logits.ndim < 2 or logits.shape[1] != self.classes:
            problem = (
                f"returns logits {[*logits.shape]}: dimension 1 must be {self.classes} classes"
            )
            raise ConfigError("model", problem, "size the last layer by an argument `classes`")
        return logits


def macro_f1(confusion: Tensor) -> float:
    """Return the mean of 2·TP / (2·TP + FP + FN) over classes that occur or were predicted."""
    occurrences = (confusion.sum(0) + confusion.sum(1)).cpu()
    occurs = occurrences > 0
    correct = confusion.diagonal().cpu()[occurs].float()  # not in torch's default dtype
    return float((2 * correct / occurrences[occurs]).double().mean())


def auroc(score: Tensor, positive: Tensor) -> float | None:
    """Return the probability that a positive scores above a negative; ties count half.

    The Mann-Whitney statistic in integers (Hanley and McNeil 1982,
    doi:10.1148/radiology.143.1.7063747), so exact; NaN for NaN scores, None without both kinds.
    """
    positives = int(positive.sum())
    pairs = positives * (len(positive) - positives)
    if not pairs:
        return None
    if bool(score.isnan().any()):
        return float("nan")
    ordered, order = score.sort()
    group = torch.zeros_like(order)
    group[1:] = (ordered[1:] != ordered[:-1]).cumsum(0)
    sizes, above = torch.zeros((2, len(order)), dtype=torch.int64, device=order.device)
    sizes.index_add_(0, group, torch.ones_like(group))
    above.index_add_(0, group, positive[order].long())
    below = sizes - above  # negatives of each score
    wins = above * (2 * (below.cumsum(0) - below) + below)
    return int(wins.sum()) / (2 * pairs)
