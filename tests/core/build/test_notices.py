"""One line for what would otherwise be a surprise: sizes, lengths, gradients, paths."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
import torch

from runner import build, compose
from runner.core.build.setup import Components
from runner.core.errors import ConfigError
from runner.core.interfaces.run import Run
from runner.core.jobs.run_report import RunSummaryTable
from runner.core.objectives.custom import CustomObjective
from runner.core.record.console import EscapingConsole
from tests.runs import OURS, TABLE, command, opened, trained


@pytest.mark.parametrize(("warmup", "is_named"), [(21, True), (20, False), (0.5, False)])
def test_a_warm_up_longer_than_the_run_is_named(
    warmup: float, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(*TABLE, "training.steps=20", f"schedule.warmup={warmup}") as run:
        named = [choice for choice in run.choices if choice.key == "schedule.warmup"]
    assert ("schedule.warmup: 21: longer than the run, 20 steps" in caplog.text) is is_named
    assert len(named) == is_named


@pytest.mark.parametrize(
    ("ema", "warm_up", "notice"),
    [
        (0.999, "false", "the initial weights are 98% of it"),  # 0.999 ** 20
        (0.5, "false", None),
        (0.999, "null", "min(0.999, (1 + n) / (10 + n)); 0.7 after the last of this run"),
        (0.5, "null", None),
    ],
)
def test_an_average_that_is_long_for_the_run_is_named(
    ema: float, warm_up: str, notice: str | None
) -> None:
    typed = (f"optimizer.ema={ema}", f"optimizer.ema_warmup={warm_up}", "training.steps=20")
    with opened(*TABLE, *typed) as run:
        notices = [choice.reason for choice in run.choices if choice.is_notice]
        assert run.update.ema_warmup is (warm_up == "null")
    assert len(notices) == (notice is not None)
    assert notice is None or notice in notices[0]


@pytest.mark.parametrize(
    ("model", "typed", "is_named"),
    [
        ("cnn", ["training.micro_batch=8"], True),
        ("cnn", ["optimization=memory_efficient"], True),
        ("cnn", [], False),
        ("mlp", ["training.micro_batch=8"], False),  # without BatchNorm
    ],
)
def test_batch_norm_with_micro_batches_is_named_once_in_the_end_table(
    model: str, typed: list[str], is_named: bool, tmp_path: Path
) -> None:
    small = ["model.stages=1", "model.blocks=1"] if model == "cnn" else []
    overrides = [f"model={model}", "model.width=4", *small, "training.steps=1", *typed]
    summary = trained("data=digits", "checkpoint=off", *overrides)
    table = EscapingConsole(file=io.StringIO(), width=200)
    table.print(RunSummaryTable(summary, tmp_path))
    text = table.file.getvalue()
    assert text.count("BatchNorm normalises each micro-batch by itself") == is_named
    assert ("training.micro_batch" in text) is is_named


@pytest.mark.parametrize("weights", [None, torch.tensor([0.2, 5.0])])
def test_a_loss_whose_micro_batches_have_another_gradient_is_named(
    weights: torch.Tensor | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A weighted mean divides by the weights of the samples in it."""
    objective = CustomObjective(torch.nn.CrossEntropyLoss(weights), "weighted", "loss_fn")
    typed = "data=cancer", "training.steps=1", "training.micro_batch=11"
    with opened(*typed, given=Components(objective=objective)) as run:
        assert [choice.key for choice in run.choices if choice.is_notice] == (
            [] if weights is None else ["training.micro_batch"]
        )
    is_said = "training.micro_batch: 11: the loss is not a mean over samples" in caplog.text
    assert is_said is (weights is not None)


@pytest.mark.parametrize("place", ["constructor", "forward"])
def test_gradients_that_user_code_leaves_off_are_named(
    place: str, my_package: None, caplog: pytest.LogCaptureFixture
) -> None:
    typed = (*OURS, "data=cancer", "model._target_=my_package.GradientsOff", "training.steps=3")
    try:
        with pytest.raises(RuntimeError, match="does not require grad"):  # noqa: SIM117
            trained(*typed, f"+model.place={place}", "optimization=none")
    finally:
        torch.set_grad_enabled(True)
    assert f"{place} " in caplog.text and "leaves torch's gradients off" in caplog.text


def test_a_relative_data_path_with_chdir_is_named(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(40)))
    typed = ("data=tabular", "data.target=y", "hydra.job.chdir=true", "training.steps=1")
    failed = command(tmp_path, *typed, "data.path=table.csv", "device=cpu")
    assert failed.returncode == 2
    assert "hydra.job.chdir=true: data.path=table.csv is relative" in failed.stderr


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["optimizer.lr=${schedule.warmup}", "schedule.warmup=${nope}"], "schedule.warmup"),
        (["name=${nope}"], "name"),
        (["model._target_=${nope}"], "model._target_"),
        (["objective.metrics=[${nope}]"], "objective.metrics[0]"),
        (["experiment=${nope}"], "experiment"),
    ],
)
def test_an_interpolation_that_fails_names_the_key(overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError, match="Interpolation key 'nope' not found") as refused:
        compose(overrides)
    assert refused.value.key == key


@pytest.mark.parametrize("flags", [(), ("--cfg", "job", "--resolve")])
def test_an_interpolation_that_fails_in_a_command_names_the_key(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    failed = command(tmp_path, *flags, "job.kind=${nope}")
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: job.kind: Interpolation key 'nope' not found")


DATA = ["data=cancer", "model=mlp", "training.steps=2"]


def work(run: Run) -> str:
    """What threads are chosen by; who else is busy on the machine comes after it."""
    (reason,) = [c.reason for c in run.choices if c.key == "device.threads"]
    assert "MFLOP" in reason
    return reason.partition(",")[0]


def test_a_batch_size_above_the_sample_count_uses_all_samples_and_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with build(compose([*DATA, "training.batch_size=1000"])) as run:
        there = run.train.samples(0)
        asked = ["training.batch_size=100000", "training.micro_batch=90000"]
    with build(compose([*DATA, f"training.batch_size={there}", "optimization=basic"])) as run:
        expected = work(run)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "runner"):
        with build(compose([*DATA, *asked, "optimization=basic"])) as run:
            assert run.micro_batch == run.train.samples(0) == there
            assert run.train.steps_per_epoch == 1
            assert work(run) == expected  # figures are of the batch that runs
    (said,) = [m for m in caplog.messages if "training.batch_size" in m]
    assert "training.batch_size=100000" in said and f"{there} training samples" in said
