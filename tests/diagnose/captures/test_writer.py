"""What a run writes of a bad step: bounded, whole, and nothing at all when it is healthy."""

import shutil
from pathlib import Path

import pytest
import torch

from runner import train
from runner.core.captures.manifest import CapturedWeights, list_captures
from runner.core.train.step import forward_backward
from runner.diagnose.replay.reopen import open_capture, reopen_run
from tests import runs
from tests.diagnose.captures.captured_runs import OURS, TRUSTED, Taker, trained

POISON = "+data.poison=[50,90]"
SHORT = "training.steps=8"


def test_a_healthy_run_writes_nothing_and_ends_in_the_bits_of_one_that_captures_nothing(
    tmp_path: Path,
) -> None:
    weights = []
    for enabled in ("true", "false"):
        capture = f"debug.capture.enabled={enabled}"
        with runs.opened(*OURS, SHORT, capture, folder=tmp_path / enabled) as run:
            assert (run.captures is not None) == (enabled == "true")
            train(run)
            weights.append(run.model.state_dict())
    assert not (tmp_path / "true" / "debug" / "captures").exists()
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def test_the_first_bad_steps_are_kept_and_no_more_also_after_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    bounded = [POISON, "debug.capture.at_most=2"]
    summary = trained(tmp_path, None, *bounded)
    shown = [record for record in caplog.records if not getattr(record, "live", False)]
    lines = [record.getMessage() for record in shown]
    fault = next(i for i, line in enumerate(lines) if "values that are NaN" in line)
    assert "captured; to inspect it" in lines[fault + 1]  # after the line about the step
    assert sum("captured; to" in line for line in lines) == 1
    assert summary.skipped_steps > 2
    kept = [fault["capture"] for fault in runs.faults(tmp_path, "non_finite")]
    assert str(list_captures(tmp_path)[0].relative_to(tmp_path)) == kept[0]
    assert len(list_captures(tmp_path)) == 2
    again = trained(tmp_path, None, *bounded, "training.steps=48", "checkpoint.resume=auto")
    assert again.skipped_steps > summary.skipped_steps
    assert len(list_captures(tmp_path)) == 2

    capture = open_capture(tmp_path / kept[0])  # what was bad, and where it is from
    first = runs.faults(tmp_path, "non_finite")[0]
    assert (capture.manifest.kind, capture.step) == ("non_finite", first["steps"][0])
    assert capture.loss is not None and capture.loss != capture.loss
    bad = [i for i, x in enumerate(capture.batch[0]) if x.isnan().any()]
    assert bad and {capture.samples[i] for i in bad} <= {50, 90}
    assert capture.manifest.config["data"]["arguments"] == {"poison": [50, 90]}
    text = (capture.path / "manifest.json").read_text()
    assert "trusted" not in text and str(tmp_path) not in text


def test_without_a_checkpoint_before_the_step_its_batch_is_captured_without_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path, Taker([6]), "checkpoint.enabled=false", SHORT)
    (capture,) = map(open_capture, list_captures(tmp_path))
    assert capture.manifest.weights is CapturedWeights.later
    assert (capture.manifest.checkpoint, capture.model, capture.update) == (None, None, None)
    assert sorted(path.name for path in capture.path.iterdir()) == ["manifest.json", "state.pt"]
    with reopen_run(capture, trusted=TRUSTED) as (run, batch):
        assert torch.equal(batch[0], capture.batch[0]) and run.progress.step == 5
        forward_backward(run, batch)
    assert "repeated with newly initialised ones" in caplog.text


def test_a_linked_checkpoint_outlives_pruning_and_takes_no_room_before(tmp_path: Path) -> None:
    trained(tmp_path, Taker([6]), "checkpoint.keep=1", "training.steps=40")
    (capture,) = map(open_capture, list_captures(tmp_path))
    assert capture.manifest.checkpoint == 0
    assert not (tmp_path / "checkpoints" / "step_00000000").exists()
    assert capture.checkpoint().step == 0


def test_a_folder_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "debug").mkdir()
    (tmp_path / "debug" / "captures").write_text("in the way")
    hook = Taker([3, 5])
    assert trained(tmp_path, hook, SHORT).status == "done"
    assert hook.taken == {3: None, 5: None}
    warned = [r for r in caplog.records if r.levelname == "WARNING" and "job=replay" in r.message]
    assert len(warned) == 1


def test_what_does_not_fit_the_bound_is_not_written_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook = Taker([3, 5, 13])
    assert trained(tmp_path, hook, "debug.capture.mb=0.0001").status == "done"
    assert hook.taken == {3: None, 5: None, 13: None}
    lines = [r for r in caplog.records if "debug.capture.mb" in r.getMessage()]
    assert sum(r.getMessage().startswith("step 3 ") for r in lines) == 1
    assert sum(r.levelname == "WARNING" for r in lines) == 1
    assert not list_captures(tmp_path)


def test_an_exception_in_the_model_is_captured_with_its_batch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="my own mistake"):
        trained(tmp_path, None, "+model.fails=5")
    (capture,) = map(open_capture, list_captures(tmp_path))
    assert (capture.step, capture.manifest.kind, capture.loss) == (5, "exception", None)
    assert capture.manifest.weights is CapturedWeights.then
    (fault,) = runs.faults(tmp_path)
    assert fault["capture"] == "debug/captures/step_00000005" and "Traceback" in fault["traceback"]


def test_a_capture_made_before_a_crash_is_not_made_again(tmp_path: Path) -> None:
    trained(tmp_path, Taker([13]))
    before = (list_captures(tmp_path)[0] / "manifest.json").stat().st_mtime_ns
    for step in (16, 24):  # as if they had never been: step 13 comes again
        shutil.rmtree(tmp_path / "checkpoints" / f"step_{step:08d}")
    hook = Taker([13])
    trained(tmp_path, hook, "checkpoint.resume=auto")
    assert hook.taken == {13: "debug/captures/step_00000013"}
    assert (list_captures(tmp_path)[0] / "manifest.json").stat().st_mtime_ns == before
