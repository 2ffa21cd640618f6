"""Checkpoints and a capture of the version before names were saved with optimizer states.

`earlier_version.tar.xz` has checkpoints of steps 5 and 16 of a run of 16 steps, a capture of step
5, and in `ends.safetensors` the state of that run at step 16, and at step 24 after it was resumed
by that version with `training.epochs=3`. `earlier_sweep.tar.xz` has a finished sweep of the version
whose modules were not in rooms.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runner import build, compose, train
from runner.core.config.groups import CONF
from runner.core.interfaces.run import Run
from runner.core.train.step import forward_backward
from runner.diagnose.replay.reopen import open_capture, reopen_run
from tests import forks

ARCHIVE = Path(__file__).parent / "earlier_version.tar.xz"
SWEEP_ARCHIVE = Path(__file__).parent / "earlier_sweep.tar.xz"
RUN = [
    "data=cancer", "model=mlp", "model.width=3", "training.batch_size=60", "schedule=cosine",
    "optimization=none", "optimizer.ema=0.9", "optimizer.groups=[{match: '*.bias', lr: 0.005}]",
    "device.threads=1", "monitoring.progress=false", "monitoring.tensorboard=false",
    "checkpoint.keep=9", "checkpoint.every=5", "training.validate_every=6",
    "checkpoint.resume=auto",
]  # fmt: skip
SWEEP = [
    "data=cancer", "model.width=3", "training.steps=3", "checkpoint.enabled=false",
    "optimization=none", "optimizer.lr=0.1,0.01", "monitoring.tensorboard=false",
]  # fmt: skip


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    shutil.unpack_archive(ARCHIVE, tmp_path, filter="data")
    return tmp_path


def is_same_arithmetic(earlier: Path) -> bool:
    """Whether a run that was never interrupted ends here in the bits of the earlier version's."""
    expected = load_file(earlier / "ends.safetensors")
    with build(compose([*RUN, "training.epochs=2"]), earlier / "whole") as run:
        train(run)
        weights = run.model.state_dict()
        return all(torch.equal(value, expected[f"16.{name}"]) for name, value in weights.items())


def assert_end(run: Run, earlier: Path, exact: bool) -> None:
    expected, step = load_file(earlier / "ends.safetensors"), run.progress.step
    actual = {f"{step}.{name}": tensor for name, tensor in run.model.state_dict().items()}
    actual |= {f"{step}.average.{i}": tensor for i, tensor in enumerate(run.update.average)}
    for number, entries in run.update.optimizer.state_dict()["state"].items():
        actual |= {f"{step}.state.{number}.{key}": value for key, value in entries.items()}
    wanted = {name: tensor for name, tensor in expected.items() if name.startswith(f"{step}.")}
    assert actual.keys() == wanted.keys()
    tolerance = 0.0 if exact else 1e-5  # kernels of another processor round otherwise
    for name, tensor in wanted.items():
        torch.testing.assert_close(actual[name], tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kept", "epochs", "end"), [(5, 2, 16), (16, 3, 24)])
def test_an_earlier_checkpoint_resumes_to_the_same_end_and_one_line_says_by_position(
    kept: int, epochs: int, end: int, earlier: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exact = is_same_arithmetic(earlier)
    caplog.set_level("INFO", "runner")
    caplog.clear()
    for folder in (earlier / "run/checkpoints").iterdir():
        if folder.name != f"step_{kept:08d}":
            shutil.rmtree(folder)
    with build(compose([*RUN, f"training.epochs={epochs}"]), earlier / "run") as run:
        assert (run.progress.step, run.total_steps) == (kept, end)
        train(run)
        assert_end(run, earlier, exact)
    assert caplog.text.count("are assigned by position") == 1


def test_an_earlier_checkpoint_continues_at_its_sample_with_another_batch_size(
    earlier: Path,
) -> None:
    shutil.rmtree(earlier / "run/checkpoints/step_00000016")
    other = ["training.batch_size=100", "training.epochs=2"]
    with build(compose([*RUN, *other]), earlier / "run") as run:
        assert run.train.segments[-1][:4] == (5, 0, 300, 100)
        assert run.total_steps == 5 + 2 + 5  # 155 samples are left of 455, then an epoch
        assert train(run).epochs == 2.0


def test_an_earlier_capture_reopens_to_the_same_loss_and_gradient_norm(earlier: Path) -> None:
    capture = open_capture(earlier / "capture/step_00000005")
    with reopen_run(capture) as (run, batch):
        step = forward_backward(run, batch)
    numbers = (float(step.loss), float(step.grad_norm))  # rounded by another machine's kernels
    assert numbers == pytest.approx((capture.loss, capture.grad_norm), rel=1e-5, abs=0)


def test_an_earlier_sweep_is_found_and_its_jobs_run_again_as_the_code_changed(
    tmp_path: Path,
) -> None:
    shutil.unpack_archive(SWEEP_ARCHIVE, tmp_path, filter="data")
    (folder,) = (tmp_path / "outputs/sweeps").glob("*/*")
    summaries = [(folder / number / "summary.json").read_bytes() for number in "01"]
    repeated = forks.run(tmp_path, ("-m", *SWEEP), {**os.environ, "PYTHONPATH": str(CONF.parent)})
    assert repeated.returncode == 0, repeated.stderr
    assert [*(tmp_path / "outputs/sweeps").glob("*/*")] == [folder]
    for number, summary in zip("01", summaries, strict=True):
        assert (folder / ".earlier" / f"{number}-1" / "summary.json").read_bytes() == summary
        assert (folder / number / "summary.json").read_bytes() != summary
