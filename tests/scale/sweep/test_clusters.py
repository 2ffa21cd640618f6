"""Launchers of clusters: what has to be there before a sweep starts."""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.utils import JobStatus
from omegaconf import OmegaConf

from runner.core.errors import UsageError
from runner.core.record.summary import Summary
from runner.scale.sweep import cluster_launchers
from runner.scale.sweep.cluster_launchers import adapt_launcher, launch_on_ray

LAUNCHER = "hydra_plugins.hydra_submitit_launcher.submitit_launcher"
DISABLED = "#!/bin/sh\necho Slurm accounting storage is disabled >&2\nexit 1\n"


@pytest.mark.parametrize(
    ("script", "problem"),
    [("", "No such file"), (DISABLED, "accounting storage is disabled"), ("#!/bin/sh\n", "")],
)
def test_a_submitit_sweep_needs_a_working_sacct(
    script: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = pytest.importorskip("submitit.core.core")
    monkeypatch.setattr(core.Job, "results", core.Job.results)  # which is replaced
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    if script:
        (tmp_path / "sacct").write_text(script)
        (tmp_path / "sacct").chmod(0o755)
    if not problem:
        adapt_launcher(f"{LAUNCHER}.SlurmLauncher")
        return
    with pytest.raises(UsageError, match="hydra/launcher=submitit_slurm: ") as refused:
        adapt_launcher(f"{LAUNCHER}.SlurmLauncher")
    assert problem in str(refused.value) and "sbatch --array=0-2" in str(refused.value)
    adapt_launcher(f"{LAUNCHER}.LocalLauncher")  # which asks no scheduler


class LostWorker(Exception):
    """As Ray raises for a worker that was killed."""


class Ray:
    """The public functions of Ray, in this process; the worker of job 1 is lost."""

    exceptions = SimpleNamespace(RayError=LostWorker)

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.calls: list[str] = []
        self.init = self.shutdown = lambda **options: self.calls.append("init or shutdown")

    def remote(self, **options: Any) -> Any:
        self.options = options
        return lambda function: SimpleNamespace(remote=lambda *args: partial(function, *args))

    def wait(self, jobs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return jobs, []

    def get(self, job: Any) -> Any:
        if job.args[1].hydra.job.num == 1:
            raise LostWorker("killed\nwith more lines")
        return job()


def composed(_: Any, overrides: list[str], folder: Path) -> Any:
    sweep = {"dir": str(folder), "subdir": "${hydra.job.num}"}
    return OmegaConf.create(
        {"hydra": {"job": {"num": 0, "id": ""}, "sweep": sweep, "overrides": {"task": overrides}}}
    )


@pytest.mark.parametrize(("typed", "retries"), [({}, 0), ({"max_retries": 2}, 2)])
def test_ray_retries_no_job_unless_its_key_says_so_and_a_lost_worker_is_a_failed_job(
    typed: dict[str, int], retries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Ray()
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    monkeypatch.setattr(cluster_launchers, "run_job", lambda **given: given["config"])
    loader = SimpleNamespace(load_sweep_config=lambda *given: composed(*given, tmp_path))
    launcher = SimpleNamespace(
        ray_cfg=OmegaConf.create({"init": {}, "remote": typed}),
        task_function=None, config=None, hydra_context=SimpleNamespace(config_loader=loader),
    )  # fmt: skip
    results = launch_on_ray(launcher, [["seed=0"], ["seed=1"], ["seed=2"]], 0)
    assert (ray.options["max_retries"], ray.options["max_calls"]) == (retries, 1)
    assert [result.hydra.job.num for result in (results[0], results[2])] == [0, 2]  # type: ignore[attr-defined]
    assert results[1].status is JobStatus.FAILED
    lost = Summary.read(tmp_path / "1")
    assert (lost.status, lost.reason) == ("killed", "its Ray worker was lost: LostWorker: killed")
    assert ray.calls == ["init or shutdown"] * 2
