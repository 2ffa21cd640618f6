"""objective.metrics: functions and classes of the user's, compared with NumPy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runner import build, compose, train
from runner.core.errors import ConfigError, SecurityError
from runner.core.execution.evaluation import evaluate, inference
from runner.core.interfaces.batch import Sizes
from runner.core.objectives.build import build_objective
from runner.core.objectives.named_metrics import build_metrics, build_user_metrics
from runner.core.schemas.models import ObjectiveConfig
from tests import my_package
from tests.core.objectives.sums import CUTS, measured
from tests.runs import OURS, command, opened, rows

pytestmark = pytest.mark.usefixtures("my_package")

THREE = Sizes("classification", 4, classes=4, class_names=("cat", "dog", "owl", "emu"))
VALUE = Sizes("regression", 4, classes=1, target_mean=50.0, target_deviation=4.0)
SMALL = ("model.width=8", "training.steps=20", "checkpoint=off", "optimization=none", *OURS)
ASKED = "objective.metrics=[my_package.top3,my_package.misses,my_package.Spread,my_package.Updates]"


def value(metric: Any, sizes: Sizes, output: Tensor, target: Tensor, cuts: list[int]) -> float:
    group = build_user_metrics(["mine.metric"], sizes, lambda name, key: metric)
    return measured(group, output, target, cuts)["metric"]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("per_sample", [True, False])
def test_values_of_samples_and_means_of_uneven_batches_are_averaged_over_samples(
    cuts: list[int], per_sample: bool
) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(37, 4), torch.randint(4, (37,))

    def error(output: Tensor, target: Tensor) -> Tensor:
        wrong = (output.argmax(1) != target).double()
        return wrong if per_sample else wrong.mean()

    due = np.mean(logits.numpy().argmax(1) != target.numpy())
    assert value(error, THREE, logits, target, cuts) == pytest.approx(due, rel=1e-12)


def test_predictions_of_numbers_come_in_the_unit_and_shape_of_the_target() -> None:
    torch.manual_seed(1)
    output = torch.randn(37, 1)
    target = torch.rand(37) * 9 + 46
    due = np.abs(output[:, 0].double().numpy() * 4 + 50 - target.double().numpy()).mean()
    assert value(my_package.gap, VALUE, output, target, CUTS[1]) == pytest.approx(due)


def test_a_run_without_torchmetrics_records_functions_and_classes_of_a_trusted_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    asked = (ASKED, "training.validate_every=10", "training.batch_size=100")
    with opened(*SMALL, *asked, "training.monitor=val/Spread", folder=tmp_path / "run") as run:
        assert run.higher_is_better
        metrics = train(run).metrics
        again = evaluate(run).metrics
        with inference(run) as forward:
            batches = [(forward(x).numpy(), y.numpy()) for x, y in run.validation.batches(0)]
    logits, target = (np.concatenate(part) for part in zip(*batches, strict=True))
    assert len(batches) == 4 and len(batches[-1][1]) < 100  # the last batch is smaller
    ranks = (-logits).argsort(1)
    due = {
        "val/top3": (ranks[:, :3] == target[:, None]).any(1).mean(),
        "val/misses": (ranks[:, 0] != target).mean(),
        "val/Spread": np.sort(logits.max(1))[(len(logits) - 1) // 2],
        "val/Updates": len(target),  # each validation begins without state
    }
    assert {name: metrics[name] for name in due} == pytest.approx(due, rel=1e-6)
    assert {name: again[name] for name in due} == pytest.approx(due, rel=1e-6)
    logged = rows(tmp_path / "run", "val")
    assert len(logged) == 2 and logged[-1]["top3"] == metrics["val/top3"]


class _Pair(my_package.Spread):
    def compute(self) -> Tensor:
        return torch.zeros(2)


class _Needy(my_package.Spread):
    def __init__(self, depth: int) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (lambda o, t: o, r"metric returned shape \[5, 4\] for 5 samples; .* a sample, \[5\]"),
        (lambda o, t: o[:3, 0], r"metric returned shape \[3\] for 5 samples"),
        (lambda o, t: "good", "metric returned a str for 5 samples"),
        (lambda o, t: None, "metric returned a NoneType"),
        (_Needy, "mine.metric needs a value for its argument depth; give it a default"),
        (type("Empty", (), {}), "mine.metric has no update and compute; define f"),
        (lambda output: 0.0, r".*cannot be called as f\(output, target\): too many pos"),
        (_Pair, r"compute of metric returned \[2\]"),
    ],
)
def test_what_is_no_metric_or_returns_no_number_is_one_line(metric: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^objective.metrics: {says}"):
        value(metric, THREE, torch.zeros(5, 4), torch.zeros(5, dtype=torch.long), [5])


@pytest.mark.parametrize("metric", [_Needy, type("Empty", (), {}), lambda output: 0.0])
def test_what_cannot_be_called_as_a_metric_is_refused_before_it_is_used(metric: Any) -> None:
    with pytest.raises(ConfigError, match="^objective.metrics: "):
        build_user_metrics(["mine.metric"], THREE, lambda *_: metric)


class _Misspelt(my_package.Spread):
    def update(self, output: Tensor, target: Tensor) -> None:
        self.no_such_name.append(output)


@pytest.mark.parametrize("metric", [lambda o, t: o.no_such_name, _Misspelt])
def test_an_error_of_a_metric_names_it_and_its_line_and_not_the_check(metric: Any) -> None:
    with opened(*SMALL) as run:
        run.objective.named = (build_user_metrics(["mine.metric"], run.sizes, lambda *_: metric),)
        with pytest.raises(ConfigError, match="^objective.metrics: metric raised Attr") as raised:
            train(run)
    assert "no_such_name" in str(raised.value) and f"({__file__}:" in str(raised.value)
    assert "training.sanity" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("os.system", SecurityError, "os.system is refused"),
        ("other_package.top3", SecurityError, r"add security.trusted=\[other_package\]"),
        ("my_package.top4", ConfigError, "my_package has no 'top4'; did you mean my_package.top3"),
    ],
)
def test_a_name_that_is_not_trusted_or_unknown_names_the_key(
    name: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=f"^objective.metrics: .*{says}"):
        build(compose([*SMALL, f"objective.metrics=[{name}]"])).close()


def test_two_metrics_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two metrics are called 'metric'"):
        build_user_metrics(["a.metric", "b.metric"], THREE, lambda name, key: my_package.top3)
    objective = build_objective(ObjectiveConfig(), THREE, max)
    for name in ("accuracy", "F1Score"):
        config = ObjectiveConfig(metrics=["F1Score", f"a.{name}"])
        with pytest.raises(ConfigError, match=f"^objective.metrics: two metrics .* '{name}'"):
            build_metrics(config, objective, THREE, lambda name, key: my_package.top3, False)


def test_a_declared_direction_precedes_the_name() -> None:
    def top5(output: Tensor, target: Tensor) -> float:
        return 0.0

    group = build_user_metrics(["m.top5", "m.mae"], VALUE, lambda name, key: top5)
    assert group.rises("top5") is True and group.rises("mae") is False
    top5.higher_is_better = False  # type: ignore[attr-defined]
    assert group.rises("top5") is False


def test_class_names_reach_a_loss_whose_constructor_names_them() -> None:
    asked = ("objective._target_=my_package.NamedLoss", "+objective.scale=2.0")
    with opened("data=cancer", "model=mlp", *asked, *SMALL) as run:
        assert run.objective.loss.class_names == ("malignant", "benign")  # type: ignore[attr-defined]
    numbered = Sizes("classification", 4, classes=3)
    config = ObjectiveConfig(_target_="mine.NamedLoss")
    objective = build_objective(config, numbered, lambda name, key: my_package.NamedLoss)
    assert objective.loss.class_names == ("0", "1", "2")  # type: ignore[attr-defined]


def test_the_command_line_takes_one_name_without_brackets(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def share(output, target):\n    return 0.25\n")
    quick = ["model.width=8", "training.steps=2", "device=cpu", "monitoring=quiet"]
    done = command(tmp_path, *quick, "objective.metrics=mine.share", "security.trusted=mine")
    assert done.returncode == 0, done.stderr
    assert '"val/share": 0.25' in next(tmp_path.glob("outputs/**/summary.json")).read_text()
