"""A run whose model answers alike for all validation samples; limits of outputs with classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from runner import build, compose, train
from runner.core.errors import ConfigError
from runner.core.interfaces.hook import Evaluation
from runner.core.interfaces.run import Run
from runner.core.objectives.regression import RegressionObjective
from runner.core.record.summary import Summary
from tests import runs

SHORT = ["model=mlp", "optimization=none", "monitoring=quiet", "optimizer.lr=1e-9"]
SHORT += ["training.steps=40", "training.validate_every=10", "optimizer.weight_decay=0"]


def regression(folder: Path) -> list[str]:
    x = np.random.default_rng(0).random(60)
    rows = "\n".join(f"{a:.4f},{1000 + 3 * a:.4f}" for a in x)
    (folder / "numbers.csv").write_text(f"x,y\n{rows}\n")
    data = ["data=tabular", f"data.path={folder}/numbers.csv", "data.target=y"]
    return [*data, "data.task=regression"]


def trained(folder: Path, data: list[str], after: int) -> Summary:
    """A run whose last layer has only zeros from the validation of step `after` on."""

    def zero(run: Run, evaluation: Evaluation) -> None:
        if evaluation.step == after:
            last = [m for m in run.model.modules() if isinstance(m, nn.Linear)][-1]
            last.weight.data.zero_()
            last.bias.data.copy_(torch.arange(float(len(last.bias))))

    hooks = [runs.hook(on_validation=zero)]
    return runs.trained(*data, *SHORT, folder=folder / "run", hooks=hooks)


@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_an_output_that_is_constant_after_the_first_validation_is_one_fault(
    tmp_path: Path, task: str
) -> None:
    data = ["data=cancer"] if task == "classes" else regression(tmp_path)
    assert "constant_output" not in trained(tmp_path / "sound", data, after=-1).faults
    summary = trained(tmp_path, data, after=10)
    assert summary.faults["constant_output"] == 1
    (fault,) = runs.faults(tmp_path / "run", "constant_output")
    assert (fault["steps"], fault["count"]) == ([20], 1)
    expected = "one class (benign)" if task == "classes" else "one number"
    assert f"predicts {expected} for every sample" in fault["message"]


def test_the_first_validation_is_not_looked_at(tmp_path: Path) -> None:
    """A fresh model may answer alike at first."""
    with build(compose(["data=cancer", *SHORT]), tmp_path) as run:
        last = [m for m in run.model.modules() if isinstance(m, nn.Linear)][-1]
        last.weight.data.zero_()
        run.validate_every = 40
        assert "constant_output" not in train(run).faults


def test_numbers_are_constant_up_to_1e_6_and_only_if_a_target_varies() -> None:
    objective = RegressionObjective(mean=1e6, deviation=0.5)
    targets = 1e6 + torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)

    def is_constant(output: list[float], target: torch.Tensor = targets) -> bool:
        predicted = torch.tensor(output, dtype=torch.float64)
        totals = objective.batch_sums(predicted, target)
        return objective.has_constant_output(totals, None)

    assert is_constant([0.3] * 4) and is_constant([0.3, 0.3 + 1e-7, 0.3, 0.3])
    assert not is_constant([0.3, 0.3 + 1e-4, 0.3, 0.3])
    assert not is_constant([0.3] * 4, targets[:1].expand(4))


@pytest.mark.parametrize("limit", ["low", "high"])
def test_limits_of_outputs_are_an_error_with_classes_and_not_with_numbers(
    tmp_path: Path, limit: str
) -> None:
    typed = f"checks.outputs.{limit}=0.5"
    with pytest.raises(ConfigError, match=rf"checks.outputs.{limit}.*regression only") as caught:
        build(compose(["data=cancer", typed]), tmp_path / "run")
    assert caught.value.exit_code == 2
    with build(compose([*regression(tmp_path), typed]), tmp_path / "numbers"):
        pass
