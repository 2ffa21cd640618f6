"""A sweep of many jobs, some broken in each of ten ways, whose parent is killed and begun again."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults import processes
from tests.faults.broken_job import WAYS

BAD_SEED = -1  # refused before the job begins: the tenth way
COMMON = [
    "data=cancer", "model=mlp", "model.width=4", "training.steps=30", "optimization=none",
    "device=cpu", "security.trusted=[broken_job]", "+debug.hooks=[{_target_: broken_job.Break}]",
    "hydra.launcher.jobs=2",
]  # fmt: skip
LIMIT_S = 7200.0


def start(
    folder: Path, seeds: Sequence[int], broken: dict[int, str], timeout_s: float
) -> subprocess.Popen[bytes]:
    """The command of the sweep; typed again it goes on with it."""
    variables = {"BROKEN": json.dumps(broken), "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join(map(str, processes.PATHS))
    words = [
        *COMMON,
        f"hydra.launcher.timeout_s={timeout_s:g}",
        f"seed={','.join(map(str, seeds))}",
    ]
    with open(folder / "console.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "runner", "-m", *words], cwd=folder, stdout=log, stderr=log,
            env={**os.environ, "PYTHONPATH": path, **variables}, start_new_session=True,
        )  # fmt: skip


def kill_and_continue(
    folder: Path, seeds: Sequence[int], broken: dict[int, str], timeout_s: float,
    kills: int, draw: random.Random,
) -> int:  # fmt: skip
    """The exit code of the last of the commands, of which the others were killed.

    The kills are spread over the jobs, each at a moment drawn within the second after one is done.
    """
    share = (len(seeds) - len(broken)) / (kills + 1)
    moments = [share * (number + draw.random()) for number in range(kills)]
    for moment in [*moments, None]:
        process = start(folder, seeds, broken, timeout_s)
        try:
            if moment is None:
                return process.wait(LIMIT_S)
            while process.poll() is None and _done(folder) < moment:
                time.sleep(0.1)
            time.sleep(draw.random())
            assert process.poll() is None, "the sweep has ended before it was killed"
            os.kill(process.pid, signal.SIGKILL)
            print(f"the sweep's process is killed, {_done(folder)} jobs done", flush=True)
        finally:
            process.kill()
            process.wait()
    raise AssertionError


def _done(folder: Path) -> int:
    jobs = [job for path in _records(folder) for job in json.loads(path.read_text())["jobs"]]
    return sum(job["status"] == "done" for job in jobs)


def _records(folder: Path) -> list[Path]:
    return sorted(folder.glob("outputs/sweeps/*/*/sweep.json"))


def problems_of(folder: Path, broken: dict[int, str], code: int) -> list[str]:
    """What is not as it must be in the record of the sweep."""
    records = _records(folder)
    found = [] if code == 7 else [f"exit code {code} and not 7"]
    if len(records) != 1:
        return [*found, f"{len(records)} sweeps and not 1"]
    reported = (records[0].parent / "comparison.json").read_text()
    for job in json.loads(records[0].read_text())["jobs"]:
        seed = int(next(t for t in job["overrides"] if t.startswith("seed=")).partition("=")[2])
        way = "bad_config" if seed <= BAD_SEED else broken.get(seed, "")
        statuses, reason = {**WAYS, "": (("done",), ""), "bad_config": (("failed",), "seed")}[way]
        if job["status"] not in statuses or reason not in job["reason"]:
            found.append(f"{job['folder']} {way or 'sound'}: {job['status']}: {job['reason']}")
        if way and json.dumps(job["reason"])[1:40] not in reported:
            found.append(f"{job['folder']} {way}: its reason is not in comparison.json")
        if not way and not (records[0].parent / job["folder"] / "summary.json").exists():
            found.append(f"{job['folder']}: no summary.json")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 where a job is not as it must be, or a process is left over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="6 jobs, of which 3 are broken")
    asked = parser.parse_args(arguments)
    draw, begun = random.Random(asked.seed), time.monotonic()
    ways = [*WAYS, *WAYS]
    if asked.smoke:
        asked.jobs, asked.kills, ways = 6, 1, ["raise_error", "segfault"]
    bad = 1 if asked.smoke else 2  # seeds that are refused
    sound = asked.jobs - len(ways) - bad
    numbers = [*range(asked.jobs - bad)]
    broken = dict(zip(draw.sample(numbers, len(ways)), ways, strict=True))
    seeds = [*numbers, *range(BAD_SEED, BAD_SEED - bad, -1)]
    draw.shuffle(seeds)
    place = Path(tempfile.mkdtemp(prefix="prove_sweep_"))
    code = kill_and_continue(place, seeds, broken, 60.0, asked.kills, draw)
    found, done = problems_of(place, broken, code), _done(place)
    left = processes.left_over(place)
    print(*found, sep="\n", end="\n" if found else "")
    named = len(seeds) - done
    print(
        f"{done} / {sound} results, {named} / {len(ways) + bad} named with a reason, "
        f"{len(left)} processes left over, {time.monotonic() - begun:.0f} s"
    )
    good = not found and not left and done == sound
    if good:
        shutil.rmtree(place)
    else:
        print(f"FAILED; the sweep is in {place}")
    return not good
