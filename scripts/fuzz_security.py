"""Changes files and configs at random, and sees that the two doors hold.

    python scripts/fuzz_security.py [--checkpoints 10000] [--configs 2000] [--seed 0] [--jobs 2]

Checkpoints are sound zips, safetensors, legacy files, npz and npy with a few changed bytes or
fields (tests/core/security/files/mutants.py); configs are those of both corpora with a changed
word or file. The same seed gives the same mutants. Processes of their own try them, so that one
that dies or hangs is counted with the number of the mutant that it died of, and the rest goes on.

What must hold: no crash, none that takes longer than ten seconds; a file that loads is what it was
or has another digest; for a config nothing is imported or run. Exit code 1 where that is not so.
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
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SECONDS = 10.0  # that one mutant may take
START = 120.0  # that a process may take before its first
SPACE = 16 << 30  # bytes of addresses, so that a bomb cannot take the machine along
SHOWN = 20  # faults that are printed


@dataclass
class Tally:
    """What became of the mutants of one kind."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)  # with the number of the mutant
    slowest: tuple[float, int] = (0.0, -1)  # seconds, and the mutant's number

    def add(self, other: Tally) -> None:
        self.outcomes += other.outcomes
        self.faults += other.faults
        self.slowest = max(self.slowest, other.slowest)


def judge(kind: str, seed: int, number: int, folder: Path) -> str:
    """What became of one mutant. Raises whatever is a fault."""
    from tests.core.security.files import judging, mutants

    if kind == "checkpoints":
        return judging.judge_file(mutants.mutant(seed, number), folder)
    shutil.rmtree(folder / "here", ignore_errors=True)
    (folder / "here").mkdir()
    os.chdir(folder / "here")
    return judging.judge_config(judging.mutated_case(seed, number), folder)


def work(pipe: Connection, kind: str, seed: int, numbers: range) -> None:
    """In a process of its own: each mutant in turn, and what became of it into the pipe."""
    from tests.core.security.files import judging

    resource.setrlimit(resource.RLIMIT_AS, (SPACE, SPACE))
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sys.path.insert(0, str(judging.set_traps(folder)))
        pipe.send("ready")
        for number in numbers:
            start, outcome, fault = time.monotonic(), "", ""
            try:
                outcome = judge(kind, seed, number, folder)
            except Exception as error:
                fault = f"{type(error).__name__}: {str(error)[:150]}"
            pipe.send((number, outcome, fault, time.monotonic() - start))
    pipe.close()


def try_all(kind: str, seed: int, numbers: range) -> Tally:
    """As many processes, one after the other, as it takes: one ends where a mutant ends it."""
    tally, rest = Tally(), numbers
    context = multiprocessing.get_context("spawn")  # nothing of this process is in the others
    while rest:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(theirs, kind, seed, rest), daemon=True)
        process.start()
        theirs.close()
        rest = follow(tally, ours, rest)
        process.kill()
        process.join()
        ours.close()
    return tally


def follow(tally: Tally, pipe: Connection, rest: range) -> range:
    """Take note until the process is done, hangs or dies; the mutants that are left."""
    patience = START
    while rest:
        try:
            if not pipe.poll(patience):
                tally.faults.append(f"{rest[0]}: took longer than {patience:.0f} s")
                return rest[1:]
            answer = pipe.recv()
        except (EOFError, ConnectionResetError):
            tally.faults.append(f"{rest[0]}: ended the process")
            return rest[1:]
        patience = SECONDS
        if answer == "ready":
            continue
        number, outcome, fault, seconds = answer
        tally.slowest = max(tally.slowest, (seconds, number))
        if fault:
            tally.faults.append(f"{number}: {fault}")
        else:
            tally.outcomes[outcome] += 1
        rest = rest[1:]
    return rest


def report(kind: str, count: int, tally: Tally, seconds: float) -> None:
    print(f"{count:,} {kind} in {seconds:.0f} s")
    for outcome, times in tally.outcomes.most_common():
        print(f"  {times:7,} {outcome}")
    print(f"  {len(tally.faults):7,} faults")
    for fault in tally.faults[:SHOWN]:
        print(f"          {fault}")
    print(f"  slowest {tally.slowest[0]:.2f} s (number {tally.slowest[1]})")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--configs", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    asked = parser.parse_args()
    holds = True
    for kind in ("checkpoints", "configs"):
        count, start, tally = getattr(asked, kind), time.monotonic(), Tally()
        parts = [range(i, count, asked.jobs) for i in range(asked.jobs)]
        with ThreadPoolExecutor(asked.jobs) as pool:
            for part in pool.map(partial(try_all, kind, asked.seed), parts):
                tally.add(part)
        report(kind, count, tally, time.monotonic() - start)
        holds = holds and not tally.faults
    print("every invariant holds" if holds else "NOT every invariant holds")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
