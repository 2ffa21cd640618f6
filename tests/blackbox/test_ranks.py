"""A fault of one process, at any point of a step, ends or continues all of them the same way."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.runs import wait_until
from tests.scale.distributed import runs
from tests.scale.distributed.runs import digest

NO_WORKERS = "data.workers=0"
GRACE = "checkpoint.grace_s=8"
CALLS = {"data": 60, "validation": 1, "on_report": 2, "on_validation": 1, "saving": 2}
POINTS = ["data", "forward", "backward", "on_gradients", "on_step", *list(CALLS)[1:]]
FURTHER = ["session", "restore", "early_stop", "end"]  # "end": once all is trained and saved
CALLS |= {"session": 1, "restore": 1, "early_stop": 2, "end": 1}
SETTINGS = {"early_stop": ("training.patience=1", "optimizer.lr=1e-12")}
KINDS = ["raise", "usage", "oom", "term", "kill", "exit", "stop", "hang"]
FEWER = ["raise", "term", "kill", "stop"]
TOGETHER = 4  # cases: a hung process is waited for


def test_a_killed_process_has_all_start_again_and_come_to_the_same_weights(tmp_path: Path) -> None:
    whole = runs.run(tmp_path / "whole", "", NO_WORKERS)
    faults = "0:forward:kill:6,1:backward:exit:7"  # that is step 11, in the second attempt
    typed = "distributed.restarts=2", NO_WORKERS
    killed = runs.run(tmp_path / "killed", faults, *typed)
    assert (whole.code, killed.code) == (0, 0), killed.output
    assert digest(killed.folder) == digest(whole.folder)
    reasons = killed.summary["distributed"]["restarts"]
    assert [reason.partition(";")[0] for reason in reasons] == [
        "process 0 was killed by SIGKILL",
        "process 1 ended with exit code 3 during the run",
    ]
    assert killed.summary["faults"] == {"process_lost": 2}
    assert "process_lost" not in whole.summary["faults"]


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["1:backward", "0:forward"])
def test_after_a_loss_under_nccl_the_device_is_not_used_and_all_restart_from_the_last_checkpoint(
    tmp_path: Path, lost: str
) -> None:
    whole = runs.run(tmp_path / "whole", "", NO_WORKERS)
    typed = "distributed.restarts=1", "distributed.timeout_s=300", NO_WORKERS
    killed = runs.run(tmp_path / "killed", f"{lost}:kill:7", *typed, BACKEND="nccl")
    assert (whole.code, killed.code) == (0, 0), killed.output
    assert not [file.read_text() for file in killed.folder.glob("used-*")]
    assert not (killed.folder / "checkpoints" / "step_00000006").exists()
    if lost[0] == "1":  # else that of step 4 may still be in the making
        assert "all processes restart from checkpoints/step_00000004" in killed.output
    assert digest(killed.folder) == digest(whole.folder)


@pytest.mark.slow
def test_an_error_of_one_process_under_nccl_is_reported_and_saved_by_that_one_alone(
    tmp_path: Path,
) -> None:
    done = runs.run(
        tmp_path / "run", "1:backward:raise:6", "distributed.timeout_s=300", BACKEND="nccl"
    )
    assert done.code == 1
    assert "process 1: ValueError: planted" in done.message
    assert not (done.folder / "used-0").exists()
    assert list((done.own(1) / "debug" / "captures").glob("step_00000006"))


@pytest.mark.slow
def test_a_record_whose_writer_was_killed_names_what_is_on_disk(tmp_path: Path) -> None:
    done = runs.run(tmp_path / "run", "0:forward:kill:6", NO_WORKERS)
    assert done.code == 1
    folder = done.folder / "checkpoints"
    last = max(path.name for path in folder.glob("step_*"))  # that of step 4 may be in the making
    best = "checkpoints/step_00000004" if (folder / "best").exists() else None
    assert done.summary["status"] == "failed"
    assert done.summary["checkpoint"] == {"last": f"checkpoints/{last}", "best": best}


def test_an_error_in_one_process_is_that_of_the_run_and_the_last_whole_step_is_saved(
    tmp_path: Path,
) -> None:
    done = runs.run(tmp_path / "run", "1:backward:raise:6")
    assert done.code == 1
    assert "process 1: ValueError: planted" in done.message
    assert done.message.endswith(f"; the traceback is in {done.folder}/ranks/1/run.log")
    assert "Traceback" in done.log(1) and "Traceback" not in done.output
    assert done.summary["status"] == "failed"
    assert "process 1: ValueError: planted" in done.summary["reason"]
    assert (done.folder / "checkpoints" / "step_00000005").exists()
    assert list((done.own(1) / "debug" / "captures").glob("step_00000006"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rank", "stack"),
    [("stop", 1, "forward_backward"), ("spin", 0, "in planted")],  # one lets no other thread run
)
def test_a_hung_process_is_noticed_and_the_others_say_where_they_stand(
    tmp_path: Path, kind: str, rank: int, stack: str
) -> None:
    done = runs.run(tmp_path / "run", f"0:backward:{kind}:6", "distributed.timeout_s=4")
    assert done.code == 1
    assert "process 0 was killed: no answer within distributed.timeout_s" in done.message
    assert done.summary["reason"] in done.message
    assert stack in (done.folder / "debug" / "ranks" / f"{rank}.txt").read_text()


@pytest.mark.slow
def test_out_of_memory_in_one_process_halves_the_micro_batch_of_all(tmp_path: Path) -> None:
    faults = "1:forward:oom:5,1:forward:oom:9"  # then two forwards make a step
    done = runs.run(tmp_path / "run", faults)
    assert done.code == 0, done.output
    assert done.summary["faults"] == {"out_of_memory": 2}
    chosen = [c for c in done.summary["choices"] if c["key"] == "training.micro_batch"]
    (choice,) = (c for c in chosen if not c["is_notice"])
    assert choice["value"] == 2
    assert choice["reason"].startswith("process 1: step 9 ran out of memory")
    assert "with 4 at a time; the step is another one: BatchNorm" in choice["reason"]


def start_compiled(place: Path, script: str, *typed: str) -> runs.Started:
    """A run whose compiler is a shell script."""
    compiler = place / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}")
    compiler.chmod(0o700)
    typed = ("optimization=compile", "optimization.compile.min_steps=1", NO_WORKERS, *typed)
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(place / "cache"), "CXX": str(compiler)}
    return runs.start(place / "run", "", *typed, **variables)


@pytest.mark.slow
@pytest.mark.parametrize("own", [(), ("distributed=fsdp",)], ids=["ddp", "fsdp"])
def test_where_the_compiler_of_one_fails_all_start_again_without_it(
    tmp_path: Path, own: tuple[str, ...]
) -> None:
    broken = '[ "$RANK" = 0 ] && exec g++ "$@"\necho broken >&2; exit 1\n'
    done = start_compiled(tmp_path, broken, *own).end()
    assert done.code == 0, done.output
    assert done.summary["faults"] == {"compiler_failed": 1}
    (row,) = [t for t in done.summary["techniques"] if t["name"] == "compile"]
    assert not row["engaged"] and row["reason"].startswith("process 1: the compiler failed: ")
    assert done.summary["steps"] == 12


def test_a_bad_or_vetoed_step_of_one_process_is_skipped_and_a_stop_ends_all(tmp_path: Path) -> None:
    faults = "1:backward:nan:3,0:on_gradients:skip:5,1:on_step:end:9"
    done = runs.run(tmp_path / "run", faults, END_BY="limit")
    assert done.code == 0, done.output
    assert (done.summary["status"], done.summary["steps"]) == ("stopped", 9)
    # by process 1, while process 0 writes the summary
    assert (done.summary["ended_by"], done.summary["reason"]) == ("limit", "planted")
    assert done.summary["skipped_steps"] == 2
    assert done.summary["faults"]["non_finite"] == 1


@pytest.mark.slow
def test_a_signal_to_the_group_ends_all_with_a_checkpoint(tmp_path: Path) -> None:
    started = runs.start(tmp_path / "run", steps=100_000, STEP_S="0.02")
    started.wait_for("checkpoints/step_00000008")
    started.send(signal.SIGTERM, "group")
    done = started.end(60)
    assert done.code == 143, done.output
    assert started.left() == []
    assert done.summary["status"] == "interrupted"
    assert done.summary["checkpoint"]["last"] == f"checkpoints/step_{done.summary['steps']:08d}"
    assert "checkpoint is written" in done.message


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    started = runs.start(tmp_path / "run", "0:forward:hang:6", "distributed.timeout_s=300")
    wait_until((tmp_path / "run-once/0_forward_hang_6").exists, started.process)
    started.send(signal.SIGINT)
    wait_until(lambda: "again to stop at once" in started.log(0), started.process)
    started.send(signal.SIGINT)
    assert started.end(20).code == 130
    assert started.left() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "typed"),
    [
        ("1:build:hang:1", ()),
        ("1:data:hang:60", (NO_WORKERS,)),
        ("0:data:hang:60", ("data.workers=1",)),
        ("1:validation:hang:2", ()),  # in the first one process 0 may still be built
        ("1:forward:hang:6", ()),
        ("0:forward:lock:6", ()),
        ("1:backward:lock:6", ()),
    ],
)
def test_a_signal_ends_a_run_that_waits_for_one_of_them(
    tmp_path: Path, fault: str, typed: tuple[str, ...]
) -> None:
    started = runs.start(tmp_path / "run", fault, *typed, "distributed.timeout_s=300", GRACE)
    wait_until((tmp_path / "run-once" / fault.replace(":", "_")).exists, started.process)
    started.send(signal.SIGTERM)
    done = started.end(60)
    assert done.code == 143, done.output
    assert ":build:" in fault or done.summary["status"] == "interrupted"
    assert started.left() == []


@pytest.fixture(scope="module")
def matrix(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[runs.Started]]]:
    """The runs of all cases that were chosen: some at a time, as many of them wait."""
    items = [i for i in request.session.items if isinstance(i, pytest.Function)]
    cases = [i.callspec.params["case"] for i in items if "case" in getattr(i, "fixturenames", ())]
    place = tmp_path_factory.mktemp("matrix")
    with ThreadPoolExecutor(TOGETHER) as pool:
        yield {str(case): pool.submit(_run_case, place / str(case), case) for case in cases}
        pool.shutdown(cancel_futures=True)


def _run_case(folder: Path, case: Case) -> runs.Started:
    folder.mkdir()
    return runs.run(folder / "run", case.fault, NO_WORKERS, *SETTINGS.get(case.point, ()))


@dataclass(frozen=True)
class Case:
    """A fault at one rank, at a point of the run."""

    point: str
    kind: str
    rank: int

    def __str__(self) -> str:
        return f"{self.point}-{self.kind}-{self.rank}"

    @property
    def fault(self) -> str:
        own = f"{self.rank}:{self.point}:{self.kind}:{CALLS.get(self.point, 6)}"
        own = own.replace("early_stop", "on_validation")
        return own if self.point != "restore" else f"{1 - self.rank}:on_step:rollback:6,{own}"

    def expected(self) -> tuple[int, str, str]:
        """Exit code, status and cause."""
        rank, point = self.rank, self.point
        if self.kind == "oom" and point in ("forward", "backward", "validation"):
            return 0, "done", ""
        if point == "data" and self.kind in ("raise", "oom"):  # as of any unreadable sample
            return 2, "failed", {"raise": "planted", "oom": "can't allocate memory"}[self.kind]
        if self.kind == "term" and point == "early_stop":
            return 0, "stopped", "has not improved"
        if self.kind == "raise" and point == "restore":
            return 5, "failed", "does not fit this run's model or optimizer (ValueError: planted)"
        return {
            "raise": (1, "failed", "ValueError: planted"),
            "usage": (2, "failed", "planted"),
            "oom": (2, "failed", "out of memory"),
            "term": (143, "interrupted", "SIGTERM"),
            "kill": (1, "failed", f"process {rank} was killed by SIGKILL"),
            "exit": (1, "failed", f"process {rank} ended with exit code 3"),
            "stop": (1, "failed", f"process {rank} was killed: no answer"),
            "hang": (1, "failed", f"process {rank} was killed: no answer"),
        }[self.kind]


CASES = [
    Case(point, kind, (row + column) % 2)
    for points, kinds in ((POINTS, KINDS), (FURTHER, FEWER))
    for row, point in enumerate(points)
    for column, kind in enumerate(kinds)
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_fault_at_every_point_ends_or_continues_all(
    case: Case, matrix: dict[str, Future[runs.Started]]
) -> None:
    done = matrix[str(case)].result()
    code, status, cause = case.expected()
    assert (done.code, done.summary["status"]) == (code, status), done.output
    assert cause in done.summary["reason"], done.output
    if code in (1, 2) and case.rank:
        assert f"process {case.rank}" in done.message


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at the parent's death")
def test_no_process_outlives_its_agent_not_even_one_that_is_stopped(tmp_path: Path) -> None:
    typed = ("1:forward:stop:6", "distributed.timeout_s=300", "checkpoint.resume=auto", NO_WORKERS)
    started = runs.start(tmp_path / "run", *typed)
    wait_until(
        lambda: any(p.status() == psutil.STATUS_STOPPED for p in started.ranks("")), started.process
    )
    for rank in started.ranks(""):
        rank.parent().suspend()  # the fork server, which then does not see that the agent is gone
    started.send(signal.SIGKILL)
    started.end()
    assert started.left() == []
    resumed = runs.run(tmp_path / "run", *typed)
    assert resumed.code == 0, resumed.output
    assert digest(resumed.folder) == digest(runs.run(tmp_path / "whole", "", NO_WORKERS).folder)


@pytest.mark.slow
def test_a_fork_server_that_is_killed_is_named_and_all_start_again(tmp_path: Path) -> None:
    fault, typed = "0:forward:hang:6", ("distributed.restarts=1", "distributed.timeout_s=300")
    started = runs.start(tmp_path / "run", fault, NO_WORKERS, *typed)
    wait_until((tmp_path / "run-once" / fault.replace(":", "_")).exists, started.process)
    ranks = [p for rank in (0, 1) for p in started.ranks(rank)]
    ranks[0].parent().kill()
    psutil.wait_procs(ranks, 20)
    assert not any(rank.is_running() for rank in ranks)  # before others train in their place
    done = started.end()
    assert done.code == 0, done.output
    (reason,) = done.summary["distributed"]["restarts"]
    assert reason == "the fork server was killed, and the processes with it"
    assert started.left() == []


@contextmanager
def _small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "small", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this process may mount nothing")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("own", [(), ("distributed=fsdp",)], ids=["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("where", "code", "message"),
    [
        ("", 5, "No space left on device; set another folder"),
        ("checkpoints", 5, "3 checkpoints in a row were not written: No space left on device"),
        ("ranks/1", 0, ""),  # its log alone
    ],
)
def test_a_full_disk_at_one_process_ends_or_continues_all(
    tmp_path: Path, where: str, code: int, message: str, own: tuple[str, ...]
) -> None:
    folder = tmp_path / "run"
    with _small_disk(folder / where, "12k"):
        done = runs.run(folder, "", NO_WORKERS, *own)
        summary = done.summary if where else {}
    assert done.code == code, done.output
    assert message in done.message
    if where:
        assert summary["status"] == ("failed" if code else "done")
        assert message in summary["reason"]
        assert code or summary["steps"] == 12


@pytest.mark.slow
def test_a_signal_while_all_compile_ends_all_within_the_grace_period(tmp_path: Path) -> None:
    slow = f"touch {tmp_path}/compiling-$RANK\nsleep 600\n"
    started = start_compiled(tmp_path, slow, GRACE, "distributed.timeout_s=300")
    wait_until(lambda: [*tmp_path.glob("compiling-*")], started.process)
    started.send(signal.SIGTERM)
    done = started.end()
    assert done.code == 143, done.output
    assert done.summary["status"] == "interrupted"
    assert started.left() == []
