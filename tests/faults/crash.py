"""SIGKILL at random moments: does each run come to the end of the one that was not killed?"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Lock

import psutil

from tests.faults import processes
from tests.faults.end_state import end_state
from tests.faults.modes import MODES, SLOW, typed

LIMIT_S = 900.0  # of one process
MOST = 8  # kills of one run
STOPS = 0.25  # share of kills before which all processes are stopped, or instead of which all ranks
CONTROLS = {  # a defect of resuming, a mode that it shows in, and the part that must differ
    "optimizer": ("BatchNorm, dropout, draws", "optimizer"),
    "rng": ("BatchNorm, dropout, draws", "random"),
    "ema": ("SGD, average, micro-batch", "average"),
    "guard": ("NaN batches", "guard"),
    "metrics": ("BatchNorm, dropout, draws", "metrics.jsonl"),
    "tensorboard": ("BatchNorm, dropout, draws", "TensorBoard"),
}
"""The modes are those that import `crash_package`, which makes the defect."""


@dataclass
class Tally:
    """The kills in one mode, and what the killed runs ended with."""

    kills: int = 0
    equal: int = 0  # kills of runs that ended as the whole one
    runs: int = 0
    when: Counter[str] = field(default_factory=Counter)  # kills by what the run was doing
    victims: Counter[str] = field(default_factory=Counter)  # where several processes train
    differ: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Killer:
    """Kills runs of one mode, and compares each one's end with that of the whole run."""

    def __init__(self, place: Path, mode: str, draw: random.Random, plant: str = "") -> None:
        self.place, self.mode, self.draw, self.plant = place, mode, draw, plant
        self.tally = Tally()
        whole = place / "whole"
        start = time.monotonic()
        code = processes.start(whole, typed(mode, whole / "run")).wait(LIMIT_S)
        self.life = time.monotonic() - start
        self.least = self.life / 2  # a run that has little left to do is shorter still
        assert code == 0, (whole / "console.log").read_text()[-3000:]
        self.expected = end_state(whole / "run")
        self._numbers, self._lock, self._begun = count(), Lock(), 0

    def run(self, kills: int, most: int = MOST, jobs: int = 1) -> Tally:
        """Until so many kills have been made, in so many runs at a time."""
        start = time.monotonic()
        with ThreadPoolExecutor(jobs) as pool:
            while self.tally.kills < kills:
                self._begun = self.tally.kills
                for work in [pool.submit(self._work, kills, most) for _ in range(jobs)]:
                    work.result()
        self.tally.seconds = time.monotonic() - start
        return self.tally

    def _work(self, kills: int, most: int) -> None:
        while True:
            with self._lock:
                own = min(kills - self._begun, self.draw.randint(1, most))
                self._begun += own
                number = next(self._numbers)
            if own <= 0:
                return
            self._one(self.place / str(number), own)

    def _one(self, folder: Path, kills: int) -> None:
        done, code = 0, -signal.SIGKILL
        while code == -signal.SIGKILL:
            process = processes.start(folder, typed(self.mode, folder / "run"), PLANT=self.plant)
            start = time.monotonic()
            while done < kills and self._wait(process, start):
                victim = self._kill(folder, process.pid)
                done += victim != 0
                if victim in (0, process.pid):
                    break
            try:
                code = process.wait(LIMIT_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            assert done or code == 0, (folder / "console.log").read_text()[-3000:]
        with self._lock:
            self.tally.kills += done
            self.tally.runs += 1
            self._compare(folder, code, done)

    def _wait(self, process: processes.Process, start: float) -> bool:
        """Until a moment of the run's life; False where it has ended before."""
        deadline = time.monotonic() + self.draw.uniform(0, self.life)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(min(0.01, max(0.0, deadline - time.monotonic())))
        if process.poll() == 0:  # it was quicker than the first one, which had a busy machine
            self.life = max(self.least, min(self.life, time.monotonic() - start))
        return process.poll() is None

    def _kill(self, folder: Path, pid: int) -> int:
        """The process that was killed: that which was started, or one of its own; 0 for none."""
        victim = pid
        if "distributed=ddp" in MODES[self.mode]:
            victim = self._choose_victim(pid)
            if not victim:
                return 0
        root = folder / "run" / "checkpoints"
        if list(root.glob(".tmp-*")):
            self.tally.when["saving"] += 1
        else:
            self.tally.when["training" if root.exists() else "starting"] += 1
        if self.draw.random() < STOPS:
            self._stop_for_a_while(pid)
        if victim != pid and self.draw.random() < STOPS:  # all ranks, which the agent has to notice
            self._send(processes.ranks(pid), signal.SIGSTOP)
            self.tally.when["by stopped ranks"] += 1
            return victim
        self._send([victim], signal.SIGKILL)
        return victim

    def _stop_for_a_while(self, pid: int) -> None:
        """Stop all processes of a run, which then continue where they were."""
        with suppress(psutil.Error):
            pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
            self._send(pids, signal.SIGSTOP)
            time.sleep(self.draw.uniform(0.1, 2.0))
            self._send(pids, signal.SIGCONT)
            time.sleep(self.draw.uniform(0, self.life / 8))  # until it is killed
            self.tally.when["after a stop of the whole"] += 1

    def _send(self, pids: Sequence[int], number: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _choose_victim(self, agent: int) -> int:
        """A rank for two of three kills, once there are any, else the agent; 0: all have ended."""
        with self._lock:
            victims = self.tally.victims
            name = "a rank" if victims["a rank"] < 2 * (victims["the agent"] + 1) else "the agent"
            victims[name] += 1
        if name == "the agent":
            return agent
        while not processes.ranks(agent) and psutil.pid_exists(agent):
            time.sleep(0.01)
        time.sleep(self.draw.uniform(0, self.life / 4))  # into what they do
        if ranks := processes.ranks(agent):
            return self.draw.choice(ranks)
        alive = psutil.pid_exists(agent)  # between two attempts
        with self._lock:
            victims.subtract({"a rank": 1, "the agent": -1 if alive else 0})
        return agent if alive else 0

    def _compare(self, folder: Path, code: int, kills: int) -> None:
        problem = f"exit code {code}" if code else ""
        if pids := processes.left_over(folder):
            problem = f"processes left over: {pids}"
        if not problem:
            ended = end_state(folder / "run")
            parts = [part for part in self.expected if ended[part] != self.expected[part]]
            if self.tally.victims["a rank"]:  # its loss has another one saved, and so one pruned
                parts = [part for part in parts if part != "checkpoints"]
            problem = ", ".join(parts)
        if problem:
            self.tally.differ.append(f"{folder}: {problem}")
        else:
            self.tally.equal += kills
            shutil.rmtree(folder)


def share(modes: Sequence[str], kills: int) -> dict[str, int]:
    """So many kills over the modes; less for those that start slowly."""
    weights = {mode: SLOW.get(mode, 1.0) for mode in modes}
    shares = {mode: int(kills * weight / sum(weights.values())) for mode, weight in weights.items()}
    first = modes[0]
    shares[first] += kills - sum(shares.values())
    return shares


def kill_modes(place: Path, modes: Sequence[str], kills: int, jobs: int, seed: int) -> list[Tally]:
    """A line for each mode as it ends."""

    def prove(mode: str, kills: int) -> Tally:
        own = place / str([*MODES].index(mode))
        killer = Killer(own, mode, random.Random(f"{seed} {mode}"))
        tally = killer.run(kills, jobs=max(1, jobs // len(modes)))
        when = ", ".join(f"{number} {what}" for what, number in sorted(tally.when.items()))
        when += "".join(f"; {number} of {what}" for what, number in tally.victims.items())
        print(
            f"{mode:28} {tally.equal:5,} / {tally.kills:,} equal in {tally.runs} runs, "
            f"{tally.seconds:.0f} s ({when})", *tally.differ, sep="\n    ", flush=True,
        )  # fmt: skip
        return tally

    shares = share(modes, kills)
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(prove, shares, shares.values()))


def prove_controls(place: Path, plants: Sequence[str], seed: int) -> bool:
    """Whether each planted defect is noticed, in the part that it is a defect of."""
    missed = 0
    for plant in plants:
        mode, part = CONTROLS[plant]
        killer = Killer(place / f"control-{plant}", mode, random.Random(f"{seed} {plant}"), plant)
        for kills in range(5, 45, 5):
            problems = "; ".join(killer.run(kills, most=5).differ)
            if part in problems:
                break
        missed += part not in problems
        seen = "noticed" if part in problems else f"MISSED: {problems}"
        print(f"planted: {plant:12} in {mode:26} {seen}", flush=True)
    return not missed


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 where a run differs or a planted defect is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--modes", nargs="*", choices=[*MODES], default=[*MODES], metavar="MODE")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", action="store_true", help="faults at every file call instead")
    parser.add_argument("--stride", type=int, default=1, help="with --calls: every n-th call")
    parser.add_argument("--smoke", action="store_true", help="a few kills and one planted defect")
    asked = parser.parse_args(arguments)
    plants = [*CONTROLS]
    if asked.smoke:
        asked.modes, asked.kills, plants = ["BatchNorm, dropout, draws"], 3, ["rng"]
    place = Path(tempfile.mkdtemp(prefix="prove_crash_"))
    if asked.calls:
        from tests.faults.calls import prove_calls

        good = prove_calls(place, asked.stride, asked.jobs)
    else:
        processes.serve()
        tallies = kill_modes(place, asked.modes, asked.kills, asked.jobs, asked.seed)
        equal, kills = sum(t.equal for t in tallies), sum(t.kills for t in tallies)
        print(f"{equal:,} / {kills:,} equal", flush=True)
        good = prove_controls(place, plants, asked.seed) and equal == kills >= asked.kills
    if good:
        shutil.rmtree(place, ignore_errors=True)
    else:
        print(f"FAILED; the folders of the runs are in {place}", flush=True)
    return not good
