"""Every file call of a short run: killed before it, torn, or failed; what becomes of the run."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults import processes
from tests.faults.end_state import end_state, run_files
from tests.faults.modes import COMMON, TABLE

HOWS = ("kill", "torn", "ENOSPC", "EIO", "EROFS", "EMFILE")
SHORT = [*COMMON, *TABLE, "model.width=4", "training.steps=6", "checkpoint.every=2",
         "checkpoint.keep=1", "training.validate_every=3", "monitoring.every=2"]  # fmt: skip
CODES = (0, 5, -signal.SIGKILL)  # done, storage failed, killed
LIMIT_S = 600.0
REFUSED = ("checkpoints", "best", "files")  # where one was refused; see `unexplained_files`


def compile_shim(place: Path) -> Path:
    """The library that is loaded before the C library, compiled here."""
    source, library = Path(__file__).with_name("calls.c"), place / "calls.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library


def _run(folder: Path, **variables: str) -> int:
    under = {"CALLS_UNDER": f"{folder / 'run'}"} if variables else {}
    process = processes.start(
        folder, [*SHORT, f"hydra.run.dir={folder / 'run'}"], **under, **variables
    )
    return process.wait(LIMIT_S)


def try_call(folder: Path, number: int, how: str, expected: dict[str, str]) -> tuple[str, int]:
    """What differs from the whole run after a call was spoilt, and the code of that run."""
    code = _run(folder, CALLS_AT=str(number), CALLS_HOW=how)
    if code not in CODES:
        lines = (folder / "console.log").read_text().splitlines()
        return f"exit code {code}: {lines[-1] if lines else ''}", code
    again = _run(folder) if code else 0
    if again:
        return f"exit code {again} of the run that goes on", code
    try:
        ended = end_state(folder / "run")
    except OSError as error:
        return str(error), code
    free = ("checkpoints",) if how in ("kill", "torn") else REFUSED
    parts = [name for name in expected if ended[name] != expected[name] and name not in free]
    if how not in ("kill", "torn"):
        parts += unexplained_files(folder, folder.parent / "whole")
    if pids := processes.left_over(folder):
        parts.append(f"processes left over: {pids}")
    if not parts:
        shutil.rmtree(folder)
    return ", ".join(parts), code


def unexplained_files(folder: Path, whole: Path) -> list[str]:
    """The files that are missing without a warning that names them, or too many.

    Checkpoints are compared apart: one that was refused or not deleted is no other end.
    """
    wanted, found = ({*run_files(place / "run")} for place in (whole, folder))
    lines = (folder / "console.log").read_text().splitlines()
    warned = " ".join(line for line in lines if "warning: " in line and "not written" in line)
    refused = {name for name in wanted if {"curves.svg": "report.md"}.get(name, name) in warned}
    problems = (wanted - found - refused) | (found - wanted)
    return sorted(name for name in problems if not name.startswith("checkpoints/"))


def prove_calls(place: Path, stride: int, jobs: int) -> bool:
    """Whether all of them come to the end of the whole run; a line for each way to spoil a call."""
    processes.serve(LD_PRELOAD=str(compile_shim(place)))
    whole, log = place / "whole", place / "calls.log"
    assert _run(whole, CALLS_LOG=str(log)) == 0, (whole / "console.log").read_text()[-3000:]
    expected, names = end_state(whole / "run"), log.read_text().split()
    kinds = ", ".join(f"{number} {name}" for name, number in Counter(names).most_common())
    print(f"{len(names)} calls that change files in one run: {kinds}", flush=True)
    equal = total = 0
    for how in HOWS:
        opens = [n for n, name in enumerate(names, 1) if how != "EMFILE" or "open" in name]
        numbers = opens[::stride]
        codes, problems = Counter[int](), []

        def one(number: int, how: str = how) -> tuple[int, str, int]:
            return number, *try_call(place / f"{how}-{number}", number, how, expected)

        with ThreadPoolExecutor(jobs) as pool:
            for number, problem, code in pool.map(one, numbers):
                codes[code] += 1
                if problem:
                    problems.append(f"{how} at call {number} ({names[number - 1]}): {problem}")
        ended = ", ".join(f"{count} with {code}" for code, count in sorted(codes.items()))
        good = len(numbers) - len(problems)
        equal, total = equal + good, total + len(numbers)
        print(f"{how:7} {good} / {len(numbers)} equal; ended: {ended}", *problems, sep="\n    ")
    print(f"{equal:,} / {total:,} equal", flush=True)
    return equal == total > 0
