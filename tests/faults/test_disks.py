"""Disks that are full, read-only or gone under a run, by real mounts; in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from runner.core import fork_server
from tests.faults import processes
from tests.faults.modes import COMMON, TABLE
from tests.runs import read, wait_until

LONG = [*COMMON, *TABLE, "training.steps=1000000", "checkpoint.every=40"]
LIMIT_S = 240

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not fork_server.available(), reason="forks on Linux alone"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount"),
]


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")


@contextmanager
def mounted(place: Path, *arguments: str) -> Iterator[None]:
    mount(*arguments, str(place))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=False)


def saved(run: Path) -> Callable[[], bool]:
    return lambda: len(list(run.glob("checkpoints/step_*"))) >= 2


def last_line(folder: Path) -> str:
    lines = (folder / "console.log").read_text().splitlines()
    assert not any("Traceback" in line for line in lines)
    return lines[-1]


@pytest.fixture(autouse=True)
def _server() -> None:
    processes.serve()


def test_a_file_system_that_becomes_read_only_ends_the_run_with_code_5(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = processes.start(tmp_path, [*LONG, f"hydra.run.dir={run}"])
    wait_until(saved(run), process)
    place = run / "checkpoints"
    with mounted(place, "--bind", str(place)):
        busy = ["mount", "-o", "remount,bind,ro", str(place)]
        wait_until(
            lambda: not subprocess.run(busy, capture_output=True, check=False).returncode, process
        )
        assert process.wait(LIMIT_S) == 5
        assert "not written: Read-only file system" in last_line(tmp_path)
        found = read(run)
    assert found["status"] == "failed" and "Read-only file system" in found["reason"]
    assert found["faults"] == {"checkpoint": 3}


def test_a_folder_on_a_read_only_file_system_is_refused_in_one_line(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with mounted(run, "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs"):
        process = processes.start(tmp_path, [*LONG, f"hydra.run.dir={run}"])
        assert process.wait(LIMIT_S) == 5
    assert "hydra.run.dir" in last_line(tmp_path) and "Read-only" in last_line(tmp_path)


def test_a_full_disk_ends_the_run_with_code_5_and_it_resumes_with_free_space(
    tmp_path: Path,
) -> None:
    disk, run = tmp_path / "disk", tmp_path / "disk" / "run"
    disk.mkdir()
    with mounted(disk, "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        process = processes.start(tmp_path, [*LONG, f"hydra.run.dir={run}"])
        wait_until(saved(run), process)
        with suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        assert process.wait(LIMIT_S) == 5
        assert "not written: No space left on device" in last_line(tmp_path)
        assert read(run)["status"] == "failed"
        (disk / "filler").unlink()
        step = max(int(path.name[5:]) for path in run.glob("checkpoints/step_*"))
        again = [*LONG, f"training.steps={step + 5}", f"hydra.run.dir={run}"]
        assert processes.start(tmp_path, again).wait(LIMIT_S) == 0
        assert read(run)["status"] == "done" and read(run)["steps"] == step + 5


def test_a_deleted_run_folder_is_created_again_and_the_run_continues(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = processes.start(tmp_path, [*LONG, f"hydra.run.dir={run}"])
    wait_until(saved(run), process)
    shutil.move(run, tmp_path / "away")  # at once, and not file by file while others are written
    shutil.rmtree(tmp_path / "away")
    wait_until(saved(run), process)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(LIMIT_S) == 143
    assert read(run)["status"] == "interrupted"
    assert "a checkpoint is written" in last_line(tmp_path)
    rows = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    trained = [row["step"] for row in rows if row["split"] == "train"]
    assert trained == [*range(10, 10 * len(trained) + 1, 10)]  # those of before as well
