"""What a run does at each fault of its data, its model, its disk and its checkpoints, from outside.

docs/measured/faults.md lists them. The faults of several processes and of sweeps, and those that
need a disk of their own, have their tests in scale/, cli/, core/train/ and faults/.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults import processes
from tests.runs import command, faults

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
        ("data.workers=2 +data.fault=raises", 2, "data: sample 37: Unpicklable"),
        ("data.workers=2 data.timeout_s=3 data.worker_restarts=0 +data.fault=hangs", 1,
         "data worker 0"),
    ],
    ids="shape label stop raises empty no-batch no-device in-a-worker hangs".split(),
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
    [("+data.fault=missing", "", 6), ("+model.fault=statistics", "buffers", 1)],
)
def test_a_bad_batch_is_skipped_and_the_weights_stay_finite(
    fault: str, kind: str, skipped: int, place: Path
) -> None:
    folder = place / f"skipped{skipped}"
    done = command(place, *FAULTY, fault, f"hydra.run.dir={folder}")
    assert done.returncode == 0, done.stderr
    summary = read(folder / "summary.json")
    assert (summary["status"], summary["skipped_steps"]) == ("done", skipped)
    assert faults(folder, kind) and summary["metrics"]["val/loss"] < 5


def test_weights_that_become_nan_are_rolled_back_to_a_checkpoint(place: Path) -> None:
    folder = place / "rolled"
    done = command(place, *FAULTY, "+model.fault=weights", f"hydra.run.dir={folder}")
    assert done.returncode == 0, done.stderr
    assert "rolled back to step 4, learning rate times 0.5" in done.stderr
    summary = read(folder / "summary.json")
    assert summary["status"] == "done" and summary["metrics"]["val/loss"] < 5


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["dies", "hangs"])
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
@pytest.mark.parametrize("fault", ["descriptors", "clock"])
def test_a_machine_without_descriptors_or_with_its_clock_set_back_ends_in_the_same_bits(
    fault: str, undisturbed: Path, place: Path
) -> None:
    done = command(place, *FAULTY, f"+model.fault={fault}", f"name=machine_{fault}")
    assert done.returncode == 0, done.stderr
    assert weights(only(place, f"outputs/runs/machine_{fault}/*")) == weights(undisturbed)


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
    done = command(place, *FAULTY, "training.steps=16", f"checkpoint.resume={folder}")
    assert done.returncode == 0, done.stderr
    assert "step_00000016" in done.stderr and "step 12" in done.stderr
    assert weights(folder) == weights(half)  # it came there again


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
    """A run in a process of its own, which waits two seconds in a step."""
    (place / folder).mkdir()
    shutil.copy(place / "faulty.py", place / folder)
    waiting = ["+model.fault=waits", "+model.once=waits", *typed]
    running = processes.start(place / folder, [*FAULTY, *waiting])
    limit = time.monotonic() + 60
    while not (place / folder / "waits").exists():
        assert time.monotonic() < limit and running.poll() is None
        time.sleep(0.02)
    return running


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_a_signal_leaves_a_checkpoint_that_the_same_command_goes_on_from(
    name: str, undisturbed: Path, place: Path
) -> None:
    number = signal.Signals[name]
    running = started(place, name, "checkpoint.resume=auto")
    running.send_signal(number)
    assert running.wait(60) == 128 + number
    typed = ("+model.fault=waits", "+model.once=waits", "checkpoint.resume=auto")
    done = command(place / name, *FAULTY, *typed)
    assert done.returncode == 0, done.stderr
    assert weights(only(place / name, "outputs/runs/*/*")) == weights(undisturbed)


@pytest.mark.slow
def test_a_second_process_in_the_folder_of_a_run_is_refused(place: Path) -> None:
    running = started(place, "twice", "hydra.run.dir=run")
    done = command(place / "twice", *FAULTY, "hydra.run.dir=run")
    running.send_signal(signal.SIGKILL)
    running.wait(60)
    assert done.returncode == 2
    assert f"run: in use by process {running.pid} " in done.stderr
