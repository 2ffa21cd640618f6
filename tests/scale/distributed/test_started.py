"""Processes that torchrun has started: they are one run, or the mistake is named."""

import json
import os
import socket
import subprocess
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from runner import build, compose
from runner.cli.launch import launch
from runner.core.errors import ConfigError, DeviceError, UsageError
from runner.scale.distributed.join import config_for_rank
from runner.scale.distributed.launch import count_processes
from runner.scale.distributed.rank_info import RankInfo, detect_rank
from runner.scale.distributed.world import host_local_store, open_store
from tests import runs
from tests.faults.processes import marked

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
SHORT = (*runs.QUICK, "data=cancer", "model=mlp", "training.steps=30")
OF_TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
FAULT = """
import atexit
import os
from contextlib import contextmanager
from pathlib import Path
from runner import Hook, errors

class Fault(Hook):
    @contextmanager
    def session(self, run):
        self.fail(run, "session", 0)
        if "BACKEND" in os.environ:
            run.world.backend = os.environ["BACKEND"]
            atexit.register(Path(f"exit-{run.world.rank}").touch)
        yield

    def on_step(self, run, step):
        self.fail(run, "on_step", 15)

    def fail(self, run, event, step):
        place = (os.environ["EVENT"], run.world.rank, run.progress.step)
        if place == (event, 1, step) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if os.environ["ERROR"] == "kill":
                os.kill(os.getpid(), 9)
            raise getattr(errors, os.environ["ERROR"], ValueError)("row 7 is odd")
"""
PROGRAM = """
import sys
from runner import build, compose, train

for seed in (0, 1):
    with build(compose([*sys.argv[1:], f"seed={seed}"]), f"run-{seed}") as run:
        train(run)
"""


def started(folder: Path, *typed: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(runs.TESTS.parent), str(folder)])
    return runs.python(*TORCHRUN, *typed, folder=folder, PYTHONPATH=path, **variables)


def start_faulty(
    folder: Path, flag: str, fault: tuple[str, str], *typed: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    (folder / "own.py").write_text(FAULT)
    own = ("debug.hooks=[own.Fault]", "security.trusted=[own]", "distributed.timeout_s=60")
    command = (flag, "-m", "runner", "distributed=ddp", *SHORT, *own, *typed)
    return started(folder, *command, EVENT=fault[0], ERROR=fault[1], **variables)


@pytest.mark.parametrize("restarts", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_all_have_one_folder_and_one_display_also_when_torchrun_starts_them_again(
    tmp_path, restarts
):
    fault = ("on_step" if restarts else "", "kill")
    done = start_faulty(tmp_path, f"--max-restarts={restarts}", fault, "checkpoint.every=10")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "outputs" / "runs").glob("*/*")
    assert done.stdout.count("cancer-mlp  done") == 1
    summary = runs.read(run)
    assert (summary["status"], summary["steps"]) == ("done", 30)
    facts = summary["distributed"]
    assert (facts["world_size"], facts["attempt"]) == (2, restarts)
    assert (run / "ranks" / "1" / "run.log").exists()
    alone = runs.trained(*SHORT[len(runs.QUICK) :])
    assert summary["metrics"]["val/loss"] == pytest.approx(alone.metrics["val/loss"], rel=1e-4)


@pytest.mark.slow
def test_after_a_loss_under_nccl_rank_zero_saves_nothing_and_does_not_wait_at_its_exit(tmp_path):
    fault = ("on_step", "kill")
    done = start_faulty(tmp_path, "--max-restarts=0", fault, "checkpoint.every=10", BACKEND="nccl")
    assert done.returncode == 1, done.stderr  # torchrun's own
    (run,) = (tmp_path / "outputs" / "runs").glob("*/*")
    assert runs.read(run)["status"] == "failed" and "process 1" in runs.read(run)["reason"]
    assert runs.read(run)["checkpoint"]["last"] == "checkpoints/step_00000012"  # the best so far
    assert not [*run.glob("checkpoints/step_0000001[3-5]")]
    assert not [*tmp_path.glob("exit-*")]


@pytest.mark.slow
@pytest.mark.parametrize(("event", "error"), [("on_step", "ValueError"), ("session", "DataError")])
def test_an_error_in_another_process_is_named_by_the_first(tmp_path, event, error):
    done = start_faulty(tmp_path, "--max-restarts=0", (event, error))
    assert done.returncode == 1, done.stderr  # torchrun's own
    (run,) = (tmp_path / "outputs" / "runs").glob("*/*")
    reason = runs.read(run)["reason"]
    assert runs.read(run)["status"] == "failed"
    assert reason.startswith("process 1: ") and "row 7 is odd" in reason
    assert f"error: {reason}" in done.stderr


@pytest.mark.slow
def test_a_program_builds_runs_that_its_processes_train_together(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = started(tmp_path, "program.py", "distributed=ddp", *SHORT)
    assert done.returncode == 0, done.stderr
    seeds = [runs.read(tmp_path / f"run-{seed}") for seed in (0, 1)]
    assert [seed["distributed"]["world_size"] for seed in seeds] == [2, 2]
    assert seeds[0]["metrics"] != seeds[1]["metrics"]


def test_a_program_of_one_process_does_not_silently_train_alone():
    with pytest.raises(UsageError, match=r"distributed=ddp: .* not launched as one of.*torchrun"):
        build(runs.config("distributed=ddp", "data=cancer"))


@pytest.mark.parametrize(
    ("typed", "error", "message"),
    [
        ([], ConfigError, r"distributed: is none: torchrun has started 2 .*add distributed=ddp"),
        (["job=doctor"], ConfigError, "distributed: is none.*type job=doctor without torchrun"),
        (["job=benchmark"], ConfigError, "is none.*type job=benchmark without torchrun"),
        (["-m", "seed=0,1"], UsageError, "-m: torchrun has started 2 processes"),
        (
            ["distributed=ddp", "distributed.processes=3"],
            ConfigError,
            "distributed.processes: is 3, but torchrun has started 2 processes",
        ),
    ],
)
def test_a_start_that_does_not_fit_is_refused_and_leaves_nothing(
    typed, error, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name, value in OF_TWO.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=message):
        launch(runs.checked(*typed))
    assert list(tmp_path.iterdir()) == []


def test_processes_on_gpus_that_are_not_there_are_a_mistake_about_the_device():
    with pytest.raises(DeviceError, match="device.kind=cuda is not available: .* use device=auto"):
        count_processes(runs.config("distributed=ddp", "distributed.processes=2", "device=cuda"))


@pytest.mark.parametrize(("key", "rank"), [("LOCAL_RANK", "0"), ("SLURM_LOCALID", "1")])
def test_a_mistake_is_printed_once_for_all_processes_of_a_machine(key, rank, tmp_path):
    place = {**OF_TWO, "RANK": rank, key: rank}
    done = runs.command(tmp_path, "distributed=ddp", "optimizer.lr=-1", **place)
    assert done.returncode == 2
    assert ("optimizer.lr" in done.stderr) == (rank == "0")
    assert (done.stderr == "") == (rank == "1")


def test_a_place_is_read_from_srun_and_not_from_the_script_of_a_job():
    script = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    assert detect_rank(script) is None
    task = {
        **script, "SLURM_STEP_ID": "1", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "a", "MASTER_ADDR": "a",
        "SLURM_STEP_NUM_NODES": "2",
    }  # fmt: skip
    place = detect_rank(task)
    assert place is not None and place.by == "slurm"
    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 4, 1, 2)
    assert place.nodes == 2 and not place.hosted
    with pytest.raises(UsageError, match="incomplete.*SLURM_LOCALID"):
        detect_rank({key: value for key, value in task.items() if key != "SLURM_LOCALID"})


@pytest.mark.parametrize(
    ("environment", "address"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, "127.0.0.1"),
        ({"MASTER_ADDR": "localhost"}, "127.0.0.1"),
        ({}, "node1"),  # the other process may be on another machine
        ({"LOCAL_WORLD_SIZE": "1"}, "node1"),
        ({"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}, "node1"),
        ({"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}, "node1"),
    ],
)
def test_processes_of_one_machine_meet_on_the_loopback_interface(environment, address):
    place = detect_rank({**OF_TWO, "MASTER_ADDR": "node1", **environment})
    assert place is not None and place.address == address


def test_a_store_of_one_machine_listens_on_the_loopback_interface_alone():
    def listening() -> set[str]:
        found = psutil.Process().net_connections()
        places = {one.laddr for one in found if one.status == psutil.CONN_LISTEN}
        return {place.ip for place in places - before}

    before = {one.laddr for one in psutil.Process().net_connections()}
    ours = host_local_store()
    assert listening() == {"127.0.0.1"}
    place = RankInfo(1, 2, 1, 2, "127.0.0.1", ours.port, hosted=True)
    client = open_store(place, timedelta(seconds=9))
    client.set("key", "value")
    assert client.get("key") == b"value"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = RankInfo(0, 2, 0, 2, "127.0.0.1", port, hosted=False, by="slurm")
    store = open_store(place, timedelta(seconds=9))
    assert listening() == {"127.0.0.1"} and store.port == port
    store.set("key", "value")


@pytest.mark.parametrize(
    "typed", ["distributed.nodes=2", "distributed.rendezvous=node1:29500", "trainer.num_nodes=2"]
)
def test_several_machines_are_left_to_torchrun_and_srun_whose_commands_are_named(
    typed: str,
) -> None:
    with pytest.raises(ConfigError) as refused:
        runs.checked("distributed=ddp", typed)
    assert refused.value.exit_code == 2
    assert str(refused.value).startswith(typed.partition("=")[0] + ": ")
    for command in ("torchrun --nnodes 2 ", "srun --nodes 2 ", "-m runner distributed=ddp"):
        assert command in str(refused.value)


def test_a_run_of_several_machines_of_an_earlier_version_is_resumed_without_them(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    recorded = Path("outputs/x/.hydra")
    recorded.mkdir(parents=True)
    Path("outputs/x/checkpoints").mkdir()
    ours = [*SHORT, "distributed=ddp", "distributed.nodes=2", "search.storage=/elsewhere/a.db"]
    (recorded / "overrides.yaml").write_text(json.dumps([*ours, "distributed.rendezvous=node1:1"]))
    request = runs.checked("checkpoint.resume=outputs/x")
    assert request.config.distributed.kind.value == "ddp"
    assert request.config.search.storage is None


@pytest.mark.slow
def test_the_doctor_describes_the_processes_and_checks_their_sums(tmp_path):
    done = runs.command(
        tmp_path, "job=doctor", "distributed=ddp", "distributed.processes=2", "device=cpu",
        flags=("-P",),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "outputs" / "doctor").glob("*/*/doctor.json")
    report = runs.read(file.parent, file.name)
    assert [rank["local rank"] for rank in report["links"]["ranks"]] == [0, 1]
    assert report["links"]["wrong"] == 0 and "sums are right" in done.stdout


@pytest.mark.parametrize(
    ("by", "variables", "threads"),
    [
        ("runner", {}, 4),
        ("runner", {"OMP_NUM_THREADS": "4"}, 2),  # one of two jobs at a time
        ("torchrun", {"OMP_NUM_THREADS": "1"}, 4),  # which torchrun sets unasked
        ("slurm", {"SLURM_CPUS_PER_TASK": "3"}, 3),
    ],
)
def test_processes_and_jobs_share_the_cores(by, variables, threads, monkeypatch):
    monkeypatch.setattr("runner.scale.distributed.join.usable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    place = RankInfo(0, 2, 0, 2, "127.0.0.1", 1, True, by=by)
    assert config_for_rank(compose(["device=cpu"]), place).device.threads == threads
    assert config_for_rank(compose(["device=cpu", "device.threads=5"]), place).device.threads == 5
    assert config_for_rank(compose(["device=cuda"]), place).device.threads == threads


@pytest.mark.slow
def test_a_job_of_a_sweep_that_takes_too_long_ends_with_its_processes(tmp_path):
    mark = uuid4().hex
    done = runs.command(
        tmp_path, "-m", "distributed=ddp", "distributed.processes=2", "seed=0,1",
        "hydra.launcher.timeout_s=25", "hydra.launcher.jobs=2", *SHORT, "training.steps=500000",
        flags=("-P",), MARK=mark,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    (file,) = (tmp_path / "outputs" / "sweeps").glob("*/*/comparison.json")
    both = runs.read(file.parent, file.name)["rows"]
    assert [row["status"] for row in both] == ["timeout", "timeout"]
    assert marked("MARK", mark) == []
