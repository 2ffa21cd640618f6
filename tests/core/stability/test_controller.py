"""What is done about a bad step, each in a real run that has one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner import evaluate, train
from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.errors import GaveUp, Interrupted
from runner.core.interfaces.hook import Hook, Verdict
from runner.core.interfaces.run import Run
from runner.core.record.summary import Summary
from runner.core.stability.messages import Decision, share_decision
from runner.core.train.metrics import StepMetricsReader
from tests.core.stability.faulty import (
    LINE,
    NOISY,
    WATCHFUL,
    Change,
    anomalies,
    faulty,
    louder,
    train_faulty,
)
from tests.runs import AtSteps, differences, faults, hook, interrupt, rows, weights

pytestmark = pytest.mark.usefixtures("my_package")

WARM = [*LINE, "training.steps=60"]


def keep_weights(at: Collection[int]) -> tuple[dict[int, dict[str, Tensor]], Hook]:
    """The weights after some steps, and the hook that keeps them."""
    kept: dict[int, dict[str, Tensor]] = {}
    return kept, AtSteps(at, lambda run: kept.update({run.progress.step: weights(run)}))


def times(factor: float) -> Change:
    return lambda output: output * factor


def roll_back(run: Run) -> Verdict:
    return Verdict.ROLLBACK


def ruin_weights(run: Run) -> None:
    with torch.no_grad():
        next(iter(run.model.parameters())).fill_(math.nan)


def ruin_moments(run: Run) -> None:
    next(iter(run.update.optimizer.state.values()))["exp_avg"].fill_(math.nan)


def ruin_statistics(run: Run) -> None:
    next(b for name, b in run.model.named_buffers() if "running_mean" in name).fill_(math.nan)


def fail(run: Run) -> None:
    raise OSError("of a hook")


def test_each_fault_is_named_right_skipped_and_survived(tmp_path: Path) -> None:
    at = {11: times(math.nan), 22: times(1e30), 45: louder, 53: lambda x: x + 1e4}
    with faulty([*WARM, *WATCHFUL], tmp_path, at) as run:
        summary = train(run)
        assert all(torch.isfinite(p).all() for p in run.model.parameters())
    assert (summary.status, summary.skipped_steps) == ("done", 4)
    assert summary.faults == {"non_finite": 2, "spike": 2}
    first, second, third, fourth = (fault["message"] for fault in faults(tmp_path))
    assert (first, second) == ("the loss was nan", "the loss was inf")
    assert third.startswith("the gradient norm was")
    assert fourth.startswith("the loss was 1")
    assert "times the usual value" in fourth
    found = anomalies(tmp_path)
    kinds = {11: "non_finite", 22: "non_finite", 45: "spike", 53: "spike"}
    assert {row["step"]: row["kind"] for row in found} == kinds
    assert {row["action"] for row in found} == {"skipped"}
    assert found[0]["nonfinite"] == {"loss": "nan", "grad_norm": "nan"}
    assert found[2]["grad_norm"] > found[2]["grad_norm_limit"]


def test_a_run_with_a_spike_is_that_without_the_batch(tmp_path: Path) -> None:
    """The device skips it in the very step: nothing of it is left, bit for bit."""
    veto = hook(on_gradients=lambda run, step: Verdict.SKIP if step.number == 45 else None)
    ends = []
    for at, hooks in (({45: louder}, []), ({}, [veto])):
        past, keeps = keep_weights([60])
        summary = train_faulty([*WARM, *WATCHFUL], None, at, *hooks, keeps)
        ends.append(past)
        assert summary.skipped_steps == 1
    assert summary.faults == {}
    assert differences(*ends) == []


def test_switched_off_nothing_is_skipped_but_it_is_written_down(tmp_path: Path) -> None:
    off = [*WARM, *WATCHFUL, "stability=off"]
    assert train_faulty(off, tmp_path, {45: louder}).faults == {}
    off.append("debug.capture.enabled=false")
    with pytest.raises(GaveUp, match="the weights are not finite after step 60"):
        train_faulty(off, tmp_path / "b", {45: times(1e30)})
    summary = Summary.read(tmp_path / "b")
    assert (summary.status, summary.skipped_steps) == ("failed", 0)
    assert summary.faults["non_finite"] == 1
    assert summary.faults["weights"] == 15


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_nan_in_the_weights_rolls_back_to_a_finite_checkpoint(where: str, tmp_path: Path) -> None:
    """The checkpoint of step 15 would have been one of NaN."""
    folder = tmp_path if where == "disk" else None
    with faulty([*WARM, "checkpoint.every=5", "monitoring.every=10"], folder) as run:
        run.hooks.append(AtSteps(12, ruin_weights))
        summary = train(run)
        every = list(run.history.faults.values())
        assert run.update.lr_at(0) == pytest.approx(0.5 * 0.01)
    assert math.isfinite(summary.metrics["val/loss"])
    assert summary.faults == {"weights": 8, "rollback": 1} and summary.skipped_steps == 8
    lost = [step for fault in every if fault.kind == "weights" for step in fault.steps]
    assert lost == [*range(13, 21)] and every[-1].steps == [20]
    assert every[-1].message.startswith("rolled back to step 10")


def test_a_checkpoint_that_is_not_finite_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That of step 15 has finite weights and a NaN in the optimizer's state."""
    summary = train_faulty([*WARM, "checkpoint.every=5"], tmp_path, {}, AtSteps(15, ruin_moments))
    assert (summary.status, summary.faults["rollback"]) == ("done", 1)
    assert "step 15 is not usable: the optimizer's state is not finite" in caplog.text
    assert "rolled back to step 10" in caplog.text


@pytest.mark.parametrize(("action", "error"), [(interrupt, Interrupted), (fail, OSError)])
def test_no_rollback_goes_to_a_checkpoint_of_an_interruption_or_an_exception(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    action: Callable[[Run], None],
    error: type[Exception],
) -> None:
    """It rolls back to that of step 10, as the uninterrupted run does."""
    overrides = [*WARM, "checkpoint.every=10", "checkpoint.resume=auto"]
    with pytest.raises(error):
        train_faulty(overrides, tmp_path, {}, AtSteps(13, action))
    assert (tmp_path / "checkpoints/step_00000013").is_dir()
    summary = train_faulty(overrides, tmp_path, {}, AtSteps(16, ruin_weights))
    assert (summary.status, summary.faults["rollback"]) == ("done", 1)
    assert "rolled back to step 10" in caplog.text


def test_statistics_of_a_bad_batch_are_restored_and_lost_ones_roll_back_at_once(
    tmp_path: Path,
) -> None:
    """Inputs of 1e25 have a variance of Inf and normalise to 0."""
    run_of_60 = [*NOISY, "training.steps=60", "checkpoint.every=10"]
    for name, spoils, first, counts in (
        ("restored", Loud(23), (23, "skipped"), {"buffers": 1}),
        ("lost", AtSteps(23, ruin_statistics), (24, "rolling back"), {"buffers": 7, "rollback": 1}),
    ):
        with faulty(run_of_60, tmp_path / name) as run:
            run.hooks.append(spoils)
            summary = train(run)
            assert all(b.isfinite().all() for b in run.model.buffers())
        assert (summary.status, summary.faults) == ("done", counts)
        bad = anomalies(tmp_path / name)
        assert {row["kind"] for row in bad} == {"buffers"}
        assert (bad[0]["step"], bad[0]["action"]) == first


def test_a_run_that_gave_up_at_its_last_step_gives_up_again_and_is_never_done(
    tmp_path: Path,
) -> None:
    overrides = [*LINE, "training.steps=30", "checkpoint.resume=auto"]
    for _ in range(2):
        with pytest.raises(GaveUp, match="the weights are not finite"):
            train_faulty(overrides, tmp_path, {}, AtSteps(range(2, 31), ruin_weights))
        assert Summary.read(tmp_path).status == "failed"
        kept = Checkpointer(None, keep=1).restore(tmp_path)
        assert kept is not None and kept.step < 30
        assert all(weight.isfinite().all() for weight in kept.model.values())


def test_a_rollback_without_a_finite_checkpoint_gives_up() -> None:
    with faulty(WARM) as run:
        ruin_weights(run)
        with pytest.raises(GaveUp, match="no good checkpoint to roll back to"):
            train(run)
    assert run.progress.step == 10


def test_a_roll_back_leaves_the_streak_and_does_not_go_to_a_checkpoint_of_it(
    tmp_path: Path,
) -> None:
    """Those of steps 45 to 55 hold the weights of step 44, from which there was no way on."""
    at = dict.fromkeys(range(45, 61), times(math.nan))
    often = ["checkpoint.every=5", "checkpoint.keep=1", "training.steps=65"]
    often.append("debug.capture.enabled=false")
    with faulty([*WARM, *often], tmp_path, at) as run:
        past, keeps = keep_weights([40, 44, 60, 61])
        run.hooks.append(keeps)
        train(run)
        said = [f.message for f in run.history.faults.values() if f.kind == "rollback"]
    assert said[0].startswith("rolled back to step 40")
    assert not differences(past[60], past[44])  # on_step is before the roll-back
    assert differences(past[60], past[40])


def test_a_checkpoint_from_among_bad_steps_is_not_gone_back_to_later_either(tmp_path: Path) -> None:
    """That of step 48 is the newest when a hook asks at step 70."""
    at = dict.fromkeys(range(41, 51), times(math.nan))
    every = ["checkpoint.every=24", "checkpoint.keep=9", "training.steps=70"]
    with faulty([*WARM, *every, "stability.max_consecutive_skips=3"], tmp_path, at) as run:
        past, keeps = keep_weights([24, 48])
        run.hooks += [keeps, AtSteps(70, roll_back)]
        assert train(run).faults["rollback"] == 2
        assert not differences(past[24], weights(run))
    assert differences(past[24], past[48])


def test_a_roll_back_at_the_last_step_is_what_is_validated_and_saved(tmp_path: Path) -> None:
    """The last, partial stretch is judged before, and not after."""
    steps = ["training.steps=47", "checkpoint.every=10", "stability.max_consecutive_skips=0"]
    steps.append("stability.rollback_lr_factor=0.3")
    with faulty([*LINE, *steps], tmp_path, {45: times(math.nan)}) as run:
        summary = train(run)
        assert summary.faults["rollback"] == 1
        assert evaluate(run).metrics == summary.metrics
        saved = run.checkpointer.restore()
        assert saved is not None
        assert saved.step == 47
        assert saved.state["update"]["backoff"] == run.update.backoff == 0.3
        assert differences(saved.model, weights(run)) == []


FP16 = ["optimization=amp", "optimization.amp.dtype=fp16"]


@pytest.mark.parametrize("every", [1, 7])
def test_a_scale_that_only_overflows_is_halved_until_a_step_is_taken_and_by_a_bad_gradient_once(
    tmp_path: Path, every: int
) -> None:
    fp16 = [*FP16, "optimization.amp.initial_scale=1e12", "training.steps=50"]
    with faulty(
        [*NOISY, *fp16, f"monitoring.every={every}"], tmp_path, {45: times(math.nan)}
    ) as run:
        summary = train(run)
        scale = float(run.update.scale.value)  # type: ignore[union-attr]
    assert summary.status == "done" and set(summary.faults) == {"overflow", "non_finite"}
    assert 18 < summary.faults["overflow"] < 40  # of 10 in a row that bad steps may be
    assert summary.faults["non_finite"] == 1
    assert summary.skipped_steps == sum(summary.faults.values())
    assert scale == pytest.approx(1e12 / 2**summary.skipped_steps)


@pytest.mark.parametrize("every", [1, 7])
def test_an_overflow_at_a_scale_below_1_is_a_gradient_that_is_not_finite_and_counts(
    tmp_path: Path, every: int
) -> None:
    fp16 = [*FP16, "optimization.amp.initial_scale=8", "training.steps=60"]
    with faulty([*NOISY, *fp16, f"monitoring.every={every}"], tmp_path) as run:
        next(run.model.parameters()).register_hook(lambda gradient: gradient * math.inf)
        with pytest.raises(GaveUp):
            train(run)
        kinds = [row.kind for row in run.stability.anomalies]
    # scales 8, 4, 2 and 1; then as many bad steps as may be skipped, and the roll-back
    assert kinds[:15] == ["overflow"] * 4 + ["non_finite"] * 11
    assert run.progress.rollbacks == 2


class Loud(Hook):
    """Inputs of one step beyond the square root of the largest float."""

    def __init__(self, step: int) -> None:
        self.step = step

    def due(self, step: int) -> bool:
        return step == self.step

    @contextmanager
    def around(self, run: Run) -> Iterator[None]:
        norm = next(m for m in run.model.modules() if isinstance(m, torch.nn.BatchNorm1d))
        with torch.no_grad():
            handle = norm.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 1e25,))
        yield
        handle.remove()


def test_a_lasting_change_of_the_loss_is_the_new_baseline_and_never_ends_the_run(
    tmp_path: Path,
) -> None:
    """After 10 spikes in a row, from the end of the next report; also without any skip allowed."""
    at = dict.fromkeys(range(61, 201), lambda x: x + 1e3)
    long = [*LINE, *WATCHFUL, "training.steps=200", "checkpoint.every=20"]
    for option, last in (("default", 90), ("strict", 80)):
        summary = train_faulty([*long, f"stability={option}"], tmp_path / option, at)
        assert (summary.status, summary.faults.keys()) == ("done", {"spike"})
        bad = [row for row in anomalies(tmp_path / option) if row["step"] <= 100]
        assert [row["step"] for row in bad] == [*range(61, last + 1)]
        accepted = [row["step"] for row in bad if row["action"] != "skipped"]
        assert accepted == [61 if option == "strict" else 71]


def test_strict_stops_at_the_first_bad_step_with_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(GaveUp, match="step 14: the loss was nan; not rolled back"):
        train_faulty([*WARM, "stability=strict"], tmp_path, {14: times(math.nan)})
    summary = Summary.read(tmp_path)
    assert (summary.status, summary.steps) == ("failed", 20)
    assert (tmp_path / "checkpoints/step_00000020").is_dir()


def test_on_anomaly_raise_ends_the_run_at_the_first_that_is_not_finite(tmp_path: Path) -> None:
    overrides = [*WARM, *WATCHFUL, "stability=off", "debug.on_anomaly=raise"]
    with pytest.raises(GaveUp, match=r"step 44: the loss was nan \(debug\.on_anomaly=raise\)"):
        train_faulty(overrides, tmp_path, {35: louder, 44: times(math.nan)})
    assert (tmp_path / "checkpoints/step_00000050").is_dir()


def test_a_hook_that_asks_too_often_is_refused() -> None:
    with faulty(WARM) as run:
        run.hooks.append(AtSteps(range(60), roll_back))
        with pytest.raises(GaveUp, match="a hook requested a rollback.*rolled back 2 times"):
            train(run)
    assert run.progress.step == 3


def test_a_rollback_for_what_one_process_lost_names_the_cause_in_all() -> None:
    lost = Decision("buffers", 7, "a buffer is not finite", since=6)
    for decisions, rank in (([None, lost], 0), ([None, lost], 1), ([lost, lost], 0)):
        suffix = "" if decisions[rank] else " (in process 1)"
        assert share_decision(decisions[rank], decisions, 7) == replace(
            lost, message=lost.message + suffix
        )


ROUGH = [*LINE, *WATCHFUL, "training.steps=90", "checkpoint.every=25", "monitoring.every=5"]
ROUGH.append("stability.max_consecutive_skips=1")
TROUBLE = dict.fromkeys((37, 38, 63, 83), louder) | dict.fromkeys((52, 61, 62), times(math.nan))


class Late(StepMetricsReader):
    """Stretches arrive when the next one is closed, as they do from an accelerator."""

    class Arrived:
        def synchronize(self) -> None:
            pass

    def close(self, seconds: float | Callable[[], float]) -> None:
        super().close(seconds)
        self.windows[-1].ready = self.Arrived()  # type: ignore[assignment]


def rough(folder: Path, late: bool, *hooks: Hook) -> tuple[Summary, Any]:
    with faulty([*ROUGH, "checkpoint.resume=auto"], folder, TROUBLE) as run:
        if late:
            reader = Late(run.device.torch)
            reader.load(run.reader.state())
            run.reader = reader
        run.hooks += hooks
        summary = train(run)
        return summary, [run.stability.state(), weights(run)]


@pytest.mark.parametrize(
    ("late", "cuts"), [(False, (37, 62, 77)), pytest.param(True, (43, 66), marks=pytest.mark.slow)]
)
def test_a_run_cut_off_around_its_trouble_ends_in_the_same_bits(
    late: bool, cuts: tuple[int, ...], tmp_path: Path
) -> None:
    summary, end = rough(tmp_path / "whole", late)
    assert summary.faults["rollback"] == 1
    # read late, the second bad norm is already the new baseline
    assert summary.faults["spike"] > (1 if late else 2)
    for cut in cuts:
        resumed = tmp_path / str(cut)
        with pytest.raises(Interrupted):
            rough(resumed, late, AtSteps(cut, interrupt))
        assert differences(rough(resumed, late)[1], end) == []
        assert rows(tmp_path / "whole") == rows(resumed)
