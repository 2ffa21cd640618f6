"""What a run does at each fault of its data, its model, its machine and its checkpoints.

docs/measured/faults.md lists them. The other files here make those of users' code, of several
processes and of sweeps; those that need a disk of their own are in faults/test_disks.py.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from tests.faults import processes
from tests.runs import command, faults, needs_compiler, rows, wait_until

from .conftest import only, read

FAULTY = [
    "data._target_=faulty.Data", "model._target_=faulty.Net", "security.trusted=[faulty]",
    "device=cpu", "device.threads=1", "monitoring.progress=false", "optimization=none",
    "training.batch_size=16", "training.validate_every=8", "checkpoint.every=4",
    "checkpoint.keep=9", "data.workers=0", "training.steps=24",
]  # fmt: skip


def weights(folder: Path) -> bytes:
    return (folder / "checkpoints/last/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> Path:
    """A run without a fault."""
    done = command(place, *FAULTY, "name=undisturbed")
    assert done.returncode == 0, done.stderr
    return only(place, "outputs/runs/undisturbed/*")


@pytest.mark.parametrize(
    ("typed", "code", "says"),
    [
        ("+data.fault=shape", 2, "of shape [6], and in sample 37 of the same batch"),
        ("+data.fault=label", 2, "data: target of sample 37: 7 is not in 0 to 1"),
        ("+data.fault=stop", 2, "data: sample 37: StopIteration; the traceback is in"),
        ("+data.fault=raises", 2, "data: sample 37: Unpicklable: sample 37 is unreadable"),
        ("+data.fault=empty", 2, "faulty.Data: 0 samples; training and validation need"),
        ("training.batch_size=500 data.drop_last=true", 2, "training.batch_size: 500 exceeds"),
        ("device=cuda:9", 2, "device"),
        ("+model.fault=one_sample", 2, "out of memory"),
        ("hydra.run.dir=/sys/run", 5, "hydra.run.dir"),
        ("data.workers=2 +data.fault=raises", 2, "data: sample 37: Unpicklable"),
        ("data.workers=2 data.timeout_s=3 data.worker_restarts=0 +data.fault=hangs", 1,
         "data worker 0"),
    ],
    ids="""shape label stop raises empty no-batch no-device no-memory read-only in-a-worker
        hangs""".split(),
)  # fmt: skip
def test_a_run_that_cannot_go_on_ends_in_one_error_and_its_exit_code(
    typed: str, code: int, says: str, place: Path
) -> None:
    done = command(place, *FAULTY, *typed.split())
    assert done.returncode == code, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "error: " in last and says in last and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("fault", "kind", "skipped"),
    [
        ("+data.fault=missing", "", [6]),
        ("+model.fault=statistics", "buffers", [1]),
        ("+model.fault=spike stability.spike.at_least=10 monitoring.every=1", "spike", [1]),
        ("optimization=amp optimization.amp.dtype=fp16 optimization.amp.initial_scale=1e8",
         "overflow", range(3, 20)),
    ],
    ids="missing statistics spike fp16".split(),
)  # fmt: skip
def test_a_bad_batch_is_skipped_and_the_weights_stay_finite(
    fault: str, kind: str, skipped: Collection[int], place: Path
) -> None:
    folder = place / f"skipped_{kind}"
    done = command(place, *FAULTY, *fault.split(), f"hydra.run.dir={folder}")
    assert done.returncode == 0, done.stderr
    summary = read(folder / "summary.json")
    assert summary["status"] == "done" and summary["skipped_steps"] in skipped
    assert faults(folder, kind) and summary["metrics"]["val/loss"] < 5


def test_weights_that_become_nan_are_rolled_back_to_a_checkpoint(place: Path) -> None:
    folder = place / "rolled"
    done = command(place, *FAULTY, "+model.fault=weights", f"hydra.run.dir={folder}")
    assert done.returncode == 0, done.stderr
    assert "rolled back to step 4, learning rate times 0.5" in done.stderr
    summary = read(folder / "summary.json")
    assert summary["status"] == "done" and summary["metrics"]["val/loss"] < 5


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["dies", "crashes", "hangs"])
def test_a_data_worker_is_replaced_and_no_batch_is_lost(
    fault: str, undisturbed: Path, place: Path
) -> None:
    typed = (f"+data.fault={fault}", f"+data.once={place / fault}", "data.workers=2")
    done = command(place, *FAULTY, *typed, "data.timeout_s=5", f"name=worker_{fault}")
    assert done.returncode == 0, done.stderr
    folder = only(place, f"outputs/runs/worker_{fault}/*")
    assert len(faults(folder, "data_worker")) == 1 and "replaced" in done.stderr
    assert weights(folder) == weights(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["descriptors", "clock", "event_files", "full_for_a_while"])
def test_a_fault_of_the_machine_that_passes_leaves_all_rows_and_the_same_bits(
    fault: str, undisturbed: Path, place: Path
) -> None:
    typed = ("monitoring.every=1", f"+model.fault={fault}", f"name=machine_{fault}")
    done = command(place, *FAULTY, *typed)
    assert done.returncode == 0, done.stderr
    folder = only(place, f"outputs/runs/machine_{fault}/*")
    assert weights(folder) == weights(undisturbed)
    assert [row["step"] for row in rows(folder, "train")] == [*range(1, 25)]


@pytest.mark.slow
def test_a_batch_that_does_not_fit_trains_in_smaller_parts_as_with_that_micro_batch(
    place: Path,
) -> None:
    done = command(place, *FAULTY, "+model.fault=memory", "hydra.run.dir=parts")
    assert done.returncode == 0, done.stderr
    summary = read(place / "parts/summary.json")
    assert summary["status"] == "done" and summary["faults"]["out_of_memory"] >= 1
    choices = [row for row in summary["choices"] if row["key"] == "training.micro_batch"]
    (micro,) = (row["value"] for row in choices if not row["is_notice"])
    named = command(place, *FAULTY, f"training.micro_batch={micro}", "hydra.run.dir=named")
    assert named.returncode == 0 and micro < 16
    assert weights(place / "parts") == weights(place / "named")


@pytest.mark.slow
def test_a_folder_that_becomes_read_only_ends_the_run_with_code_5(place: Path) -> None:
    done = command(place, *FAULTY, "+model.fault=read-only", "hydra.run.dir=read-only")
    assert done.returncode == 5, done.stderr
    assert "not written: Permission denied" in done.stderr.splitlines()[-1]
    summary = read(place / "read-only/summary.json")
    assert summary["status"] == "failed" and summary["faults"]["checkpoint"] == 3


@pytest.mark.slow
@needs_compiler
def test_without_a_working_compiler_the_run_continues_in_eager_mode(place: Path) -> None:
    compiler = place / "g++"
    compiler.write_text("#!/bin/sh\necho 'fatal error: no Python.h' >&2\nexit 1\n")
    compiler.chmod(0o700)
    typed = [f"optimization.{name}.enabled=true" for name in ("compile", "whole_step")]
    variables = {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(place / "cache")}
    done = command(place, *FAULTY, *typed, "hydra.run.dir=eager", **variables)
    assert done.returncode == 0, done.stderr
    summary = read(place / "eager/summary.json")
    reasons = {row["name"]: row["reason"] for row in summary["techniques"] if row["requested"]}
    for name in ("compile", "whole_step"):  # the one that the other falls back to fails as well
        assert "CppCompileError" in reasons[name] or "C++ compile" in reasons[name]
    assert (summary["status"], summary["steps"]) == ("done", 24)


@pytest.mark.slow
def test_a_disk_that_takes_no_more_ends_the_run_with_code_5_and_it_resumes(
    undisturbed: Path, place: Path
) -> None:
    typed = [*FAULTY, "name=full", "checkpoint.resume=auto", "+model.fault=file size"]
    typed.append(f"+model.once={place / 'full'}")
    assert command(place, *typed).returncode == 5
    done = command(place, *typed)
    assert done.returncode == 0, done.stderr
    assert weights(only(place, "outputs/runs/full/*")) == weights(undisturbed)


def cut_short(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def emptied(checkpoint: Path) -> None:
    (checkpoint / "state.pt").write_bytes(b"")


def flipped(checkpoint: Path) -> None:
    content = bytearray((checkpoint / "model.safetensors").read_bytes())
    content[-40] ^= 4
    (checkpoint / "model.safetensors").write_bytes(content)


def without_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def of_another_step(checkpoint: Path) -> None:
    before = checkpoint.with_name("step_00000004") / "manifest.json"
    (checkpoint / "manifest.json").write_bytes(before.read_bytes())


DAMAGES: list[Callable[[Path], Any]] = [
    cut_short, emptied, flipped, without_manifest, of_another_step
]  # fmt: skip


@pytest.fixture(scope="module")
def half(place: Path) -> Path:
    """A run of 16 steps, whose folder is copied to be damaged."""
    done = command(place, *FAULTY, "training.steps=16", "name=half")
    assert done.returncode == 0, done.stderr
    return only(place, "outputs/runs/half/*")


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    damage: Callable[[Path], Any], half: Path, place: Path
) -> None:
    folder = shutil.copytree(half, place / damage.__name__, symlinks=True)
    damage(folder / "checkpoints/step_00000016")
    (folder / "checkpoints/.tmp-step_00000020").mkdir()  # as of a run that was killed
    done = command(place, *FAULTY, "training.steps=16", f"checkpoint.resume={folder}")
    assert done.returncode == 0, done.stderr
    assert "step_00000016" in done.stderr and "step 12" in done.stderr
    assert weights(folder) == weights(half)  # it came there again
    assert not list(folder.glob("checkpoints/.tmp-*"))


def test_when_every_checkpoint_is_bad_the_run_ends_with_code_5_and_starts_nothing(
    half: Path, place: Path
) -> None:
    folder = shutil.copytree(half, place / "all_bad", symlinks=True)
    checkpoints = sorted((folder / "checkpoints").glob("step_*"))
    for checkpoint in checkpoints:
        flipped(checkpoint)
    done = command(place, *FAULTY, f"checkpoint.resume={folder}")
    assert done.returncode == 5
    assert all(checkpoint.name in done.stderr for checkpoint in checkpoints)


def started(place: Path, folder: str, *typed: str) -> processes.Process:
    """A run in a process of its own, which waits in a step until there is a file `waits_go`."""
    (place / folder).mkdir()
    shutil.copy(place / "faulty.py", place / folder)
    return waiting(place / folder, "waits", *typed)


def waiting(folder: Path, name: str, *typed: str) -> processes.Process:
    own = ["+model.fault=waits", f"+model.once={name}", *typed]
    running = processes.start(folder, [*FAULTY, *own])
    wait_until((folder / name).exists, running)
    return running


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_leaves_a_checkpoint_that_the_same_command_goes_on_from(
    name: str, undisturbed: Path, place: Path
) -> None:
    number = signal.Signals[name]
    running = started(place, name, "checkpoint.resume=auto")
    running.send_signal(number)
    (place / name / "waits_go").touch()
    assert running.wait(120) == 128 + number
    typed = ("+model.fault=waits", "+model.once=waits", "checkpoint.resume=auto")
    done = command(place / name, *FAULTY, *typed)
    assert done.returncode == 0, done.stderr
    assert weights(only(place / name, "outputs/runs/*/*")) == weights(undisturbed)


@pytest.mark.slow
def test_a_run_that_was_stopped_for_a_while_ends_in_the_same_bits(
    undisturbed: Path, place: Path
) -> None:
    running = started(place, "stopped", "data.workers=2", "data.timeout_s=2")
    running.send_signal(signal.SIGSTOP)
    (place / "stopped/waits_go").touch()
    time.sleep(4)  # longer than a worker may need
    assert running.poll() is None
    running.send_signal(signal.SIGCONT)
    assert running.wait(120) == 0
    folder = only(place / "stopped", "outputs/runs/*/*")
    assert weights(folder) == weights(undisturbed) and rows(folder) == rows(undisturbed)
    assert not faults(folder, "data_worker")


@pytest.mark.slow
def test_a_second_process_in_the_folder_of_a_run_is_refused(place: Path) -> None:
    running = started(place, "twice", "hydra.run.dir=run")
    done = command(place / "twice", *FAULTY, "hydra.run.dir=run")
    running.send_signal(signal.SIGKILL)
    running.wait(60)
    assert done.returncode == 2
    assert f"run: in use by process {running.pid} " in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("missing", "says"),
    [("gone.txt", "run has the metrics.jsonl of another run"), ("metrics.jsonl", "run: in use by")],
)
def test_nothing_is_written_where_another_run_has_taken_the_removed_folder(
    missing: str, says: str, tmp_path: Path, place: Path
) -> None:
    shutil.copy(place / "faulty.py", tmp_path)
    first = waiting(tmp_path, "first", "hydra.run.dir=run", "checkpoint.enabled=false")
    shutil.rmtree(tmp_path / "run")
    second = waiting(tmp_path, "second", "hydra.run.dir=run")
    (tmp_path / "run" / missing).unlink(missing_ok=True)
    (tmp_path / "first_go").touch()
    assert first.wait(120) == 5
    last = (tmp_path / "console.log").read_text().splitlines()[-1]
    assert "was removed, and another run has it now: " in last and says in last
    assert read(tmp_path / "run/summary.json")["status"] == "running"
    (tmp_path / "second_go").touch()
    assert second.wait(120) == 0
    summary = read(tmp_path / "run/summary.json")
    assert summary["status"] == "done" and "+model.once=second" in summary["command"]
    assert [row["step"] for row in rows(tmp_path / "run", "train")] == [10, 20, 24]
