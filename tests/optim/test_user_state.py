"""State and rates that belong to the user's optimizer stay those of the user's optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner import build, train
from runner.training.resume import restore_last_good_checkpoint, save
from runner.training.step import make_step, record_step
from tests import runs

from .steps import assert_same

OPTIONS = (
    *("optimization=none", "device.threads=1", "training.steps=12", "training.validate_every=6"),
    *("security.trusted=[my_optimizers]", "schedule=constant", "optimizer.lr=0.5"),
)
ADAPTED = (*OPTIONS, "optimizer._target_=my_optimizers.Adapted", "optimizer.weight_decay=0")
RATES = (*OPTIONS, "optimizer._target_=my_optimizers.TwoRates")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


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
        assert restore_last_good_checkpoint(run, 0.5)
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
