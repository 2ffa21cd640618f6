"""On a SLURM cluster of one node: arrays of jobs, ranks as tasks, jobs that are put back or killed.

All in one test session of some minutes; the daemons are those of Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.slurm import cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(cluster.missing()), reason=cluster.missing() or "there is a cluster"),
]
SHORT = (*runs.QUICK, "data=cancer", "model=mlp", "device.threads=1", "distributed.timeout_s=120")
ARRAY = ("-m", "hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=30")
RANKS = ("distributed=ddp", "hydra.launcher.tasks_per_node=2")
LONG = ("training.steps=4000", "checkpoint.every=100", "training.validate_every=2000")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    pytest.importorskip("submitit")
    # a socket's path has at most 107 bytes
    with cluster.started(tmp_path_factory.mktemp("slurm")) as env:
        yield {**env, "PYTHONPATH": str(runs.TESTS.parent)}


def start(folder: Path, env: dict[str, str], *typed: str) -> subprocess.Popen[str]:
    with open(folder / "out", "w") as out:
        return subprocess.Popen(
            [*typed], cwd=folder, env=env, text=True, stdout=out, stderr=subprocess.STDOUT
        )


def runner(folder: Path, env: dict[str, str], *typed: str) -> subprocess.Popen[str]:
    return start(folder, env, sys.executable, "-m", "runner", *typed, *SHORT)


def ended(process: subprocess.Popen[str], folder: Path) -> tuple[int, str]:
    try:
        code = process.wait(400)
    finally:
        process.kill()
    return code, (folder / "out").read_text()


def rows(folder: Path) -> list[dict[str, Any]]:
    (file,) = (folder / "outputs" / "sweeps").glob("*/*/comparison.json")
    found: list[dict[str, Any]] = runs.read(file.parent, file.name)["rows"]
    return found


def wait_for(folder: Path, pattern: str, process: subprocess.Popen[str]) -> Path:
    runs.wait_until(lambda: [*folder.glob(pattern)], process, 200)
    return min(folder.glob(pattern))


def jobs(env: dict[str, str]) -> list[str]:
    asked = ["squeue", "-h", "--array", "-o", "%i"]
    return subprocess.run(asked, env=env, text=True, capture_output=True).stdout.split()


def signal(env: dict[str, str], job: str, name: str) -> None:
    subprocess.run(["scancel", f"--signal={name}", job], env=env, check=True)


def test_srun_starts_the_ranks_of_one_run(slurm, tmp_path):
    ranks = ["srun", "-n2", sys.executable, "-m", "runner", "distributed=ddp"]
    code, out = ended(start(tmp_path, slurm, *ranks, *SHORT, "training.steps=20"), tmp_path)
    assert code == 0, out
    assert out.count("cancer-mlp  done") == 1
    (file,) = (tmp_path / "outputs" / "runs").glob("*/*/summary.json")
    assert runs.read(file.parent)["distributed"]["world_size"] == 2


def test_an_array_of_runs_of_several_ranks_is_one_comparison(slurm, tmp_path):
    process = runner(tmp_path, slurm, *ARRAY, *RANKS, "seed=0,1", "training.steps=20")
    code, out = ended(process, tmp_path)
    assert code == 0, out
    both = rows(tmp_path)
    assert [row["status"] for row in both] == ["done", "done"]
    assert [row["summary"]["distributed"]["world_size"] for row in both] == [2, 2]
    assert both[0]["summary"]["metrics"] != both[1]["summary"]["metrics"]


def test_a_job_that_is_put_back_into_the_queue_comes_to_the_same_loss(slurm, tmp_path):
    (tmp_path / "cut").mkdir()
    (tmp_path / "whole").mkdir()
    cut = runner(tmp_path / "cut", slurm, *ARRAY, *RANKS, *LONG, "hydra.launcher.max_num_timeout=1")
    wait_for(tmp_path / "cut", "outputs/sweeps/*/*/0/checkpoints/step_*/manifest.json", cut)
    signal(slurm, jobs(slurm)[0], "USR2")
    code, out = ended(cut, tmp_path / "cut")
    assert code == 0, out
    whole = runner(tmp_path / "whole", slurm, "distributed=ddp", "distributed.processes=2", *LONG)
    assert ended(whole, tmp_path / "whole")[0] == 0
    (file,) = (tmp_path / "whole" / "outputs" / "runs").glob("*/*/summary.json")
    (row,) = rows(tmp_path / "cut")
    assert row["status"] == "done"
    assert row["summary"]["metrics"] == runs.read(file.parent)["metrics"]
    (log,) = (tmp_path / "cut").glob("outputs/sweeps/*/*/0/run.log")
    assert "interrupted by SIGUSR2" in log.read_text()


def test_jobs_that_are_cancelled_or_killed_say_so_and_the_launcher_does_not_wait_for_them(
    slurm, tmp_path
):
    two_at_a_time = "hydra.launcher.array_parallelism=2"
    typed = (*ARRAY, two_at_a_time, "seed=0,1,2", "training.steps=300000", "checkpoint.every=100")
    process = runner(tmp_path, slurm, *typed)
    for job in (0, 1):
        wait_for(tmp_path, f"outputs/sweeps/*/*/{job}/checkpoints/step_*/manifest.json", process)
    array = jobs(slurm)[0].partition("_")[0]
    subprocess.run(["scancel", f"{array}_2"], env=slurm, check=True)  # which waits in the queue
    (lock,) = tmp_path.glob("outputs/sweeps/*/*/1/.lock")
    os.kill(int(lock.read_text().split()[0]), 9)  # as the kernel does when memory runs out
    subprocess.run(["scancel", f"{array}_0"], env=slurm, check=True)
    code, out = ended(process, tmp_path)
    assert code == 7 and "3 of 3 jobs failed" in out, out
    cancelled, killed, waiting = rows(tmp_path)
    assert cancelled["status"] == "interrupted" and "SIGTERM" in cancelled["reason"]
    assert killed["status"] == waiting["status"] == "killed"
    assert killed["summary"]["steps"] > 0 and "without a result" in waiting["reason"]
