"""From config and task to an objective; losses of the user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.core.errors import ConfigError
from runner.core.interfaces.batch import Sizes
from runner.core.interfaces.objective import Objective
from runner.core.objectives.build import build_objective
from runner.core.objectives.classification import ClassificationObjective
from runner.core.objectives.custom import CustomObjective
from runner.core.objectives.language_modelling import LanguageModellingObjective
from runner.core.objectives.regression import RegressionObjective
from runner.core.schemas.models import ObjectiveConfig
from tests.core.objectives.sums import totals

LABELS = Sizes("classification", 4, classes=3, class_names=("cat", "dog", "owl"))
NUMBERS = Sizes("regression", 4, classes=1)
TEXT = Sizes("language_modelling", classes=256, vocab=256, sequence=8)


def never(target: str, key: str) -> Any:
    raise AssertionError(f"{target} was resolved for {key}")


def foreign(found: Any, sizes: Sizes = NUMBERS, **arguments: Any) -> Objective:
    def resolve(target: str, key: str) -> Any:
        assert (target, key) == ("mine.loss", "objective._target_")
        return found

    return build_objective(
        ObjectiveConfig(_target_="mine.loss", arguments=arguments), sizes, resolve
    )


def power(output: Tensor, target: Tensor, exponent: float = 2.0) -> Tensor:
    return (output - target).abs().pow(exponent).mean()


class Power:
    def __init__(self, exponent: float, classes: int) -> None:
        self.exponent = exponent
        self.classes = classes

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return power(output, target, self.exponent)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, self.weight)  # type: ignore[arg-type]


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("sizes", "kind", "made"),
    [
        (LABELS, "classification", ClassificationObjective),
        (NUMBERS, "regression", RegressionObjective),
        (TEXT, "language_modelling", LanguageModellingObjective),
    ],
)
def test_auto_takes_the_one_for_the_datas_task(sizes: Sizes, kind: str, made: type) -> None:
    assert type(build_objective(ObjectiveConfig(), sizes, never)) is made
    assert type(build_objective(ObjectiveConfig(kind=kind), sizes, never)) is made


def test_the_options_keys_reach_the_objective() -> None:
    config = ObjectiveConfig(label_smoothing=0.2, top_k=2, ignore_index=1)
    objective = build_objective(config, LABELS, never)
    logits, target = torch.randn(4, 3), torch.tensor([0, 2, 1, 0])
    expected = F.cross_entropy(logits, target, ignore_index=1, label_smoothing=0.2)
    assert float(objective(logits, target)) == pytest.approx(float(expected))
    assert "top2" in objective.metrics(objective.batch_sums(logits, target))


@pytest.mark.parametrize(
    ("config", "sizes", "says"),
    [
        ({"kind": "regression"}, LABELS, r"does not fit .*; use objective=auto"),
        ({}, Sizes("ranking"), r"task is 'ranking'.*a loss by objective\._target_"),
        ({}, Sizes("classification", 4), r"needs the number of classes"),
        ({"label_smoothing": 0.1}, NUMBERS, r"not used by regression; .*classification"),
        ({"label_smoothing": 0.1, "_target_": "mine.loss"}, LABELS, "not used by custom"),
        ({"arguments": {"gamma": 2}}, LABELS, r"e\.gamma: no such key"),
        ({"kind": "ranking"}, LABELS, r"objective\.kind: unknown objective 'ranking'"),
        ({"loss": "hubr"}, LABELS, r"objective\.loss: .* 'hubr' .*cross_entropy, focal"),
        ({"loss": "focal"}, NUMBERS, r"'focal' for regression; use mse, mae, huber"),
        ({"loss": "focal"}, TEXT, r"objective\.loss: is not used by language"),
        ({"gamma": 1.0}, LABELS, r"objective\.gamma: .* for objective\.loss=focal"),
        ({"delta": 2.0}, NUMBERS, r"objective\.delta: .* for objective\.loss=huber"),
        ({"class_weights": "balanced"}, NUMBERS, r"class_weights: is not used by regress"),
        ({"loss": "focal", "label_smoothing": 0.1}, LABELS, r"loss=cross_entropy"),
        ({"class_weights": "even"}, LABELS, r"cannot be 'even'; use balanced, null"),
        ({"class_weights": [1.0, 0.0, 1.0]}, LABELS, r"a number above 0 for each class"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_an_error_that_names_the_way_out(
    config: dict[str, Any], sizes: Sizes, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        build_objective(ObjectiveConfig(**config), sizes, never)


def test_functions_classes_and_modules_are_losses_and_get_their_arguments() -> None:
    x, y = torch.randn(5), torch.randn(5)
    assert torch.equal(foreign(power)(x, y), power(x, y))
    assert torch.equal(foreign(power, exponent=3.0)(x, y), power(x, y, 3.0))
    objective = foreign(Power, LABELS, exponent=3.0)
    assert isinstance(objective, CustomObjective)
    assert objective.loss.classes == 3  # type: ignore[attr-defined]
    assert torch.equal(objective(x, y), power(x, y, 3.0))
    assert torch.equal(foreign(nn.L1Loss)(x, y), F.l1_loss(x, y))
    assert type(foreign(RegressionObjective)) is RegressionObjective
    logits, labels = torch.randn(4, 3), torch.tensor([0, 2, 1, 0])
    assert foreign(Weighted)(logits, labels) == Weighted()(logits, labels)
    for returned, says in ((x, r"returned \[5\]"), (1.5, "returned float")):
        with pytest.raises(ConfigError, match=says):
            foreign(lambda output, target, value=returned: value)(x, y)


def test_a_custom_loss_is_a_metric_that_is_exact_over_uneven_batches() -> None:
    objective, x, y = foreign(power), torch.randn(37), torch.randn(37)
    sums = totals(objective, x, y, [16, 16, 5])
    assert objective.metrics(sums) == pytest.approx({"loss": float(power(x, y))}, rel=1e-6)


@pytest.mark.parametrize(
    "target",
    [torch.zeros(5, 2), {"a": torch.zeros(5)}, (torch.zeros(5), None), [{"b": torch.zeros(5)}]],
)
def test_samples_are_counted_for_every_type_of_target(target: Any) -> None:
    assert foreign(power).weight(target) == 5
    with pytest.raises(ConfigError, match=r"data: the target is a str without a tensor"):
        foreign(power).weight("five")


@pytest.mark.parametrize(
    ("found", "arguments", "says"),
    [
        (power, {"gamma": 2}, r"loss\(output, target, gamma=…\).*unexpected keyword argument"),
        (lambda output: output, {}, r"loss\(output, target\): too many positional arguments"),
        (Power, {}, r"objective\.exponent: Power needs a value"),
        (Sizes, {"task": "x"}, "is not callable; define __call__"),
        (Learned, {}, "has parameters, but only the model's are trained"),
    ],
)
def test_what_cannot_be_a_loss_is_refused(found: Any, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        foreign(found, **arguments)
