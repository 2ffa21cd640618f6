"""A fault of one process, at any point of a step, ends or continues all of them the same way."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.distributed import runs
from tests.distributed.runs import digest

NO_WORKERS = "data.workers=0"
GRACE = "checkpoint.grace_s=8"
CALLS = {"data": 60, "validation": 1, "on_report": 2, "on_validation": 1, "saving": 2}
POINTS = ["data", "forward", "backward", "on_gradients", "on_step", *list(CALLS)[1:]]
KINDS = ["raise", "usage", "oom", "term", "kill", "exit", "stop", "hang"]


def test_a_killed_process_has_all_start_again_and_come_to_the_same_weights(tmp_path: Path) -> None:
    whole = runs.run(tmp_path / "whole", "", NO_WORKERS)
    faults = "0:forward:kill:6,1:backward:exit:7"  # that is step 11, in the second attempt
    typed = "distributed.restarts=2", NO_WORKERS
    killed = runs.run(tmp_path / "killed", faults, *typed)
    assert (whole.code, killed.code) == (0, 0), killed.output
    assert digest(killed.folder) == digest(whole.folder)
    reasons = killed.summary["distributed"]["restarts"]
    assert [reason.partition(",")[0] for reason in reasons] == [
        "process 0 was killed by SIGKILL",
        "process 1 ended with exit code 3",
    ]
    assert killed.summary["faults"] == {"process_lost": 2}
    assert "process_lost" not in whole.summary["faults"]


def test_an_error_in_one_process_is_that_of_the_run_and_the_last_whole_step_is_saved(
    tmp_path: Path,
) -> None:
    done = runs.run(tmp_path / "run", "1:backward:raise:6")
    assert done.code == 1
    assert "process 1: ValueError: planted" in done.message
    assert "Traceback" in done.log(1) and "Traceback" not in done.output
    assert done.summary["status"] == "failed"
    assert "process 1: ValueError: planted" in done.summary["reason"]
    assert (done.folder / "checkpoints" / "step_00000005").exists()
    assert list((done.own(1) / "debug" / "captures").glob("step_00000006"))


def test_a_hung_process_is_noticed_and_the_others_say_where_they_stand(tmp_path: Path) -> None:
    done = runs.run(tmp_path / "run", "0:backward:stop:6", "distributed.timeout_s=4")
    assert done.code == 1
    assert "process 0 did not answer within distributed.timeout_s" in done.message
    assert done.summary["reason"] in done.message
    assert "forward_backward" in (done.folder / "debug" / "ranks" / "1.txt").read_text()


@pytest.mark.slow
def test_one_that_lets_no_other_thread_run_says_where_it_stands_when_it_is_ended(
    tmp_path: Path,
) -> None:
    done = runs.run(tmp_path / "run", "0:backward:spin:6", "distributed.timeout_s=4")
    assert done.code == 1
    assert "process 0 did not answer within distributed.timeout_s" in done.message
    stacks = (done.folder / "debug" / "ranks" / "0.txt").read_text()
    assert "Aborted" in stacks and "in planted" in stacks


def test_out_of_memory_in_one_process_halves_the_micro_batch_of_all(tmp_path: Path) -> None:
    faults = "1:forward:oom:5,1:forward:oom:9"  # then two forwards make a step
    done = runs.run(tmp_path / "run", faults)
    assert done.code == 0, done.output
    assert done.summary["faults"] == {"out_of_memory": 2}
    (choice,) = [c for c in done.summary["choices"] if c["key"] == "training.micro_batch"]
    assert choice["value"] == 2
    assert choice["reason"].startswith("process 1: step 9 ran out of memory")
    assert choice["reason"].endswith("with 4 samples at a time")


def test_a_bad_or_vetoed_step_of_one_process_is_skipped_and_a_stop_ends_all(tmp_path: Path) -> None:
    faults = "1:backward:nan:3,0:on_gradients:skip:5,1:on_step:end:9"
    done = runs.run(tmp_path / "run", faults)
    assert done.code == 0, done.output
    assert (done.summary["status"], done.summary["steps"]) == ("stopped", 9)
    assert done.summary["skipped_steps"] == 2
    assert done.summary["faults"]["non_finite"] == 1


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
    started.wait_for("checkpoints/step_00000004")
    started.send(signal.SIGINT)
    started.wait_for("run.log")
    while "once more" not in started.log(0):
        pass
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
        ("1:validation:hang:1", ()),
        ("1:forward:hang:6", ()),
        ("0:forward:lock:6", ()),
        ("1:backward:lock:6", ()),
    ],
)
def test_a_signal_ends_a_run_that_waits_for_one_of_them(
    tmp_path: Path, fault: str, typed: tuple[str, ...]
) -> None:
    started = runs.start(tmp_path / "run", fault, *typed, "distributed.timeout_s=300", GRACE)
    once = tmp_path / "run-once" / fault.replace(":", "_")
    while not once.exists():
        assert started.process.poll() is None
    started.send(signal.SIGTERM)
    done = started.end(60)
    assert done.code == 143, done.output
    assert ":build:" in fault or done.summary["status"] == "interrupted"
    assert started.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", POINTS)
def test_every_fault_at_every_point_ends_or_continues_all(
    tmp_path: Path, point: str, kind: str
) -> None:
    rank = (POINTS.index(point) + KINDS.index(kind)) % 2
    fault = f"{rank}:{point}:{kind}:{CALLS.get(point, 6)}"
    done = runs.run(tmp_path / "run", fault, NO_WORKERS)
    name = f"process {rank}" if rank else ""
    code, status, cause = {
        "raise": (1, "failed", "ValueError: planted"),
        "usage": (2, "failed", "planted"),
        "oom": (2, "failed", "out of memory"),
        "term": (143, "interrupted", "SIGTERM"),
        "kill": (1, "failed", f"process {rank} was killed by SIGKILL"),
        "exit": (1, "failed", f"process {rank} ended with exit code 3"),
        "stop": (1, "failed", f"process {rank} did not answer"),
        "hang": (1, "failed", f"process {rank} did not answer"),
    }[kind]
    if point == "data" and kind in ("raise", "oom"):  # as of any sample that cannot be read
        code, cause = 2, {"raise": cause, "oom": "can't allocate memory"}[kind]
    if kind == "oom" and point in ("forward", "backward", "validation"):
        code, status, cause, name = 0, "done", "", ""
    assert (done.code, done.summary["status"]) == (code, status), done.output
    assert cause in done.summary["reason"], done.output
    if code in (1, 2):
        assert name in done.message
