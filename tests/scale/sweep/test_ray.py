"""On a local Ray cluster: jobs of several processes, workers that are killed, an interrupted sweep.

Some minutes: a cluster takes ten seconds to start.
"""

import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from tests.faults.processes import marked
from tests.runs import wait_until

from .conftest import environment, only, read

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason="hydra-ray-launcher is missing")
pytestmark = pytest.mark.slow
JOBS = ["data=cancer", "optimization=none", "device=cpu", "device.threads=1", "checkpoint.every=50"]
RANKS = ["distributed=ddp", "distributed.processes=2"]


class RaySweep:
    """A sweep on Ray, and all processes that come of it."""

    def __init__(self, folder: Path, *typed: str) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        command = [sys.executable, "-m", "runner", "-m", "hydra/launcher=ray", *JOBS, *typed]
        with open(folder / "out", "w") as out:
            self.process = subprocess.Popen(
                command, cwd=folder, env={**environment(), "MARK": self.mark}, stdout=out,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def wait(self) -> tuple[int, str]:
        try:
            code = self.process.wait(300)
        finally:
            self.process.kill()
        return code, (self.folder / "out").read_text()

    def wait_for_checkpoint(self, job: int) -> None:
        pattern = f"outputs/sweeps/*/*/{job}/checkpoints/step_*[1-9]*/manifest.json"
        wait_until(lambda: any(self.folder.glob(pattern)), self.process, 200)

    def worker(self, job: int) -> psutil.Process:
        """The Ray worker in which the job, or its rank 0, was started."""
        pid = int((only(self.folder) / str(job) / ".lock").read_text().split()[0])
        lineage = [psutil.Process(pid), *psutil.Process(pid).parents()]
        return next(process for process in lineage if process.cmdline()[0].startswith("ray::"))

    def assert_nothing_is_left(self) -> None:
        wait_until(lambda: not marked("MARK", self.mark), seconds=20)


def rows(folder: Path) -> dict[str, tuple[str, str]]:
    every = read(only(folder), "comparison.json")["rows"]
    return {row["name"]: (row["status"], row["reason"]) for row in every}


def test_a_killed_worker_is_a_row_and_the_other_jobs_run_on(tmp_path):
    sweep = RaySweep(tmp_path, "seed=0,1,2", "training.steps=400", *RANKS)
    sweep.wait_for_checkpoint(1)
    sweep.worker(1).kill()
    code, out = sweep.wait()
    assert code == 7 and "1 of 3 jobs failed" in out, out
    results = rows(tmp_path)
    assert [results[f"seed={n}"][0] for n in range(3)] == ["done", "killed", "done"]
    assert "its Ray worker was lost: WorkerCrashedError" in results["seed=1"][1]
    sweep.assert_nothing_is_left()


def test_a_job_that_ray_begins_again_goes_on_from_its_checkpoint(tmp_path):
    again = "+hydra.launcher.ray.remote.max_retries=1"
    sweep = RaySweep(tmp_path, "seed=0", "training.steps=4000", again)
    sweep.wait_for_checkpoint(0)
    sweep.worker(0).kill()
    code, out = sweep.wait()
    assert code == 0, out
    summary = read(only(tmp_path) / "0", "summary.json")
    assert (summary["status"], summary["steps"]) == ("done", 4000)
    (how,) = (c["reason"] for c in summary["choices"] if c["key"] == "checkpoint.resume")
    assert how.startswith("continues at step") and how != "continues at step 0"


def test_a_sweep_that_is_ended_leaves_checkpoints_and_no_process(tmp_path):
    sweep = RaySweep(tmp_path, "seed=0,1", "training.steps=400000")
    sweep.wait_for_checkpoint(0)
    sweep.process.send_signal(signal.SIGTERM)
    code, out = sweep.wait()
    assert code == 143, out
    status, reason = rows(tmp_path)["seed=0"]
    assert status == "interrupted" and "step" in reason, out
    sweep.assert_nothing_is_left()
