"""A distributed run in processes of its own, with a fault that is planted in one of them."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from tests.faults import processes as forked
from tests.runs import read, rows, wait_until

HERE = Path(__file__).parent
TIMEOUT_S = 8
MARK = "RUN_MARK"
PATH = os.pathsep.join([str(HERE), str(HERE.parents[2]), *filter(None, sys.path)])


@dataclass
class Started:
    """`python -m runner distributed=ddp …` in a session of its own, forked from a warm process."""

    folder: Path
    mark: str
    process: forked.Process
    console: Path
    seconds: float = 0.0

    def end(self, timeout_s: float = 200) -> Started:
        """Wait for its end, which leaves no process behind."""
        start = time.monotonic()
        self.process.wait(timeout_s)
        self.seconds = time.monotonic() - start
        return self

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def output(self) -> str:
        return self.console.read_text()

    @property
    def code(self) -> int | None:
        return self.process.returncode

    @property
    def message(self) -> str:
        """The last line, without its time."""
        return self.output.splitlines()[-1]

    @cached_property
    def summary(self) -> dict[str, Any]:
        return read(self.folder)

    def log(self, rank: int) -> str:
        return (self.own(rank) / "run.log").read_text()

    def own(self, rank: int) -> Path:
        return self.folder / "ranks" / str(rank) if rank else self.folder

    def left(self, within_s: float = 2.0) -> list[str]:
        """Processes that are still there some time after the end."""
        deadline = time.monotonic() + within_s
        while (found := list(self.ranks(""))) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [f"{process.pid} {process.status()}" for process in found]

    def ranks(self, rank: int | str) -> list[psutil.Process]:
        """The processes of a rank; all of the run's for an empty one."""
        found = forked.marked(MARK, self.mark)
        if rank == "":
            return found
        pid = (self.folder / f"pid-{rank}").read_text()
        return [process for process in found if process.pid == int(pid)]

    def wait_for(self, path: str, timeout_s: float = 120) -> None:
        """Until there is such a file in its folder."""
        wait_until(lambda: [*self.folder.glob(path)], self.process, timeout_s)

    def send(self, number: int, to: str = "agent") -> None:
        if to == "group":
            os.killpg(self.process.pid, number)
        elif to == "agent":
            os.kill(self.process.pid, number)
        else:
            os.kill(int((self.folder / f"pid-{to}").read_text()), number)


def start(
    folder: Path, fault: str = "", *typed: str, steps: int = 12, processes: int = 2, **env: str
) -> Started:
    """Train for some steps of 16 samples, with a checkpoint after every fourth."""
    mark = uuid4().hex
    command = [
        "distributed=ddp", f"distributed.processes={processes}",
        f"distributed.timeout_s={TIMEOUT_S}", f"hydra.run.dir={folder}", "device=cpu",
        "device.threads=1", "security.trusted=[faulty]", "data._target_=faulty.Data",
        "model._target_=faulty.Net", "+debug.hooks=[{_target_: faulty.Watch}]",
        f"training.steps={steps}", "training.batch_size=16", "training.validate_every=4",
        "checkpoint.keep=3", "monitoring.every=2", "monitoring.progress=false", *typed,
    ]  # fmt: skip
    once = folder.parent / f"{folder.name}-once"
    once.mkdir(parents=True, exist_ok=True)
    env = {"FAULT": fault, "FAULT_ONCE": str(once), "FAULT_FOLDER": str(folder), **env}
    env |= {MARK: mark, "PYTHONPATH": PATH}
    forked.serve("runner.scale.distributed.launch", PYTHONPATH=PATH)
    console = folder.parent / f"{folder.name}.console"
    process = forked.start(folder.parent, command, console.name, **env)
    return Started(folder, mark, process, console)


def run(folder: Path, fault: str = "", *typed: str, **how: Any) -> Started:
    """Start it, wait for its end, and see that nothing is left."""
    started = start(folder, fault, *typed, **how)
    try:
        started.end()
    finally:
        started.kill()
    assert started.left() == []
    return started


def digest(folder: Path) -> str:
    """Of the weights of the last checkpoint and of all numbers that training reported."""
    weights = (folder / "checkpoints" / "last" / "model.safetensors").read_bytes()
    return hashlib.sha256(weights + repr(rows(folder, "train", "val")).encode()).hexdigest()
