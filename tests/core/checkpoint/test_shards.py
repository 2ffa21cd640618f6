"""A checkpoint in shards is whole or not there, and no damage to one of them goes unseen."""

import json
import pickle
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import TCPStore

from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.checkpoint.folder import RestoredCheckpoint
from runner.core.checkpoint.manifest import NAME
from runner.core.errors import SecurityError
from runner.scale.distributed.commit import CheckpointCommit
from tests.core.checkpoint.test_checkpoint_damage import forge, forge_file

SHARDS = tuple(f"shard_0000{rank}_of_00002.safetensors" for rank in range(2))
WEIGHT = torch.arange(12.0).reshape(3, 4)


class Process:
    """What one of two processes has of a run, and how it saves it; both are in this one."""

    def __init__(self, rank: int, port: int, folder: Path) -> None:
        wait = timedelta(seconds=20)
        store = TCPStore("127.0.0.1", port, 2, rank == 0, wait, wait_for_workers=False)
        own = {"place": SimpleNamespace(attempt=0), "config": SimpleNamespace(timeout_s=20.0)}
        self.world: Any = SimpleNamespace(store=store, rank=rank, size=2, lost=False, **own)
        self.rows = WEIGHT.split(2)[rank]
        self.checkpointer = Checkpointer(folder, keep=3, writes=rank == 0)
        self.checkpointer.commit = CheckpointCommit(self.world)

    def save(self, step: int) -> None:
        rows = self.rows + step
        entries = {0: {"step": torch.tensor(float(step)), "exp_avg": -rows, "none": None}}
        optimizer = {"state": entries, "param_groups": [{"lr": 0.1, "params": [0]}]}
        state = {"step": step, "update": {"optimizer": optimizer, "average": [rows * 2]}}
        model = {"weight": rows, "tied": rows, "statistic": torch.tensor([float(step)])}
        self.checkpointer.save(step, model, state, False, ("weight", "tied"))


@pytest.fixture
def processes(tmp_path: Path) -> list[Process]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return [Process(rank, port, tmp_path) for rank in range(2)]


def save(processes: list[Process], *steps: int) -> None:
    for step in steps:
        for process in processes:
            process.save(step)
    for process in processes:
        process.checkpointer.close()


def restored(folder: Path) -> RestoredCheckpoint:
    found = Checkpointer(None, keep=1).restore(folder)
    assert found is not None
    return found


def test_the_whole_model_and_its_state_are_read_from_shards(
    processes: list[Process], tmp_path: Path
) -> None:
    save(processes, 1, 2)
    found = restored(tmp_path)
    assert found.step == 2 and not found.warnings
    for name in ("weight", "tied"):
        assert torch.equal(found.model[name], WEIGHT + 2)
    assert found.model["statistic"] == 2
    update = found.state["update"]
    entries = update["optimizer"]["state"][0]
    assert torch.equal(entries["exp_avg"], -WEIGHT - 2)
    assert entries["step"] == 2 and entries["none"] is None
    assert torch.equal(update["average"][0], (WEIGHT + 2) * 2)
    held = load_file(tmp_path / "checkpoints/last" / SHARDS[1])
    assert all(len(tensor) == 1 for tensor in held.values())  # a process writes its rows alone


@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_cut_or_missing_shard_is_named_and_the_one_before_taken(
    processes: list[Process], tmp_path: Path, rank: int
) -> None:
    save(processes, 1, 2)
    path = tmp_path / "checkpoints/step_00000002" / SHARDS[rank]
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), whole + b"\0", b"", None):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        else:
            path.symlink_to(path.with_name(SHARDS[1 - rank]))
        found = restored(tmp_path)
        assert found.step == 1 and torch.equal(found.model["weight"], WEIGHT + 1)
        assert SHARDS[rank] in found.warnings[0]
    path.unlink()
    assert restored(tmp_path).step == 1


def test_a_shard_that_is_more_than_data_is_refused(
    processes: list[Process], tmp_path: Path
) -> None:
    save(processes, 1, 2)
    forge_file(tmp_path / "checkpoints/step_00000002", SHARDS[1], pickle.dumps({"weight": print}))
    with pytest.raises(SecurityError, match=SHARDS[1]):
        restored(tmp_path)


def test_shards_that_do_not_fit_each_other_are_no_checkpoint(
    processes: list[Process], tmp_path: Path
) -> None:
    save(processes, 1, 2)
    folder = tmp_path / "checkpoints/step_00000002"
    rows = load_file(folder / SHARDS[1])
    wide = {name: torch.zeros(1, 5) for name in rows}
    more = {**rows, "model.other": torch.zeros(1, 4)}
    for content in (wide, more, {**rows, "optimizer.7.exp_avg": torch.zeros(1, 4)}):
        save_file(content, tmp_path / "forged")
        forge_file(folder, SHARDS[1], (tmp_path / "forged").read_bytes())
        found = restored(tmp_path)
        assert found.step == 1 and "shards are inconsistent" in found.warnings[0]


def test_a_manifest_names_the_shards_of_every_process(
    processes: list[Process], tmp_path: Path
) -> None:
    save(processes, 1, 2)
    folder = tmp_path / "checkpoints/step_00000002"
    body = json.loads((folder / NAME).read_text())
    files = {name: written for name, written in body["files"].items() if name != SHARDS[1]}
    forge(folder, files=files)
    found = restored(tmp_path)
    assert found.step == 1 and "lists" in found.warnings[0]


def test_without_the_part_of_a_process_that_is_lost_there_is_no_checkpoint(
    processes: list[Process], tmp_path: Path
) -> None:
    save(processes, 1)
    first = processes[0]
    first.save(2)  # the other has ended before it saved
    first.world.lost = True
    first.checkpointer.wait()
    assert first.checkpointer.faults == {"checkpoint": 1}
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_00000001", "last"}
    assert restored(tmp_path).step == 1


def test_what_a_process_could_not_write_is_a_failed_save_of_the_first(
    processes: list[Process], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(processes, 1)
    first, other = processes
    away = Checkpointer(tmp_path / "not_shared", keep=3, writes=False)
    away.commit, other.checkpointer = other.checkpointer.commit, away
    first.save(2), other.save(2)
    first.checkpointer.wait(), other.checkpointer.wait()
    assert "process 1: No such file or directory" in caplog.text
    assert first.checkpointer.faults == {"checkpoint": 1}
    assert restored(tmp_path).step == 1
    (tmp_path / "checkpoints").rename(tmp_path / "kept")
    (tmp_path / "checkpoints").write_text("in the way")
    first.save(3), other.save(3)  # nor does the other wait for a folder that will not be
    first.checkpointer.wait(), other.checkpointer.wait()
    assert "process 0 could not make its folder" in caplog.text
