"""A run that is made longer, or continued with another batch size, ends where its config says."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from runner import train
from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.interfaces.hook import Step
from runner.core.interfaces.run import Run
from runner.core.jobs.run_report import render_report
from runner.core.optim.schedule import lr_factors
from runner.core.schemas.optimizer import ScheduleConfig, ScheduleKind
from tests.runs import differences, hook, opened, rows, trained

RUN = ["data=cancer", "model=mlp", "model.width=4", "optimization=none", "device.threads=1",
       "monitoring.progress=false", "monitoring.tensorboard=false", "monitoring.every=1",
       "checkpoint.keep=99", "schedule=constant", "checkpoint.resume=auto"]  # fmt: skip
SAMPLES = 455


def keep_until(folder: Path, step: int) -> None:
    """As if the run had been killed after that checkpoint."""
    for path in (folder / "checkpoints").glob("step_*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)


@pytest.mark.parametrize("step", [10, 12])  # the end of an epoch, and amid the third
def test_with_another_batch_size_every_sample_is_trained_on_as_often_as_epochs_were_typed(
    step: int, tmp_path: Path
) -> None:
    seen = Counter[int]()
    counting = hook(on_step=lambda run, step: seen.update(run.train.indices(step.number - 1)))
    first = ["training.batch_size=100", f"training.steps={step}"]
    trained(*RUN, *first, folder=tmp_path, hooks=[counting])
    smaller = ["training.batch_size=40", "training.steps=null", "training.epochs=4"]
    summary = trained(*RUN, *smaller, folder=tmp_path, hooks=[counting])
    left = 2 * 12 if step == 10 else 7 + 12  # 255 samples in batches of 40, and an epoch
    assert (summary.steps, summary.epochs) == (step + left, 4.0)
    assert len(seen) == SAMPLES and set(seen.values()) == {4}
    column = [row["epoch"] for row in rows(tmp_path, "train")]
    assert column == sorted(column) and column[-1] == 4.0 and len(column) == step + left


def test_the_schedule_is_over_the_steps_done_and_those_left(tmp_path: Path) -> None:
    cosine = ["schedule=cosine", "schedule.warmup=0", "optimizer.lr=0.01"]
    typed = [*RUN, "training.epochs=3", *cosine]
    trained(*typed, "training.batch_size=100", "training.validate_every=10", folder=tmp_path)
    keep_until(tmp_path, 10)
    with opened(*typed, "training.batch_size=50", folder=tmp_path) as run:
        assert run.progress.step == 10 and run.total_steps == 20
        train(run)
    factors = lr_factors(ScheduleConfig(ScheduleKind.cosine, warmup=0), 20)
    rates = [row["lr"] for row in rows(tmp_path, "train")][10:]
    assert rates == pytest.approx([0.01 * factor for factor in factors[10:]])


def test_a_run_with_another_batch_size_that_is_killed_ends_in_the_same_bits(
    tmp_path: Path,
) -> None:
    cosine = [*RUN, "schedule=cosine"]
    first = ["training.batch_size=100", "training.epochs=2", "checkpoint.every=7"]
    trained(*cosine, *first, folder=tmp_path / "whole")
    keep_until(tmp_path / "whole", 7)
    then = ["training.batch_size=30", "training.epochs=3", "checkpoint.every=9"]
    trained(*cosine, *then, folder=tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "killed", symlinks=True)
    keep_until(tmp_path / "killed", 18)
    with opened(*cosine, *then, folder=tmp_path / "killed") as run:
        assert run.progress.step == 18
        train(run)
    ends = [Checkpointer(tmp_path / name, keep=99).restore() for name in ("whole", "killed")]
    one, other = (end for end in ends if end is not None)
    assert one.step == other.step and differences(one.model, other.model) == []
    assert rows(tmp_path / "whole") == rows(tmp_path / "killed")


def test_a_number_of_steps_stays_one_with_another_batch_size(tmp_path: Path) -> None:
    trained(*RUN, "training.batch_size=100", "training.steps=5", folder=tmp_path)
    summary = trained(*RUN, "training.batch_size=50", "training.steps=9", folder=tmp_path)
    assert summary.steps == 9 and summary.epochs == pytest.approx(1 + 4 / 10)


def keep_weights(run: Run, step: Step) -> None:
    """No validation improves on the first."""
    for parameter in run.update.parameters:
        if parameter.grad is not None:
            parameter.grad.zero_()


PATIENT = [*RUN, "training.batch_size=100", "training.patience=2", "training.validate_every=3",
           "optimizer.weight_decay=0"]  # fmt: skip


@pytest.mark.parametrize(
    ("longer", "end"),
    [
        (["training.epochs=30"], 15),
        (["training.steps=40"], 15),
        (["training.steps=40", "training.patience=3"], 18),
    ],
)
def test_a_run_that_patience_ended_trains_on_if_it_is_made_longer_and_counts_from_0(
    longer: list[str], end: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "runner")
    stale = hook(on_gradients=keep_weights)
    for _ in range(2):  # with the same length it stays ended
        first = trained(*PATIENT, "training.epochs=20", folder=tmp_path, hooks=[stale])
        assert (first.status, first.steps) == ("stopped", 9)
    assert "trains on" not in caplog.text
    then = trained(*PATIENT, *longer, folder=tmp_path, hooks=[stale])
    assert caplog.text.count("training.patience had ended this run at step 9") == 1
    assert (then.status, then.steps, then.resumed_step) == ("stopped", end, 9)
    assert f"{end - 9} of the steps now in" in render_report(then, tmp_path)


def test_a_resume_of_a_run_that_has_more_steps_trains_none_and_warns_of_no_rate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "runner")
    for steps in (10, 5):
        typed = (*RUN, f"training.steps={steps}", "schedule=cosine")
        assert trained(*typed, folder=tmp_path).steps == 10
    assert "continuing after step 10: no steps are left to train" in caplog.text
    assert "learning rate" not in caplog.text
