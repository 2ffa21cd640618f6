"""Random kills of a run's processes: does it always come to the weights of the run that had none?

python -m tests.distributed.endurance ranks 100     # SIGKILL of a random process, at any moment
python -m tests.distributed.endurance agent 20      # of the one that started them; started again
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.distributed import runs
from tests.runs import rows

STEPS, A_RUN = 160, 10  # kills in each run


def digest(folder: Path) -> str:
    """Of the weights of the last checkpoint and of all numbers that training reported."""
    weights = (folder / "checkpoints" / "last" / "model.safetensors").read_bytes()
    return hashlib.sha256(weights + repr(rows(folder, "train", "val")).encode()).hexdigest()


def kill_ranks(folder: Path, kills: int, draw: random.Random) -> tuple[int, int]:
    """A run of which random processes are killed; its exit code and how many were."""
    restarts = f"distributed.restarts={kills}"
    started = runs.start(folder, "", restarts, "data.workers=0", steps=STEPS, STEP_S="0.05")
    done, alive = 0, set[int]()
    while done < kills and started.process.poll() is None:
        time.sleep(draw.uniform(0.5, 12))
        # each has a process group of its own
        pids = {p.pid for p in started.ranks("") if _leads(p) and p.pid != started.process.pid}
        if pids - alive:  # others than those that were there at the last kill
            alive = pids
            with psutil_gone():
                os.kill(draw.choice(sorted(pids)), signal.SIGKILL)
                done += 1
    started.end(600)
    if started.left():
        print("LEFT", started.left(), flush=True)  # noqa: T201
    return started.code, done


def kill_agents(folder: Path, kills: int, draw: random.Random) -> tuple[int, int]:
    """The process that started them is killed, and the same command typed once more."""
    for done in range(kills + 1):
        typed = "checkpoint.resume=auto" if done else "checkpoint.resume=none"
        started = runs.start(folder, "", typed, "data.workers=0", steps=STEPS, STEP_S="0.05")
        if done < kills:
            deadline = time.monotonic() + draw.uniform(1, 14)
            while time.monotonic() < deadline and started.process.poll() is None:
                time.sleep(0.05)
            started.process.kill()
        started.end(600)
        if left := started.left(1.0):
            print("LEFT", left, flush=True)  # noqa: T201
        if started.code == 0:
            return 0, done
    return started.code, kills


def _leads(process: psutil.Process) -> bool:
    try:
        return os.getpgid(process.pid) == process.pid
    except ProcessLookupError:
        return False


class psutil_gone:  # noqa: N801
    """A process that has ended just now is no error."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        return isinstance(error, ProcessLookupError)


def main(what: str, kills: int, seed: int = 0) -> int:
    """Print a line for each run; the exit code is the number of those that differ."""
    draw, wrong, total = random.Random(seed), 0, 0  # noqa: S311
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole"
        assert runs.run(whole, "", "data.workers=0", steps=STEPS).code == 0
        expected = digest(whole)
        for number in range(-(-kills // A_RUN)):
            folder, start = Path(place) / f"run-{number}", time.monotonic()
            kill = kill_ranks if what == "ranks" else kill_agents
            code, done = kill(folder, min(A_RUN, kills - number * A_RUN), draw)
            same = code == 0 and digest(folder) == expected
            wrong, total = wrong + (not same), total + done
            if not same:
                shutil.copytree(folder, Path(tempfile.gettempdir()) / f"differs-{number}")
            seconds = time.monotonic() - start
            line = f"run {number}: {done} kills, exit {code}, same {same}, {seconds:.0f} s"
            print(line, flush=True)  # noqa: T201
    print(f"{what}: {total} kills, {wrong} runs differ", flush=True)  # noqa: T201
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
