"""A run that is killed while it saves, or whose disk fails, leaves a good checkpoint."""

import json
import os
import subprocess
import sys

import pytest
import torch

from runner.core.checkpoint.checkpointer import Checkpointer

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and real signals")

# One process loads torch and forks a run for each line it reads, since loading costs seconds.
SERVER = r"""
import json, logging, os, resource, signal, sys
from pathlib import Path
import torch
from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.errors import StorageError

torch.set_num_threads(1)  # OpenMP hangs in a forked child
WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.truncate"}

def watch(kill_at):
    count = 0
    def hook(event, args):
        nonlocal count
        if event in WRITES or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def run(folder, kill_at=0, limit=None, steps=()):
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    checkpointer = Checkpointer(Path(folder), keep=2)
    if kill_at:
        watch(kill_at)
    for step, size, best in steps:
        try:
            checkpointer.save(step, {"w": torch.full((size,), float(step))}, {"step": step}, best)
            checkpointer.wait()
        except StorageError as error:
            os.write(1, f"refused {error}\n".encode())
            return
        os.write(1, f"saved {step} {checkpointer.faults}\n".encode())
    os.write(1, b"finished\n")

logging.disable()
for line in sys.stdin:
    child = os.fork()
    if not child:
        run(**json.loads(line))
        os._exit(0)
    os.waitpid(child, 0)
    os.write(1, b"ended\n")
"""


@pytest.fixture(scope="module")
def saved():
    """Makes a run that saves steps; what it prints, line by line, until it has ended."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command, environment = [sys.executable, "-c", SERVER], {**os.environ, **environment}
    with subprocess.Popen(command, env=environment, **pipes) as process:

        def lines(**run):
            print(json.dumps(run), file=process.stdin, flush=True)
            printed = []
            while (line := process.stdout.readline()) != "ended\n":
                assert line, "the saving process is gone"
                printed.append(line.rstrip())
            return printed

        yield lines
        process.kill()


STEPS = [[1, 20, False], [2, 20, True], [3, 20, False], [3, 20, False]]


def assert_whole(folder, step):
    """The step that was saved, or a newer one, is there, whole, and all else is tidy."""
    for checkpointer, where in ((Checkpointer(None, 1), folder), (Checkpointer(folder, 2), None)):
        if not step and where is not None and not list(folder.glob("checkpoints/*step_*")):
            continue
        restored = checkpointer.restore(where)
        if restored is None:
            assert step == 0
            return
        assert restored.step >= step and not restored.warnings
        assert restored.state["step"] == restored.step
        assert (restored.model["w"] == restored.step).all()
    root = folder / "checkpoints"
    assert checkpointer.last == f"checkpoints/step_{restored.step:08d}"
    assert (checkpointer.best == "checkpoints/step_00000002") == (restored.step >= 2)
    checkpointer.prune(restored.step)  # as a run does that continues there
    whole = sorted(root.glob("step_*"))
    assert all((f / "manifest.json").exists() for f in whole)
    assert [f.name for f in whole[:-2]] in ([], ["step_00000002"])
    assert all(torch.load(f / "state.pt", weights_only=True) for f in whole)
    assert not [name for name in os.listdir(root) if name.startswith(".")]


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_before_any_change_to_the_disk_leaves_a_good_checkpoint(saved, tmp_path, stride):
    for kill_at in range(1, 1000, stride):
        folder = tmp_path / str(kill_at)
        folder.mkdir()
        lines = saved(folder=str(folder), kill_at=kill_at, steps=STEPS)
        steps = [int(line.split()[1]) for line in lines if line.startswith("saved")]
        assert_whole(folder, max(steps, default=0))
        if "finished" in lines:
            break
    assert kill_at > 50, "the kills did not reach the saving"


def test_a_disk_that_takes_no_more_keeps_the_last_good_one_and_ends_the_run_at_the_third(
    saved, tmp_path
):
    small, large = 100, 100_000
    steps = [[1, small, True], [2, large, False], [3, small, False], [4, large, False]]
    steps += [[5, large, False], [6, large, False], [7, small, False]]
    lines = saved(folder=str(tmp_path), limit=100_000, steps=steps)
    counts = ["{}", *(f"{{'checkpoint': {failed}}}" for failed in (1, 1, 2, 3))]
    assert lines[:5] == [f"saved {step} {faults}" for step, faults in enumerate(counts, 1)]
    assert lines[5].startswith(f"refused {tmp_path}/checkpoints: 3 checkpoints in a row")
    assert lines[5].endswith("not written: File too large")
    left = sorted(os.listdir(tmp_path / "checkpoints"))
    assert left == ["best", "last", "step_00000001", "step_00000003"]
    restored = Checkpointer(tmp_path, 2).restore()
    assert restored.step == 3 and not restored.warnings
