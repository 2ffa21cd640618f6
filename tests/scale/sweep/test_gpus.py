"""Jobs that run at the same time are spread over the GPUs. The GPUs are simulated."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner import compose
from runner.core.device import gpu_assignment
from runner.core.device.gpu_assignment import assign_gpus, count_gpus, describe_gpus, list_gpus
from runner.core.schemas.sweep import LauncherConfig
from runner.scale.sweep.job_process import JobProcess
from runner.scale.sweep.job_starter import JobStarter, _count_gpu_processes
from runner.scale.sweep.plan import JobPlan
from runner.scale.sweep.state import Job, Sweep, SweepSession
from tests import runs

from .conftest import only, read

HOOK = """
import os
from contextlib import contextmanager
from runner import Hook

class Visible(Hook):
    @contextmanager
    def session(self, run):
        (run.folder / "visible").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
        yield
"""


@pytest.mark.parametrize(
    ("visible", "count", "gpus"),
    [
        (None, 3, ["0", "1", "2"]),
        (None, 0, []),
        (None, None, []),  # no driver
        ("", 3, []),
        ("-1", 3, []),
        ("NoDevFiles", 3, []),
        ("2,0", 3, ["2", "0"]),
        (" 2 , 0 ", None, ["2", "0"]),
        ("0,-1,1", 3, ["0"]),  # what is invalid hides the rest
        ("0,7,1", 3, ["0"]),
        ("1,01", 3, []),  # what occurs twice hides all
        ("GPU-8f6a,GPU-11", 2, ["GPU-8f6a", "GPU-11"]),
        ("GPU-8f6a,1", 2, ["GPU-8f6a"]),
        ("GPU-8f6a,GPU-8f6a", 2, []),
        ("MIG-a,MIG-b", 1, ["MIG-a", "MIG-b"]),
    ],
)
def test_gpus_are_those_that_cuda_shows_a_process(
    visible: str | None, count: int | None, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_assignment, "count_gpus", lambda: count)
    assert list_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == gpus


def test_the_drivers_library_counts_the_gpus_and_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def get_count(number: Any) -> int:
        number._obj.value = 4
        return 0

    library = SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetCount_v2=get_count,
        nvmlShutdown=lambda: calls.append("closed"),
    )
    monkeypatch.setattr(gpu_assignment.ctypes, "CDLL", lambda name: library)
    assert count_gpus() == 4 and calls == ["closed"]
    library.nvmlInit_v2 = lambda: 9  # no driver
    assert count_gpus() is None
    del library.nvmlInit_v2  # an old one
    assert count_gpus() is None


def test_jobs_take_the_gpus_in_turn_and_each_as_many_as_it_has_processes() -> None:
    gpus = ["4", "5", "6", "7"]
    assert [assign_gpus(gpus, job, 1) for job in range(5)] == [["4"], ["5"], ["6"], ["7"], ["4"]]
    assert [assign_gpus(gpus, job, 2) for job in range(3)] == [["4", "5"], ["6", "7"], ["4", "5"]]
    assert assign_gpus(gpus[:3], 1, 2) == ["6", "4"]
    assert assign_gpus(gpus[:2], 0, 4) == ["4", "5"]
    assert describe_gpus(["4", "GPU-8f"]) == "cuda:4, GPU-8f"


@pytest.mark.parametrize(
    ("typed", "processes"),
    [
        ([], 1),
        (["device=cuda"], 1),
        (["device=cpu"], 0),
        (["device=mps"], 0),
        (["device.index=0"], 0),
        (["device.index=auto"], 1),
        (["distributed=ddp", "distributed.processes=3"], 3),
        (["distributed=fsdp"], 0),  # a process for each GPU
    ],
)
def test_a_job_that_names_no_device_needs_a_gpu_for_each_process(
    typed: list[str], processes: int
) -> None:
    assert _count_gpu_processes(compose(typed)) == processes


def start_jobs(
    gpus: list[str], jobs: int, processes: list[int], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> tuple[list[dict[str, str]], list[Job]]:
    """The environments of jobs with so many processes, and the jobs."""
    environments: list[dict[str, str]] = []
    monkeypatch.setattr(
        JobProcess, "start", lambda command, environment, *_, **__: environments.append(environment)
    )
    sweep = Sweep("", "")
    starter = JobStarter(
        SweepSession(folder, "", sweep=sweep), sweep, LauncherConfig(jobs=jobs), [], False, gpus
    )
    plans = [JobPlan(Job(n, [], str(n)), gpu_processes=p) for n, p in enumerate(processes)]
    for plan in plans:
        starter.start(plan)
    return environments, [plan.job for plan in plans]


def test_each_job_sees_its_gpus_alone_and_its_row_names_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    environments, jobs = start_jobs(["2", "3"], 2, [1, 1, 0, 1], monkeypatch, tmp_path)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == ["2", "3", "2,3", "3"]
    assert [job.device for job in jobs] == ["cuda:2", "cuda:3", "", "cuda:3"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3" and not caplog.records


@pytest.mark.parametrize(
    ("jobs", "processes", "warning"),
    [
        (2, 1, ""),
        (3, 1, "2 GPUs, but 3 jobs at a time need 3: jobs share them; hydra.launcher.jobs=2 gives"),
        (2, 2, "2 GPUs, but 2 jobs at a time need 4: jobs share them; hydra.launcher.jobs=1 gives"),
    ],
)
def test_more_jobs_than_gpus_are_a_warning_once(
    jobs: int, processes: int, warning: str,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    start_jobs(["0", "1"], jobs, [processes] * 3, monkeypatch, tmp_path)
    assert len(caplog.records) == bool(warning)
    assert warning in caplog.text


@pytest.mark.slow
def test_jobs_at_the_same_time_are_on_the_gpus_that_the_sweep_sees_and_rows_name_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "visible_gpus.py").write_text(HOOK)
    path = os.pathsep.join([str(runs.TESTS.parent), str(tmp_path)])
    typed = (
        "data=cancer", "training.steps=3", "optimization=none", "security.trusted=[visible_gpus]",
        "debug.hooks=[visible_gpus.Visible]", "hydra.launcher.jobs=2",
    )  # fmt: skip
    variables = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    for changed, visible in (
        ("device.index=null,0", ["GPU-a", "GPU-a,GPU-b"]),
        ("seed=0,1,2", ["GPU-a", "GPU-b", "GPU-a"]),
    ):
        folder = tmp_path / changed
        folder.mkdir()
        runs.command(folder, "-m", *typed, changed, **variables)
        place = only(folder)
        number = len(visible)
        assert [(place / str(n) / "visible").read_text() for n in range(number)] == visible
        names = [name if name in ("GPU-a", "GPU-b") else "" for name in visible]
        assert [job["device"] for job in read(place)["jobs"]] == names
        assert [row["device"] for row in read(place, "comparison.json")["rows"]] == names
        assert "GPU-a" in (place / "comparison.md").read_text()
