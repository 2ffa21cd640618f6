"""A run that is killed while it saves, or whose disk fails, leaves a good checkpoint."""

import json
import os
import random
import select
import signal
import subprocess
import sys

import pytest
import torch

from runner.checkpoint.checkpointer import Checkpointer

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and real signals")

# One process loads torch and forks a run for each line it reads, since loading costs seconds.
SERVER = r"""
import json, logging, os, resource, signal, sys
from pathlib import Path
import torch
from runner.checkpoint.checkpointer import Checkpointer
from runner.errors import StorageError

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
            if not kill_at:
                os.write(1, b"event\n")
    sys.addaudithook(hook)

def run(folder, kill_at=None, limit=None, steps=()):
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    checkpointer = Checkpointer(Path(folder), keep=2)
    if kill_at is not None:
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
    os.write(1, f"started {child}\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"ended\n")
"""


class Server:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.buffer = b""

    def lines(self, **run):
        """What one run says, line by line, until it has ended."""
        self.process.stdin.write(json.dumps(run).encode() + b"\n")
        self.process.stdin.flush()
        while (line := self.line()) != "ended":
            yield line

    def line(self):
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], 60)
            assert ready, "the saving process hangs"
            data = os.read(self.process.stdout.fileno(), 65536)
            assert data, "the saving process is gone"
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        return line.decode()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


STEPS = [[1, 20, False], [2, 20, True], [3, 20, False], [3, 20, False]]


def assert_whole(folder, saved):
    """What was said to be saved, or something newer, is there, whole, and all else is tidy."""
    for checkpointer, where in ((Checkpointer(None, 1), folder), (Checkpointer(folder, 2), None)):
        if not saved and where is not None and not list(folder.glob("checkpoints/*step_*")):
            continue
        restored = checkpointer.restore(where)
        if restored is None:
            assert saved == 0
            return
        assert restored.step >= saved and not restored.warnings
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
def test_a_kill_before_any_change_to_the_disk_leaves_a_good_checkpoint(server, tmp_path, stride):
    for kill_at in range(1, 1000, stride):
        folder = tmp_path / str(kill_at)
        folder.mkdir()
        lines = list(server.lines(folder=str(folder), kill_at=kill_at, steps=STEPS))
        saved = [int(line.split()[1]) for line in lines if line.startswith("saved")]
        assert_whole(folder, max(saved, default=0))
        if "finished" in lines:
            break
    assert kill_at > 50, "the kills did not reach the saving"


def test_a_kill_at_any_moment_leaves_a_good_checkpoint(server, tmp_path):
    rng = random.Random(0)
    steps = [[step, 200_000, step == 2] for step in range(1, 30)]
    killed = 0
    for trial in range(10):
        folder = tmp_path / str(trial)
        folder.mkdir()
        wait_for, saved, pid = rng.randrange(1, 120), 0, 0
        for count, line in enumerate(server.lines(folder=str(folder), kill_at=0, steps=steps)):
            word, *rest = line.split()
            if word == "started":
                pid = int(rest[0])
            elif word == "saved":
                saved = int(rest[0])
            if count == wait_for:
                os.kill(pid, signal.SIGKILL)
                killed += 1
        assert_whole(folder, saved)
    assert killed == 10


def test_a_disk_that_takes_no_more_keeps_the_last_good_one_and_ends_the_run_at_the_third(
    server, tmp_path
):
    small, large = 100, 100_000
    steps = [[1, small, True], [2, large, False], [3, small, False], [4, large, False]]
    steps += [[5, large, False], [6, large, False], [7, small, False]]
    lines = list(server.lines(folder=str(tmp_path), limit=100_000, steps=steps))
    assert lines[1:6] == [
        "saved 1 {}",
        "saved 2 {'checkpoint': 1}",
        "saved 3 {'checkpoint': 1}",
        "saved 4 {'checkpoint': 2}",
        "saved 5 {'checkpoint': 3}",
    ]
    assert lines[6].startswith(f"refused {tmp_path}/checkpoints: 3 checkpoints in a row")
    assert lines[6].endswith("not written: File too large")
    left = sorted(os.listdir(tmp_path / "checkpoints"))
    assert left == ["best", "last", "step_00000001", "step_00000003"]
    restored = Checkpointer(tmp_path, 2).restore()
    assert restored.step == 3 and not restored.warnings
