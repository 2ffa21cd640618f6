"""A reopened step is the step: same weights, same batch, same draws, so the same bits."""

import random
import shutil
from pathlib import Path

import pytest
import torch

from runner.core.captures.manifest import CapturedWeights, list_captures
from runner.core.errors import ConfigError, SecurityError
from runner.core.train.step import forward_backward
from runner.diagnose.replay.reopen import open_capture, reopen_run, with_weights
from tests.core.checkpoint.test_checkpoint_damage import forge
from tests.diagnose.captures.captured_runs import SKIPPED, TRUSTED, Taker, taken, trained

CASES = {
    "average, accumulation": ["optimization=basic", "optimizer.ema=0.9", "training.micro_batch=7"],
    "python's generator in the model": ["+model.draws=true", "data.workers=2"],
    "fp16, momentum": ["optimization=amp", "optimization.amp.dtype=fp16", "optimizer=sgd"],
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES.keys())
def test_loss_gradients_and_weights_are_those_of_the_run_bit_by_bit(
    overrides: list[str], tmp_path: Path
) -> None:
    moved, stayed, hook = taken(tmp_path, *overrides)
    assert moved.manifest.weights is CapturedWeights.again
    assert stayed.manifest.weights is CapturedWeights.then
    assert moved.skipped == [11]
    draws = "+model.draws=true" in overrides
    assert stayed.as_it_was is not draws  # then the state of the generator is of a later step
    for capture in (moved, stayed):
        random.seed(0)
        with reopen_run(capture, trusted=TRUSTED) as (run, batch):
            assert run.progress.step == capture.step - 1 and run.folder is None
            weights = zip(run.model.parameters(), hook.weights[capture.step], strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in weights)
            step = forward_backward(run, batch)
            assert (float(step.loss), float(step.grad_norm)) == (capture.loss, capture.grad_norm)
        again = open_capture(capture.path)  # nothing of it was changed by looking
        assert torch.equal(again.batch[0], capture.batch[0])


def test_a_buffer_that_no_checkpoint_holds_is_in_the_capture(tmp_path: Path) -> None:
    trained(tmp_path, Taker([17], SKIPPED), "+model.saved=false")
    (capture,) = map(open_capture, list_captures(tmp_path))
    assert float(capture.buffers["seen"]) == 15
    with reopen_run(capture, trusted=TRUSTED) as (run, batch):
        assert float(forward_backward(run, batch).loss) == capture.loss


def test_the_loss_scale_is_that_of_the_overflow_and_not_what_it_fell_to(tmp_path: Path) -> None:
    scale = f"optimization.amp.initial_scale={2.0**60}"
    fp16 = ["optimization=amp", "optimization.amp.dtype=fp16", scale, "training.steps=8"]
    trained(tmp_path, Taker([3]), *fp16)
    capture = open_capture(list_captures(tmp_path)[0])
    assert (capture.step, capture.manifest.weights) == (3, CapturedWeights.then)
    with reopen_run(capture, trusted=TRUSTED) as (run, batch):
        assert run.update.scale is not None
        assert float(run.update.scale.value) == 2.0**58
        step = forward_backward(run, batch)
        assert float(step.loss) == capture.loss and bool(step.skipped)


def test_a_technique_can_be_left_out_and_the_weights_stay_those_of_the_run(tmp_path: Path) -> None:
    amp = ["optimization.amp.enabled=true", "optimization.amp.dtype=fp16"]
    amp.append("optimization.measure=false")
    off = {"amp", "fused_optimizer"}
    moved, stayed, hook = taken(tmp_path, "optimization=basic", *amp)
    for capture in (moved, stayed):
        with reopen_run(capture, without=off, trusted=TRUSTED) as (run, batch):
            assert not off & {name for name, _ in run.techniques}
            weights = zip(run.model.parameters(), hook.weights[capture.step], strict=True)
            assert all(torch.equal(a, b) for a, b in weights)
            loss = float(forward_backward(run, batch).loss)
            assert loss == pytest.approx(capture.loss, rel=0.01) and loss != capture.loss


def test_what_was_run_again_once_can_be_kept(made: Path, tmp_path: Path) -> None:
    moved, stayed = map(open_capture, list_captures(made))
    assert with_weights(stayed, tmp_path, TRUSTED) is stayed
    once = with_weights(moved, tmp_path / "settled", TRUSTED)
    assert once.as_it_was and once.path == list_captures(tmp_path / "settled")[0]
    assert once.manifest.checkpoint is None
    with reopen_run(once, trusted=TRUSTED) as (run, batch):
        step = forward_backward(run, batch)
        assert (float(step.loss), float(step.grad_norm)) == (moved.loss, moved.grad_norm)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model": {"kind": "mlp", "_target_": "os.system"}}, SecurityError),
        ({"security": {"trusted": ["os", "captured_models"]}}, SecurityError),
        ({"training": {"steps": "many"}}, ConfigError),
    ],
)
def test_a_hostile_config_is_refused(
    made: Path, changes: dict[str, object], error: type[Exception], tmp_path: Path
) -> None:
    folder = shutil.copytree(list_captures(made)[1], tmp_path / list_captures(made)[1].name)
    forge(folder, lambda body: body["config"].update(changes))
    trusted = TRUSTED if error is ConfigError else ["my_package"]
    with pytest.raises(error), reopen_run(open_capture(folder), trusted=trusted):
        raise AssertionError("it was opened")
