"""State and rates that belong to the user's optimizer stay those of the user's optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import runner
from runner import build, train
from runner.core.errors import ConfigError, UsageError
from runner.core.execution.evaluation import evaluate
from runner.core.optim.optimizer import incompatibility
from runner.core.train.resume import restore_last_good_checkpoint
from runner.core.train.run_state import save
from runner.core.train.step import make_step, record_step
from tests import runs

from . import my_training
from .steps import assert_same

OPTIONS = (
    *("optimization=none", "device.threads=1", "training.steps=12", "training.validate_every=6"),
    *("security.trusted=[my_training]", "schedule=constant", "optimizer.lr=0.5"),
)
ADAPTED = (*OPTIONS, "optimizer._target_=my_training.Adapted", "optimizer.weight_decay=0")
RATES = (*OPTIONS, "optimizer._target_=my_training.TwoRates")
pytestmark = pytest.mark.usefixtures("importable")


def end_of(folder: Path, *overrides: str) -> tuple[Any, Any]:
    with runs.opened(*overrides, folder=folder) as run:
        train(run)
        return run.model.state_dict(), run.update.state()


def test_numbers_in_parameter_groups_continue_where_a_resumed_run_was_saved(tmp_path: Path) -> None:
    straight = end_of(tmp_path / "a", *ADAPTED)
    middle = f"checkpoint.resume={tmp_path}/a/checkpoints/step_00000006"
    resumed = end_of(tmp_path / "b", *ADAPTED, middle)
    assert_same([*straight], [*resumed])
    group = resumed[1]["optimizer"]["param_groups"][0]
    assert group["k"] == 12 and group["d"] == 0.1


def test_a_resumed_run_sets_the_options_that_its_config_changed_and_no_others(
    tmp_path: Path,
) -> None:
    end_of(tmp_path / "a", *ADAPTED)
    changed = ("+optimizer.options.growth=1.0", "optimizer.lr=0.25")
    resume = f"checkpoint.resume={tmp_path}/a/checkpoints/step_00000006"
    with runs.opened(*ADAPTED, *changed, resume) as run:
        group = run.update.optimizer.param_groups[0]
        assert (group["growth"], group["lr"]) == (1.0, 0.25)
        assert group["k"] == 6 and group["d"] == pytest.approx(1e-3 * 1.5**6)


def test_numbers_in_parameter_groups_are_those_of_the_checkpoint_after_a_rollback() -> None:
    with runs.opened(*ADAPTED, "training.steps=50") as run:
        run.model.train()
        batches = run.train.batches(0)
        for _ in range(4):
            record_step(run, make_step(run, next(batches))[0])
        save(run)
        for _ in range(3):
            record_step(run, make_step(run, next(batches))[0])
        assert restore_last_good_checkpoint(run)
        group = run.update.optimizer.param_groups[0]
        assert group["k"] == 4 and group["d"] == pytest.approx(1e-3 * 1.5**4)


def test_rates_of_a_users_groups_keep_their_ratio_under_a_schedule() -> None:
    with build(runs.config(*RATES, "schedule=cosine", "schedule.warmup=0")) as run:
        run.model.train()
        batches, rates = run.train.batches(0), []
        for _ in range(3):
            record_step(run, make_step(run, next(batches))[0])
            rates.append([group["lr"] for group in run.update.optimizer.param_groups])
        choice = next(c for c in run.choices if c.key == "optimizer.lr")
    assert rates[0] == pytest.approx([0.5, 0.005]) and rates[2][0] < rates[0][0]
    assert all(pair[1] == pytest.approx(pair[0] / 100) for pair in rates)
    assert choice.value == [0.5, 0.005] and "TwoRates" in choice.reason


def test_rates_of_optimizer_groups_are_refused_for_a_class_that_makes_its_own_groups() -> None:
    groups = "optimizer.groups=[{match: bias, lr: 0.1}]"
    with pytest.raises(Exception, match=r"optimizer\.groups: TwoRates makes its own groups"):
        build(runs.config(*RATES, groups))


AVERAGED = (*OPTIONS, "optimizer._target_=my_training.Averaged", "optimizer.lr=0.05")


def test_an_optimizers_evaluation_mode_is_on_in_validation_and_checkpoints_alone(
    tmp_path: Path,
) -> None:
    with runs.opened(*AVERAGED, folder=tmp_path / "a") as run:
        summary = train(run)
        optimizer: Any = run.update.optimizer
        assert evaluate(run).metrics == summary.metrics
        live = [p.detach().clone() for p in run.update.parameters]
        assert optimizer.param_groups[0]["train_mode"]
        optimizer.eval()
        averaged = {n: t.clone() for n, t in run.model.state_dict().items()}
        optimizer.train()
        run.update.parameters[0].data.copy_(live[0])
    last = load_file(tmp_path / "a" / "checkpoints/last/model.safetensors")
    assert_same([*last.items()], [(n, averaged[n]) for n in last])


def test_saving_and_validating_do_not_move_the_weights_of_an_optimizer_with_modes(
    tmp_path: Path,
) -> None:
    seldom = end_of(tmp_path / "a", *AVERAGED, "checkpoint.every=12", "training.validate_every=12")
    often = end_of(tmp_path / "b", *AVERAGED, "checkpoint.every=1", "training.validate_every=2")
    middle = f"checkpoint.resume={tmp_path}/b/checkpoints/step_00000010"
    resumed = end_of(tmp_path / "c", *AVERAGED, middle)
    assert_same(seldom[0], often[0])
    assert_same([*often], [*resumed])


@pytest.mark.parametrize("name", ["SAM", "TwoStepSAM"])
def test_an_optimizer_that_needs_a_closure_is_refused_by_name_before_the_first_step(
    name: str,
) -> None:
    with pytest.raises(ConfigError, match=rf"optimizer\._target_: {name}.* runs the model several"):
        build(runs.config(*OPTIONS, f"optimizer._target_=my_training.{name}"))


def test_train_step_refuses_an_optimizer_that_needs_a_closure() -> None:
    net = nn.Linear(2, 2)
    optimizer = my_training.TwoStepSAM(net.parameters())
    batch = (torch.randn(3, 2), torch.randn(3, 2))
    with pytest.raises(UsageError, match="TwoStepSAM runs the model several times a step"):
        runner.train_step(net, optimizer, batch, nn.functional.mse_loss)


class Mixed(nn.Module):
    """An embedding with sparse gradients and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = nn.EmbeddingBag(12, 4, sparse=True), nn.Linear(4, 2)


@pytest.mark.parametrize(
    ("name", "decay", "problem"),
    [
        ("SparseAdam", 0.0, "those of out.weight are dense; use SGD or Adagrad with"),
        ("AdamW", 0.0, "not take sparse gradients, as those of rows.weight; use SGD or Adagrad"),
        ("SGD", 0.1, "SGD has no weight decay for sparse gradients"),
        ("Adagrad", 0.1, "Adagrad has no weight decay for sparse gradients"),
        ("SGD", 0.0, ""),
        ("Adagrad", 0.0, ""),
    ],
)
def test_sparse_beside_dense_weights_is_refused_with_the_optimizers_that_take_both(
    name: str, decay: float, problem: str
) -> None:
    cls = getattr(torch.optim, name)
    assert (problem in "; ".join(incompatibility(cls, Mixed(), decay) or ())) is True
    assert bool(incompatibility(cls, Mixed(), decay)) is bool(problem)
