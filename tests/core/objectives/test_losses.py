"""Losses by name, class weights and the balanced sampler: against numpy, and in whole runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from runner import train
from runner.core.build.arguments import InMemoryDataset
from runner.core.build.setup import Components
from runner.core.errors import ConfigError
from runner.core.interfaces.batch import Sizes
from runner.core.interfaces.objective import Objective
from runner.core.interfaces.run import Run
from runner.core.objectives import class_weights
from runner.core.objectives.classification import ClassificationObjective
from runner.core.objectives.regression import RegressionObjective
from tests.core.objectives.sums import CUTS, totals, weighted_loss
from tests.runs import differences, opened, weights


def log_p(logits: Tensor, target: Tensor) -> np.ndarray:
    x = logits.double().numpy()
    return (x - np.log(np.exp(x).sum(1, keepdims=True)))[range(len(x)), target.numpy()]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("gamma", [None, 0.0, 0.5, 2.0], ids=str)
@pytest.mark.parametrize("weights", [None, [0.2, 1.0, 3.0]], ids=["even", "weighted"])
def test_focal_and_weighted_losses_are_those_of_numpy_in_parts_too(
    cuts: list[int], gamma: float | None, weights: list[float] | None
) -> None:
    logits, target = torch.randn(37, 3), torch.randint(0, 3, (37,))
    target[3:20:4] = -100
    keep = target != -100
    given = None if weights is None else torch.tensor(weights)
    objective = ClassificationObjective(3, class_weights=given, gamma=gamma)
    own = log_p(logits[keep], target[keep])
    each = -own * (1 - np.exp(own)) ** (gamma or 0)
    w = np.array(weights or [1.0] * 3)[target[keep].numpy()]
    expected = pytest.approx((each * w).sum() / w.sum(), rel=1e-5)
    assert float(objective(logits, target)) == expected
    assert weighted_loss(objective, logits, target, cuts) == expected
    # metrics are not weighted
    metrics = objective.metrics(totals(objective, logits, target, cuts))
    assert metrics["loss"] == pytest.approx(each.mean(), rel=1e-5)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_focal_gradients_are_finite_where_a_sample_is_certain_or_none_counts(gamma: float) -> None:
    objective = ClassificationObjective(3, gamma=gamma)
    for target in (torch.tensor([0, 1]), torch.tensor([-100, -100])):
        logits = torch.tensor([[200.0, 0, 0], [200.0, 0, 0]], requires_grad=True)
        loss = objective(logits, target)
        loss.backward()
        assert logits.grad is not None and bool(logits.grad.isfinite().all())
        assert bool(loss.isnan()) == bool((target < 0).all())
    assert not logits.grad.any()


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("loss", ["mse", "mae", "huber"])
def test_losses_of_a_regression_are_those_of_numpy(cuts: list[int], loss: str) -> None:
    output, target = torch.randn(37, 2), 5 + 3 * torch.randn(37, 2)
    objective = RegressionObjective(5.0, 3.0, loss, delta=0.7)
    error = np.abs((output - (target - 5) / 3).numpy())
    huber = np.where(error < 0.7, error**2 / 2, 0.7 * (error - 0.35))
    expected = {"mse": (error**2).mean(), "mae": error.mean(), "huber": huber.mean()}[loss]
    assert float(objective(output, target)) == pytest.approx(expected, rel=1e-5)
    metrics = objective.metrics(totals(objective, output, target, cuts))
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["mae"] == pytest.approx(3 * error.mean(), rel=1e-5)
    assert metrics["mse"] == pytest.approx(9 * (error**2).mean(), rel=1e-5)


def rare(*overrides: str, counts: Sequence[int] = (380, 20), **given: Any) -> Any:
    """A run on points around a place for each class, of which there are so many for training."""
    torch.manual_seed(0)
    target = torch.cat([torch.full((n,), c) for c, n in enumerate(counts)]).repeat(2)
    inputs = torch.randn(len(target), 4) + F.one_hot(target, 4)
    parts = np.arange(sum(counts)), np.arange(sum(counts), 2 * sum(counts))
    sizes = Sizes("classification", in_features=4, classes=len(counts))
    quick = ("model=mlp", "model.width=8", "optimizer.lr=0.01", "training.batch_size=50")
    data = Components(data=InMemoryDataset(inputs, target, sizes, parts))
    return opened(*quick, "training.steps=160", *overrides, given=data, **given)


def chosen(run: Run) -> dict[str, Any]:
    return {choice.key: (choice.value, choice.reason) for choice in run.choices}


def test_a_rare_class_is_told_unless_something_balances() -> None:
    key = "objective.class_weights"
    with rare(counts=(390, 10)) as run:
        assert chosen(run)[key][0] is None
        assert "class '1' has 2.50% of the training samples" in chosen(run)[key][1]
    for overrides, counts in (
        ((), (380, 20)),  # 5 %
        (("data.sampler=balanced",), (390, 10)),
        (("objective.class_weights=[1,2]",), (390, 10)),
    ):
        with rare(*overrides, counts=counts) as run:
            assert key not in chosen(run)
    with rare("objective.class_weights=balanced", counts=(390, 10)) as run:
        assert chosen(run)[key][0] == "balanced"
        assert run.objective.loss.class_weights.tolist() == pytest.approx([400 / 780, 20])


def test_a_balanced_run_resumes_with_the_weights_of_one_never_stopped(tmp_path: Path) -> None:
    balanced = ("data.sampler=balanced", "objective.class_weights=[1,3]", "training.steps=13")
    balanced += ("checkpoint.every=5", "checkpoint.keep=9")
    with rare(*balanced, folder=tmp_path / "whole") as run:
        batches = zip(range(8), run.train.batches(0), strict=False)
        assert [int((target == 1).sum()) for _, (_, target) in batches] == [25] * 8
        train(run)
        whole = weights(run)
    resume = f"checkpoint.resume={tmp_path / 'whole' / 'checkpoints' / 'step_00000005'}"
    with rare(*balanced, resume, folder=tmp_path / "cut") as run:
        assert run.progress.step == 5
        train(run)
        assert differences(weights(run), whole) == []


def test_classes_evened_out_by_both_sampler_and_loss_are_refused_unless_the_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    both = ("data.sampler=balanced", "objective.class_weights=balanced", "training.steps=2")
    problem = r"objective\.class_weights: .* after data\.sampler=balanced"
    with pytest.raises(ConfigError, match=problem):
        rare(*both, "checkpoint.resume=auto", folder=tmp_path / "new").__enter__()
    with monkeypatch.context() as older:
        older.setattr(class_weights, "check_balance", lambda *_, **__: None)
        with rare(*both, folder=tmp_path / "old") as run:
            train(run)
            given = run.objective.loss.class_weights.tolist()
    with rare(*both, "checkpoint.resume=auto", folder=tmp_path / "old") as run:
        assert run.progress.step == 2 and run.objective.loss.class_weights.tolist() == given
    assert "after data.sampler=balanced; kept from the resumed run" in caplog.text
    with rare("data.sampler=balanced", "objective.class_weights=[1,9]"):
        pass  # weights that are typed may be meant


def test_weights_and_sampler_are_refused_where_they_do_not_fit() -> None:
    sampled = "data.sampler=balanced"
    for run, says in (
        (rare("objective.class_weights=[1,2,3]"), "has 3 weights for 2 classes"),
        (opened("data=stdlib_text", "model=gpt", sampled), r"data\.sampler: needs the class"),
        (rare(sampled, "data.shuffle=false"), r"data\.sampler: .* data\.shuffle=false"),
    ):
        with pytest.raises(ConfigError, match=says):
            run.__enter__()


@pytest.mark.parametrize(
    "objective",
    [ClassificationObjective(3), ClassificationObjective(3, gamma=2.0), RegressionObjective(0, 1)],
)
def test_a_loss_of_16_bit_outputs_is_taken_in_32_bits(objective: Objective) -> None:
    output, target = torch.randn(37, 3).bfloat16(), torch.randint(0, 3, (37,))
    target = target if objective.indices else torch.randn(37, 3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = objective(output, target)
    assert loss.dtype is torch.float32
    assert torch.equal(loss, objective(output.float(), target))
