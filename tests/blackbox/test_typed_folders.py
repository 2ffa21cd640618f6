"""Runs and sweeps in typed folders outside outputs/, with relative paths."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.runs import QUICK, command, read, wait_until
from tests.scale.sweep.conftest import start_sweep

SHORT = (*QUICK, "data=cancer", "model=mlp", "training.validate_every=10", "checkpoint.every=5")


def damage(folder: Path, step: int) -> None:
    path = folder / f"checkpoints/step_{step:08d}/model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("link", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_in_a_typed_relative_folder_goes_on_from_an_older_checkpoint(
    tmp_path: Path, link: bool
) -> None:
    if link:
        (tmp_path / "disk").mkdir()
        (tmp_path / "mine").symlink_to("disk")
    assert not command(tmp_path, *SHORT, "training.steps=20", "hydra.run.dir=mine/r").returncode
    damage(tmp_path / "mine/r", 20)
    done = command(tmp_path, "checkpoint.resume=mine/r", "training.steps=25")
    assert done.returncode == 0, done.stderr
    assert "continuing mine/r" in done.stderr and "continuing after step 15" in done.stderr
    assert "mine/r/checkpoints/step_00000020/model.safetensors: damaged" in done.stderr
    assert "from mine/r/checkpoints/step_00000015" in done.stderr
    assert "checked in a sandboxed process" in done.stderr
    assert read(tmp_path / "mine/r")["steps"] == 25
    strict = command(tmp_path, "checkpoint.resume=mine/r", "training.steps=30", "security=strict")
    assert strict.returncode == 3 and "security=strict" in strict.stderr


@pytest.mark.slow
def test_an_interrupted_sweep_in_a_typed_relative_folder_is_continued(tmp_path: Path) -> None:
    typed = ["seed=0,1", *SHORT, "training.steps=2000", "hydra.sweep.dir=mine"]
    typed += ["sweep.benchmark_s=0"]
    sweep = start_sweep(tmp_path, *typed)
    wait_until((tmp_path / "mine/1/checkpoints/last").exists, sweep)
    sweep.send_signal(signal.SIGTERM)
    assert sweep.wait(60) == 143
    damage(tmp_path / "mine/1", read(tmp_path / "mine/1")["steps"])
    again = command(tmp_path, "-m", *typed)
    assert again.returncode == 0, again.stderr
    jobs = read(tmp_path / "mine", "sweep.json")["jobs"]
    assert [job["status"] for job in jobs] == ["done", "done"]
    assert "from its checkpoint" in again.stderr
    assert "damaged" in (tmp_path / "mine/1/console.log").read_text()
