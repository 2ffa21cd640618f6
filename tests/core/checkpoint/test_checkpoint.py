import os
from pathlib import Path

import pytest
import torch

from runner.core.checkpoint.checkpointer import Checkpointer, storage
from runner.core.errors import CheckpointError, StorageError
from tests.runs import opened, trained


def model_at(step: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(6.0).reshape(2, 3) + step, "bias": torch.full((3,), float(step))}


def save(checkpointer: Checkpointer, *steps: int, best: int = 0) -> None:
    for step in steps:
        checkpointer.save(step, model_at(step), {"step": step}, step == best)
    checkpointer.close()


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "checkpoints"))


def test_the_newest_ones_and_the_best_are_kept(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=2)
    assert checkpointer.last is None and checkpointer.best is None
    save(checkpointer, 1, 2, 3, 4, 5, best=2)
    assert names(tmp_path) == ["best", "last", "step_00000002", "step_00000004", "step_00000005"]
    assert checkpointer.last == "checkpoints/step_00000005"
    assert checkpointer.best == "checkpoints/step_00000002"
    assert os.readlink(tmp_path / "checkpoints/best") == "step_00000002"
    save(checkpointer, 6, best=6)
    assert names(tmp_path) == ["best", "last", "step_00000005", "step_00000006"]


def test_saving_the_same_step_again_replaces_it_and_it_stays_the_best(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=2)
    save(checkpointer, 1, 2, best=2)
    checkpointer.save(2, {"weight": torch.zeros(1)}, {}, False)
    checkpointer.close()
    assert names(tmp_path) == ["best", "last", "step_00000001", "step_00000002"]
    assert checkpointer.restore().model["weight"].tolist() == [0.0]
    assert checkpointer.best == "checkpoints/step_00000002"


def test_leftovers_of_a_crash_are_swept(tmp_path):
    save(Checkpointer(tmp_path, keep=2), 1)
    stale = tmp_path / "checkpoints/.tmp-step_00000002"
    stale.mkdir()
    (stale / "model.safetensors").write_bytes(b"half")
    (tmp_path / "checkpoints/.tmp-last").symlink_to("step_00000009")
    assert Checkpointer(tmp_path, keep=2).restore().step == 1
    assert names(tmp_path) == ["last", "step_00000001"]


def test_going_on_from_an_earlier_step_sets_the_later_ones_aside(tmp_path):
    save(Checkpointer(tmp_path, keep=2), 10, 20, 30, best=30)
    checkpointer = Checkpointer(tmp_path, keep=2)
    assert checkpointer.restore(tmp_path / "checkpoints/step_00000020").step == 20
    save(checkpointer, 25)
    assert checkpointer.restore().step == 25
    assert checkpointer.last == "checkpoints/step_00000025" and checkpointer.best is None
    aside = tmp_path / "checkpoints/abandoned_step_00000030"
    assert checkpointer.restore(aside).step == 30  # nothing good is lost


def test_the_newest_checkpoint_is_the_one_with_the_highest_step_and_not_by_time(tmp_path):
    save(Checkpointer(tmp_path, keep=3), 9, 10, 100)
    for age, step in enumerate((100, 10, 9)):
        os.utime(tmp_path / f"checkpoints/step_{step:08d}", (age, age))
    assert Checkpointer(tmp_path, keep=3).restore().step == 100


def test_restore_takes_a_run_its_checkpoints_or_one_step(tmp_path):
    save(Checkpointer(tmp_path, keep=3), 1, 2, best=1)
    root = tmp_path / "checkpoints"
    reader = Checkpointer(None, keep=1)
    assert reader.restore(tmp_path).step == 2
    assert reader.restore(root).step == 2
    assert reader.restore(root / "step_00000001").step == 1
    assert reader.restore(root / "best").step == 1
    (root / "step_00000001").rename(tmp_path / "kept")
    assert reader.restore(tmp_path / "kept").step == 1
    assert reader.restore() is None
    with pytest.raises(CheckpointError, match="no checkpoint found"):
        reader.restore(tmp_path / "elsewhere")


def test_another_torch_version_is_reported(tmp_path, monkeypatch):
    save(Checkpointer(tmp_path, keep=1), 1)
    written = torch.__version__
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    restored = Checkpointer(tmp_path, keep=1).restore()
    assert restored.step == 1
    assert any(f"torch {written}, now 9.9.0" in text for text in restored.differences)


def test_what_cannot_be_kept_is_named_and_nothing_is_written(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1)
    with pytest.raises(TypeError, match=r"state\.hooks\[0\]\.close is a builtins\.function"):
        checkpointer.save(1, {}, {"hooks": [{"close": lambda: None}]}, False)
    checkpointer.close()
    assert not (tmp_path / "checkpoints").exists()


def test_a_fault_in_the_background_reaches_the_training_thread(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise ValueError("a fault of ours")

    monkeypatch.setattr(storage, "replace_folder", fail)
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, model_at(1), {}, False)
    with pytest.raises(ValueError, match="a fault of ours"):
        checkpointer.wait()
    assert names(tmp_path) == [] and not checkpointer.faults


def test_one_failure_is_forgiven_unless_it_is_the_last_save(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=2)
    root = tmp_path / "checkpoints"
    root.write_text("")
    checkpointer.save(1, model_at(1), {}, False)
    checkpointer.wait()
    root.unlink()
    save(checkpointer, 2)
    assert checkpointer.faults == {"checkpoint": 1} and checkpointer.restore().step == 2
    (root / ".old-step_00000002").write_text("")  # a file where a folder would be put aside
    checkpointer.save(2, model_at(2), {}, False)
    with pytest.raises(StorageError, match=r"checkpoints: the last checkpoint was not written"):
        checkpointer.close()
    assert checkpointer.restore().step == 2


def test_who_uses_a_run_gets_its_best_one_and_the_newest_where_that_is_damaged(tmp_path):
    save(Checkpointer(tmp_path, keep=3), 1, 2, 3, best=2)
    reader = Checkpointer(None, keep=1, best_first=True)
    assert reader.restore(tmp_path).step == 2
    assert reader.restore(tmp_path / "checkpoints/last").step == 3
    assert Checkpointer(None, keep=1).restore(tmp_path).step == 3
    (tmp_path / "checkpoints/step_00000002/state.pt").write_bytes(b"")
    restored = reader.restore(tmp_path)
    assert restored.step == 3 and "step_00000002" in restored.warnings[0]


def test_a_run_that_continues_has_no_more_checkpoints_than_it_keeps(tmp_path):
    typed = ["data=cancer", "checkpoint.every=2", "monitoring.every=2"]
    trained(*typed, "training.steps=8", "checkpoint.keep=3", folder=tmp_path)
    assert len(list(tmp_path.glob("checkpoints/step_*"))) >= 3
    more = ["training.steps=12", "checkpoint.keep=1", "checkpoint.resume=auto"]
    with opened(*typed, *more, folder=tmp_path):
        best, last, *kept = names(tmp_path)
        assert kept[-1] == "step_00000008"
        assert set(kept) == {os.readlink(tmp_path / "checkpoints" / link) for link in (best, last)}
