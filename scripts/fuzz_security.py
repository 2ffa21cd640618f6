"""Changes files and configs at random, and sees that the two doors hold.

    python scripts/fuzz_security.py [--checkpoints 10000] [--configs 2000] [--seed 0] [--jobs 2]

Checkpoints are sound zips, safetensors, legacy files, npz and npy, a few bytes or fields of which
were changed (tests/security/files/mutants.py); configs are those of both corpora, a word or a file
of which was. The same seed gives the same mutants. Processes of their own try them, so that one
that dies or hangs is counted with the number of the mutant that it died of, and the rest goes on.

What must hold: no crash, none that takes longer than ten seconds, bounded memory; a file that
loads is what it was or has another digest; for a config nothing is imported or run. Exit code 1
where that is not so.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SECONDS = 10.0  # that one mutant may take
START = 120.0  # that a process may take before its first
MEGABYTES = 1_000  # that all of them together may add to a process
SPACE = 16 << 30  # bytes of addresses, so that a bomb cannot take the machine along
SHOWN = 20  # faults that are printed


@dataclass
class Found:
    """What became of the mutants of one kind."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)  # with the number of the mutant
    hangs: list[int] = field(default_factory=list)
    crashes: list[int] = field(default_factory=list)  # of the whole process
    peak: float = 0.0  # megabytes that a process grew by
    slowest: tuple[float, int] = (0.0, -1)  # seconds, and the mutant's number

    def add(self, other: Found) -> None:
        self.outcomes += other.outcomes
        self.faults += other.faults
        self.hangs += other.hangs
        self.crashes += other.crashes
        self.peak = max(self.peak, other.peak)
        self.slowest = max(self.slowest, other.slowest)

    @property
    def holds(self) -> bool:
        return not (self.faults or self.hangs or self.crashes) and self.peak <= MEGABYTES


def work(pipe: Connection, kind: str, seed: int, numbers: range) -> None:
    """In a process of its own: each mutant in turn, and what became of it into the pipe."""
    from tests.security.files import judging, mutants

    resource.setrlimit(resource.RLIMIT_AS, (SPACE, SPACE))
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sys.path.insert(0, str(judging.set_traps(folder)))
        pipe.send("ready")
        before = _peak()
        for number in numbers:
            start = time.monotonic()
            fault = outcome = ""
            try:
                if kind == "checkpoints":
                    outcome = judging.judge_file(mutants.mutant(seed, number), folder)
                else:
                    _empty(folder / "here")
                    outcome = judging.judge_config(judging.mutated_case(seed, number), folder)
            except Exception as error:
                trace = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(trace.filename).name}:{trace.lineno}"
                fault = f"{type(error).__name__} at {where}: {str(error)[:150]}"
            if not number % 100:
                before = min(before, _peak())
            pipe.send((number, outcome, fault, time.monotonic() - start, _peak() - before))
    pipe.close()


def _empty(here: Path) -> None:
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    os.chdir(here)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def try_all(kind: str, seed: int, numbers: range) -> Found:
    """As many processes, one after the other, as it takes: one ends where a mutant ends it."""
    found, rest = Found(), numbers
    context = multiprocessing.get_context("spawn")  # nothing of this process is in the others
    while rest:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(theirs, kind, seed, rest), daemon=True)
        process.start()
        theirs.close()
        rest = _follow(found, ours, rest)
        process.kill()
        process.join()
        ours.close()
    return found


def _follow(found: Found, pipe: Connection, rest: range) -> range:
    """Take note until the process is done, hangs or dies; the mutants that are left."""
    patience = START
    while rest:
        try:
            if not pipe.poll(patience):
                found.hangs.append(rest[0])
                return rest[1:]
            told = pipe.recv()
        except (EOFError, ConnectionResetError):
            found.crashes.append(rest[0])
            return rest[1:]
        patience = SECONDS
        if told == "ready":
            continue
        number, outcome, fault, seconds, grown = told
        found.peak = max(found.peak, grown)
        found.slowest = max(found.slowest, (seconds, number))
        if fault:
            found.faults.append(f"{number}: {fault}")
        else:
            found.outcomes[outcome] += 1
        rest = rest[1:]
    return rest


def say(kind: str, count: int, found: Found, seconds: float) -> None:
    print(f"{count:,} {kind} in {seconds:.0f} s")
    for outcome, times in found.outcomes.most_common():
        print(f"  {times:7,} {outcome}")
    print(f"  {len(found.crashes):7,} crashes {found.crashes[:SHOWN] or ''}")
    print(f"  {len(found.hangs):7,} longer than {SECONDS:.0f} s {found.hangs[:SHOWN] or ''}")
    print(f"  {len(found.faults):7,} faults")
    for fault in found.faults[:SHOWN]:
        print(f"          {fault}")
    slowest, number = found.slowest
    print(f"  slowest {slowest:.2f} s (number {number}); peak memory +{found.peak:.0f} MB")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--configs", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    asked = parser.parse_args()
    holds = True
    for kind in ("checkpoints", "configs"):
        count, start = getattr(asked, kind), time.monotonic()
        parts = [range(i, count, asked.jobs) for i in range(asked.jobs)]
        found = Found()
        with ThreadPoolExecutor(asked.jobs) as pool:
            for part in pool.map(lambda part: try_all(kind, asked.seed, part), parts):  # noqa: B023
                found.add(part)
        say(kind, count, found, time.monotonic() - start)
        holds = holds and found.holds
    print("every invariant holds" if holds else "NOT every invariant holds")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
