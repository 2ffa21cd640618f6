"""The loop: exact accumulation, a guard that survives bad batches, early stopping, hooks."""

from __future__ import annotations

import math
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner import build, evaluate, train
from runner.core.build.setup import Components
from runner.core.errors import ConfigError, DataError, GaveUp, Interrupted, StorageError, UsageError
from runner.core.interfaces.hook import Hook, Report, Step, Verdict
from runner.core.interfaces.run import Run
from runner.core.objectives.classification import ClassificationObjective
from runner.core.record.summary import Summary
from runner.core.train.step import forward_backward
from tests.runs import NOISY, OURS, AtSteps, config, differences, hook, opened, trained, weights

pytestmark = pytest.mark.usefixtures("my_package")


def gradients(overrides: list[str]) -> tuple[list[torch.Tensor], float]:
    with opened(*overrides) as run:
        step = forward_backward(run, next(run.train.batches(0)))
        return [p.grad for p in run.model.parameters() if p.grad is not None], float(step.loss)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data=digits", "model=mlp", "training.batch_size=50"],
        ["data=cancer", "model=mlp", "training.batch_size=50", "objective.label_smoothing=0.1"],
        [*OURS, "data._target_=my_package.Masked", "model=gpt", "model.width=16", "model.heads=2",
         "training.batch_size=23"],
    ],
    ids=["classes", "smoothed", "masked tokens"],
)  # fmt: skip
def test_accumulated_gradients_are_the_large_batchs(overrides: list[str]) -> None:
    large, loss = gradients(overrides)
    small, same = gradients([*overrides, "training.micro_batch=7"])
    assert same == pytest.approx(loss, rel=1e-5)
    for a, b in zip(large, small, strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=1e-4)


def test_data_that_is_never_finite_ends_in_giving_up_after_a_checkpoint(tmp_path: Path) -> None:
    overrides = [*NOISY, f"+data.poison={list(range(120))}".replace(" ", ""), "training.steps=200",
                 "training.validate_every=1000", "stability.max_consecutive_skips=5"]  # fmt: skip
    with pytest.raises(GaveUp, match="rolled back 2 times"):
        trained(*overrides, folder=tmp_path)
    assert GaveUp.exit_code == 4
    summary = Summary.read(tmp_path)
    assert (summary.status, summary.faults["rollback"]) == ("failed", 2)
    assert summary.skipped_steps == summary.steps < 200
    assert (tmp_path / "checkpoints" / "last").exists()


def test_early_stopping_ends_the_run_and_says_why(tmp_path: Path) -> None:
    overrides = ["data=cancer", "optimizer.lr=0", "training.epochs=50", "training.patience=2"]
    with opened(*overrides, folder=tmp_path) as run:
        summary = train(run)
    assert summary.status == "stopped"
    best = f"{summary.best:.4f}"
    assert summary.reason == f"val/accuracy has not improved on {best} for 2 validations"
    assert summary.steps == 3 * run.validate_every


def test_a_validation_whose_loss_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    with opened("data=cancer", "training.epochs=2", "stability=off", folder=tmp_path) as run:
        with torch.no_grad():
            next(iter(run.model.parameters())).fill_(math.nan)
        with pytest.raises(GaveUp, match="the weights are not finite"):
            train(run)
    summary = Summary.read(tmp_path)
    assert summary.best is None and "val/accuracy" in summary.metrics
    assert summary.faults["validation_not_finite"] == summary.steps // run.validate_every > 1
    assert not (tmp_path / "checkpoints" / "best").exists()


def test_a_monitored_metric_that_is_not_finite_is_named(caplog: pytest.LogCaptureFixture) -> None:
    asked = ["objective.metrics=[my_package.undefined]", "training.monitor=val/undefined"]
    with opened(*OURS, "data=cancer", *asked, "training.monitor_mode=max") as run:
        assert train(run).best is None
    assert "val/undefined is nan; it cannot be the best" in caplog.text


@pytest.mark.parametrize("asked", ["val/acuracy", "accuracy", "train/loss"])
def test_a_metric_that_there_cannot_be_is_refused_before_the_first_step(asked: str) -> None:
    near = "" if asked == "train/loss" else r"did you mean training.monitor=val/accuracy\? "
    with pytest.raises(
        ConfigError, match=f"{near}available: val/loss, val/accuracy, val/f1, val/auroc$"
    ):
        trained("data=cancer", "training.steps=2", f"training.monitor={asked}")


class Own(ClassificationObjective):
    """Somebody's own metrics, which nobody knows of beforehand."""

    def metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return {"loss": 0.5, "f1": 0.75}


def test_a_metric_of_somebody_s_own_is_asked_for_when_there_are_some(tmp_path: Path) -> None:
    overrides, given = ["data=cancer", "training.steps=2"], Components(objective=Own(2))
    assert trained(*overrides, "training.monitor=val/f1", given=given).best == 0.75
    wrong = config(*overrides, "training.monitor=val/f2", "training.monitor_mode=max")
    says = (
        r"did you mean training.monitor=val/f1\? available: .*; stopped at step 1 of 2; a check.*"
    )
    with build(wrong, tmp_path, given) as run, pytest.raises(ConfigError, match=says):
        train(run)
    assert (tmp_path / "checkpoints" / "step_00000001").is_dir()


class Spy(Hook):
    """Writes down what it is told, and answers gradients of some steps with a verdict."""

    every = 3

    def __init__(self, verdicts: dict[int, Verdict]) -> None:
        self.seen, self.verdicts = list[Any](), verdicts

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        self.seen.append("enter")
        yield
        self.seen.append("leave")

    def on_gradients(self, run: Run, step: Step) -> Verdict | None:
        return self.verdicts.get(step.number)

    def on_step(self, run: Run, step: Step) -> None:
        self.seen.append((step.number, bool(step.skipped)))

    def on_report(self, run: Run, report: Report) -> None:
        self.seen.append(("report", report.first, report.last))


def test_hooks_are_asked_at_their_own_pace_and_a_skip_and_a_stop_are_heeded() -> None:
    spy = Spy({6: Verdict.SKIP, 12: Verdict.STOP})
    summary = trained("data=cancer", "training.steps=100", hooks=[spy])
    steps = [(3, False), (6, True), (9, False), ("report", 1, 10), (12, True), ("report", 11, 12)]
    assert spy.seen == ["enter", *steps, "leave"]
    assert (summary.status, summary.steps, summary.skipped_steps) == ("stopped", 12, 2)


def test_a_misspelt_event_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match="unknown event 'on_gradient'"):
        hook(on_gradient=lambda run, step: None)


def spoil_and_roll_back(run: Run) -> Verdict:
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(math.nan)
    return Verdict.ROLLBACK


@pytest.mark.parametrize("every", [5, 1000])  # from a checkpoint, and from the very start
def test_a_rollback_brings_the_weights_back_and_lowers_the_rate(every: int) -> None:
    overrides = ["data=cancer", "training.steps=40", f"checkpoint.every={every}"]
    with opened(*overrides, "training.validate_every=1000", "schedule=constant") as run:
        run.hooks.append(AtSteps(12, spoil_and_roll_back))
        summary = train(run)
        assert run.update.lr_at(0) == pytest.approx(0.5 * run.update.lr)
    assert summary.faults == {"rollback": 1}
    assert summary.metrics["val/loss"] < 1.0


def test_a_skip_that_a_hook_asks_for_is_no_fault_and_no_overflow() -> None:
    fp16 = ["optimization=amp", "optimization.amp.dtype=fp16"]
    with opened("data=cancer", "training.steps=9", *fp16) as run:
        run.hooks.append(Spy({3: Verdict.SKIP}))
        summary = train(run)
        assert run.update.scale is not None and float(run.update.scale.value) == 65536.0
    assert (summary.skipped_steps, summary.faults) == (1, {})


def test_validation_sees_the_averaged_weights_and_leaves_the_live_ones_and_the_mode() -> None:
    with opened(*NOISY, "training.steps=30", "optimizer.ema=0.9") as run:
        summary = train(run)
        live = weights(run)
        assert run.model.training
        assert evaluate(run).metrics == summary.metrics
        assert run.model.training
        assert differences(weights(run), live) == []
        with torch.no_grad():
            for parameter, average in zip(run.update.parameters, run.update.average, strict=True):
                parameter.copy_(average)
        assert evaluate(run).metrics == summary.metrics


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("keys:\n\tone\n\ttwo"), "RuntimeError: keys: one two"),
        (DataError("sample 7: no number\nTraceback (most …"), "sample 7: no number"),
    ],
)
def test_an_error_in_the_users_model_is_a_failed_run_with_its_reason(
    tmp_path: Path, error: Exception, reason: str
) -> None:
    def fails(inputs: torch.Tensor) -> torch.Tensor:
        raise error

    with opened("data=cancer", "optimization=amp", folder=tmp_path) as run:
        run.forward = fails
        with pytest.raises(type(error)):
            train(run)
    summary = Summary.read(tmp_path)
    assert (summary.status, summary.reason) == ("failed", reason)


def test_a_technique_that_falls_back_while_running_is_an_error_under_strict() -> None:
    overrides = ["data=cancer", "training.steps=30", "optimizer.name=RAdam"]
    with pytest.raises(ConfigError, match=r"optimization\.fused_optimizer"):
        trained(*overrides, "optimization=basic", "optimization.strict=true")


class Around(Hook):
    """Around step 5: an error of its own once the update is made, or one that it keeps."""

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps

    def due(self, step: int) -> bool:
        return step == 5

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        try:
            yield
        except ValueError:
            return
        raise ConfigError("debug.hooks", "that is enough")

    def on_gradients(self, run: Run, step: Step) -> None:
        if self.keeps:
            raise ValueError("mine")


def test_a_step_whose_hook_fails_after_the_update_is_not_made_twice(tmp_path: Path) -> None:
    overrides = ["data=cancer", "training.steps=12"]
    with opened(*overrides) as run:
        train(run)
        straight = weights(run)
    with opened(*overrides, folder=tmp_path) as run:
        run.hooks.append(Around(keeps=False))
        with pytest.raises(ConfigError, match="that is enough"):
            train(run)
        assert (run.progress.step, run.saved_step) == (5, 5)
    with opened(*overrides, "checkpoint.resume=auto", folder=tmp_path) as run:
        train(run)
        assert differences(weights(run), straight) == []


def test_a_hook_that_keeps_an_error_of_the_step_to_itself_is_named() -> None:
    with opened("data=cancer", "training.steps=12") as run:
        run.hooks.append(Around(keeps=True))
        with pytest.raises(
            UsageError, match=r"Around\.around swallowed .*ValueError: mine"
        ) as raised:
            train(run)
    assert isinstance(raised.value.__cause__, ValueError)
    assert run.progress.step == 4


def fill_disk(run: Run) -> None:
    """Let no file grow, as on a full disk."""
    run.checkpointer.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))


def fail(run: Run) -> None:
    raise ValueError("the first")


def interrupt_twice(run: Run) -> None:
    """Press Ctrl-C twice, which saves nothing."""
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("error", "action"),
    [(StorageError, str), (Interrupted, interrupt_twice), (ValueError, fail)],
)
def test_the_summary_of_a_run_on_a_full_disk_does_not_say_running(
    tmp_path: Path, error: type[Exception], action: Callable[[Run], object]
) -> None:
    overrides = ["data=cancer", "training.steps=12", "checkpoint.every=2"]
    overrides.append("training.validate_every=12")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(error):  # the first one, though checkpoints cannot be written either
            hooks = [AtSteps(3, fill_disk), AtSteps(9, action)]
            trained(*overrides, folder=tmp_path, hooks=hooks)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    summary = Summary.read(tmp_path)
    status = "interrupted" if error is Interrupted else "failed"
    assert (summary.status, summary.reason, summary.name) == (status, "", "cancer-mlp")


def test_a_summary_that_cannot_be_written_ends_a_run_at_its_start_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = ["data=cancer", "training.steps=12"]
    with opened(*overrides, folder=tmp_path / "later") as run:
        blocker = tmp_path / "later" / ".summary.json.tmp"
        run.hooks.append(AtSteps(range(13), lambda run: blocker.mkdir(exist_ok=True)))
        assert train(run).status == "done"
    assert "summary.json: not written" in caplog.text
    assert Summary.read(tmp_path / "later").status == "done"  # in the file of before
    with opened(*overrides, folder=tmp_path / "start") as run:
        (tmp_path / "start/.summary.json.tmp").mkdir()
        with pytest.raises(StorageError, match=r"summary\.json: not written"):
            train(run)
