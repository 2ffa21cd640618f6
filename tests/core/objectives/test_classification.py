"""Classification: the loss, the weight that adds up, and metrics against numpy."""

from __future__ import annotations

import math
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from runner.core.errors import ConfigError, DataError
from runner.core.objectives import model_output
from runner.core.objectives.classification import ClassificationObjective, auroc
from tests.core.objectives.sums import CUTS, totals


def samples(classes: int, count: int = 37) -> tuple[Tensor, Tensor]:
    target = torch.randint(0, classes, (count,))
    return torch.randn(count, classes) + 1.5 * F.one_hot(target, classes), target


def chance(score: np.ndarray, positive: np.ndarray) -> float:
    """That a positive scores above a negative, pair by pair."""
    differences = score[positive][:, None] - score[~positive][None]
    return float(((differences > 0) + 0.5 * (differences == 0)).mean())


def reference(logits: np.ndarray, target: np.ndarray, k: int, smoothing: float) -> dict[str, Any]:
    logits = logits.astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    truth = np.eye(logits.shape[1])[target] * (1 - smoothing) + smoothing / logits.shape[1]
    predicted = logits.argmax(1)
    best = np.argsort(-logits, axis=1)[:, :k]
    classes = np.arange(logits.shape[1])
    true, chosen = (x[:, None] == classes for x in (target, predicted))
    sizes, seen = true.sum(0) + chosen.sum(0), (true | chosen).any(0)
    return {
        "f1": float((2 * (true & chosen).sum(0)[seen] / sizes[seen]).mean()),
        "auroc": float(np.mean([chance(log_p[:, c], target == c) for c in np.unique(target)])),
        "loss": float(-(truth * log_p).sum(1).mean()),
        "accuracy": float((predicted == target).mean()),
        f"top{k}": float(np.mean([t in row for t, row in zip(target, best, strict=True)])),
        "per_class": {int(c): float((predicted[target == c] == c).mean()) for c in {*target}},
        "pairs": (true.T.astype(int) @ chosen).tolist(),
    }


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_metrics_over_uneven_batches_are_those_of_numpy(cuts: list[int], smoothing: float) -> None:
    logits, target = samples(6)
    names = tuple("abcdef")
    objective = ClassificationObjective(6, names, label_smoothing=smoothing, top_k=3)
    expected = reference(logits.numpy(), target.numpy(), 3, smoothing)
    sums = totals(objective, logits, target, cuts)
    per_class = {f"accuracy/{names[c]}": a for c, a in expected.pop("per_class").items()}
    pairs = expected.pop("pairs")
    assert objective.metrics(sums) == pytest.approx({**expected, **per_class}, rel=1e-6)
    confusion = objective.confusion(sums)
    assert confusion is not None and confusion.tolist() == pairs


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("step", [0.0, 0.5, 4.0], ids=["no ties", "ties", "mostly ties"])
def test_f1_and_auroc_of_two_classes_are_those_of_numpy(cuts: list[int], step: float) -> None:
    logits, target = samples(2)
    if step:
        logits = (logits / step).round() * step
    logits = logits + 40 * torch.eye(2)[target]  # float32 probabilities would all be 0 and 1
    logits[::3] = logits[::3].flip(1)
    objective = ClassificationObjective(2)
    metrics = objective.metrics(totals(objective, logits, target, cuts))
    score = (logits[:, 1] - logits[:, 0]).numpy()
    assert metrics["auroc"] == pytest.approx(chance(score, target.numpy() == 1), rel=1e-12)
    f1 = reference(logits.numpy(), target.numpy(), 1, 0.0)["f1"]
    assert metrics["f1"] == pytest.approx(f1, rel=1e-6)


def test_equal_infinities_are_ties_and_nan_makes_nan() -> None:
    scores = torch.tensor([-torch.inf, -torch.inf, 1.0])
    positive = torch.tensor([True, False, True])
    assert auroc(scores, positive) == 0.75
    assert math.isnan(auroc(scores * 0, positive) or 0.0)


def test_auroc_is_absent_if_undefined_or_of_many_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = ClassificationObjective(3)
    one_class = objective.metrics(objective.batch_sums(torch.eye(3), torch.tensor([1, 1, 1])))
    assert "auroc" not in one_class
    assert one_class["f1"] == pytest.approx((0 + 2 / 4 + 0) / 3)
    assert set(objective.metric_names()) > {"f1", "auroc"}
    logits, target = samples(3)
    assert "auroc" in objective.metrics(totals(objective, logits, target, [16, 16, 5]))
    monkeypatch.setattr(model_output, "MAX_KEPT_VALUES", 37 * 4 - 1)
    sums = totals(objective, logits, target, [16, 16, 5])
    assert not sums["scores"].parts
    assert objective.metrics(sums).keys() >= {"f1", "accuracy"}
    assert "auroc" not in objective.metrics(sums)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("ignored", [-100, 2], ids=["apart", "a class's own index"])
def test_ignored_targets_count_nowhere(cuts: list[int], ignored: int) -> None:
    logits, target = samples(6)
    masked = torch.where(torch.arange(37) % 3 == 0, ignored, target)
    keep = masked != ignored
    some = ClassificationObjective(6, top_k=2, ignore_index=ignored)
    every = ClassificationObjective(6, top_k=2, ignore_index=None)
    sums = totals(some, logits, masked, cuts)
    rest = totals(every, logits[keep], masked[keep], [int(keep.sum())])
    assert some.metrics(sums) == pytest.approx(every.metrics(rest))
    assert torch.equal(sums["confusion"], rest["confusion"])


def test_with_nothing_ignored_the_weight_is_a_number_and_not_read_from_the_device() -> None:
    _, target = samples(6)
    assert ClassificationObjective(6, ignore_index=None).weight(target) == 37
    assert isinstance(ClassificationObjective(6, ignore_index=None).weight(target.to("meta")), int)
    assert isinstance(ClassificationObjective(6).weight(target), Tensor)


@pytest.mark.parametrize(("classes", "k", "there"), [(6, 5, True), (5, 5, False), (6, 1, False)])
def test_top_k_is_left_out_where_it_says_nothing(classes: int, k: int, there: bool) -> None:
    objective = ClassificationObjective(classes, top_k=k)
    metrics = objective.metrics(objective.batch_sums(*samples(classes)))
    assert (f"top{k}" in metrics) == there


def test_accuracy_per_class_is_told_up_to_20_classes_and_pairs_are_counted_up_to_200() -> None:
    for classes, named, counted in ((20, True, True), (200, False, True), (201, False, False)):
        objective = ClassificationObjective(classes)
        sums = objective.batch_sums(*samples(classes))
        assert any(name.startswith("accuracy/") for name in objective.metrics(sums)) == named
        assert (objective.confusion(sums) is not None) == counted
    two = ClassificationObjective(3, ("cat", "dog", "owl"))
    metrics = two.metrics(two.batch_sums(torch.eye(3)[:2], torch.tensor([0, 1])))
    assert {k for k in metrics if "/" in k} == {"accuracy/cat", "accuracy/dog"}


def test_a_row_of_logits_per_place_is_classified_place_by_place() -> None:
    logits, target = torch.randn(2, 6, 4, 3), torch.randint(0, 6, (2, 4, 3))
    objective = ClassificationObjective(6)
    sums = objective.batch_sums(logits, target)
    assert int(sums["count"]) == 24
    right = int((logits.argmax(1) == target).sum())
    assert int(sums["correct"]) == int(sums["confusion"].diagonal().sum()) == right
    assert sums["loss"].item() / 24 == pytest.approx(float(objective(logits, target)))


Pair = namedtuple("Pair", ["states", "logits"])


def test_logits_are_found_in_what_the_model_returns() -> None:
    x, target = samples(6)
    objective = ClassificationObjective(6)
    named = [{"logits": x, "hidden": None}, SimpleNamespace(loss=None, logits=x), Pair(None, x)]
    for output in (x, (x, "cache"), [x], *named):
        assert torch.equal(objective(output, target), F.cross_entropy(x, target))
        assert int(objective.batch_sums(output, target)["count"]) == 37


@pytest.mark.parametrize("output", [None, {"scores": torch.zeros(2, 6)}, (1, 2)])
def test_an_output_without_logits_is_an_error(output: Any) -> None:
    with pytest.raises(ConfigError, match="without logits; return a tensor"):
        ClassificationObjective(6)(output, torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize(
    ("logits", "target", "error", "says"),
    [
        ((4, 7), [0, 1, 2, 3], ConfigError, r"logits \[4, 7\]: dimension 1 must be 6 classes; s"),
        ((4, 7, 2), [[0, 1]] * 4, ConfigError, r"logits \[4, 7, 2\]: .* 6 classes"),
        ((4,), [0, 1, 2, 3], ConfigError, r"model: returns logits \[4\]: dimension 1"),
        ((4, 6), [0.0, 1.0, 2.0, 3.0], DataError, r"class indices \(int64\), got torch\.float32"),
        ((4, 6), [0, 1, 6, 3], DataError, r"target 6 is out of range: classes are 0 to 5$"),
        ((4, 6), [0, -1, 2, 3], DataError, r"target -1 .*set objective\.ignore_index=-1"),
    ],
)
def test_what_torch_refuses_is_explained(
    logits: tuple[int, ...], target: list[Any], error: type[Exception], says: str
) -> None:
    objective = ClassificationObjective(6)
    for measure in [objective, objective.batch_sums][: 1 + (len(logits) == 1)]:
        with pytest.raises(error, match=says):
            measure(torch.randn(logits), torch.tensor(target))


@pytest.mark.parametrize("ignored", [True, False])
def test_metrics_of_nothing_are_an_error(ignored: bool) -> None:
    objective = ClassificationObjective(6)
    sums = objective.batch_sums(torch.randn(2, 6), torch.full((2,), -100)) if ignored else {}
    with pytest.raises(DataError, match="no targets to evaluate"):
        objective.metrics(sums)
