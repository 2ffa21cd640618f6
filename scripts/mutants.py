"""Break the program in one place at a time and show that a test fails.

    python scripts/mutants.py [FILTER] [--check] [--list] [-x] [--jobs 2]

`mutants.toml` beside this script lists the breaks: a text that occurs exactly once in a file, the
text that replaces it, and the tests that must notice. FILTER is a regular expression on names and
files. The breaks are made in copies of the checkout, one a process, never in the checkout itself.
All tests of the chosen breaks run on an unbroken copy first (the control): a test that fails there
proves nothing. `--check` only compares the list with the code. Exit code 0: every break was caught;
1: one survived, or its control failed; 2: the list does not fit the code.
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("runner", "conf", "tests", "scripts", "docs", "examples")  # beside single files
TIMEOUT_S = 300
CONTROL_S = 60  # more for each test function of the control
_copy = Path()  # of this process
PRELOAD = ("torch", "hydra", "numpy", "pytest", "rich.console", "torch.utils.tensorboard")


@dataclass(frozen=True)
class Mutant:
    """One break: `old` becomes `new` in `file`, and one of `tests` must fail.

    Tests that are marked slow are among them only with `slow`.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    slow: bool = False

    def problem(self, root: Path) -> str | None:
        """Why this entry does not fit the code, or None."""
        path = root / self.file
        if not path.is_file():
            return f"{self.file} does not exist"
        if (count := path.read_text().count(self.old)) != 1:
            return f"its text occurs {count} times in {self.file}, not once"
        missing = [test for test in self.tests if not _exists(root, test)]
        if missing or not self.tests:
            return f"no such test: {', '.join(missing) or 'none named'}"
        if self.old == self.new:
            return "old and new are equal"
        try:
            if path.suffix == ".py":
                ast.parse(path.read_text().replace(self.old, self.new))
        except SyntaxError as error:
            return f"the break is no Python: {error}"
        return None


def _exists(root: Path, test: str) -> bool:
    """Whether a pytest id names a file, and a function that is defined there."""
    file, _, function = test.partition("::")
    name = function.partition("[")[0].rpartition("::")[2]
    path = root / file
    return path.exists() and (not name or f"def {name}(" in path.read_text())


def read_mutants() -> list[Mutant]:
    """The entries of the list, in its order."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def copy_checkout(target: Path) -> None:
    """Copy what the tests need to `target`."""
    for part in COPIED:
        shutil.copytree(ROOT / part, target / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy2(file, target)


def _start_worker(folder: Path) -> None:
    """In a process of its own: make its copy of the checkout."""
    global _copy
    _copy = Path(tempfile.mkdtemp(dir=folder))
    copy_checkout(_copy)


def _pytest(root: Path, arguments: list[str], output: Path) -> None:
    """Body of the child process: pytest in the copy, its output in a file."""
    os.setsid()  # a test's own processes end with it
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(root)
    sys.path.insert(0, str(root))
    # other packages' plugins would have to be imported by pytest, to be rewritten
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    import pytest

    sys.exit(int(pytest.main(arguments)))


def run_tests(
    root: Path, tests: Sequence[str], *options: str, timeout_s: float = TIMEOUT_S
) -> tuple[int | None, list[str]]:
    """Pytest's exit code (None: it did not end in time) and the lines that it printed.

    The process is forked from this one, which has imported torch: that saves most of its start.
    """
    output = root / "pytest.log"
    arguments = ["-q", "-m", "", "-rfE", "--tb=no", "-p", "no:cacheprovider", *options, *tests]
    child = multiprocessing.get_context("fork").Process(
        target=_pytest, args=(root, arguments, output)
    )
    child.start()
    child.join(timeout_s)
    code = child.exitcode
    if code is None:
        os.killpg(child.pid or 0, signal.SIGKILL)
        child.join()
    return code, output.read_text(errors="replace").strip().splitlines() or ["no output"]


def failed_control(part: tuple[bool, list[str]]) -> set[str]:
    """The tests of a part of the control that fail on this process's unbroken copy."""
    slow, tests = part
    limit = TIMEOUT_S + CONTROL_S * len(tests)
    code, lines = run_tests(_copy, tests, *_marked(slow), timeout_s=limit)
    print(f"control   {lines[-1]}", flush=True)
    named = {line.split(" ")[1] for line in lines if line.startswith(("FAILED ", "ERROR "))}
    return named or (set() if code == 0 else set(tests))


def control_parts(mutants: list[Mutant], jobs: int) -> list[tuple[bool, list[str]]]:
    """Whether slow ones are among them, and the tests: whole files, for so many processes."""
    parts: dict[tuple[bool, int], list[str]] = {}
    for slow in (False, True):
        tests = sorted({test for m in mutants if m.slow is slow for test in m.tests})
        files = [*dict.fromkeys(test.partition("::")[0] for test in tests)]
        for test in tests:
            part = files.index(test.partition("::")[0]) % jobs
            parts.setdefault((slow, part), []).append(test)
    return [(slow, tests) for (slow, _), tests in parts.items()]


def _marked(slow: bool) -> list[str]:
    return ["-m", "slow or not slow"] if slow else []


def try_mutant(mutant: Mutant, failed: set[str]) -> tuple[str, str]:
    """Make the break in this process's copy, run its tests there, and undo it.

    Returns the verdict, and which test failed with the seconds that it took. `failed` are the tests
    that fail without it.
    """
    if useless := [test for test in failed if test.startswith(mutant.tests)]:
        return "CONTROL", useless[0]
    path, start = _copy / mutant.file, time.monotonic()
    original = path.read_text()
    try:
        path.write_text(original.replace(mutant.old, mutant.new))
        code, lines = run_tests(_copy, mutant.tests, "-x", *_marked(mutant.slow))
    finally:
        path.write_text(original)
    named = [line.split(" ")[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    # a break that keeps pytest from collecting (2 to 5) shows nothing about the test
    verdict = {0: "SURVIVED", 1: "caught", None: "caught"}.get(code, "BROKEN")
    what = named[0] if named else lines[-1]
    return verdict, f"{what}, {time.monotonic() - start:.0f} s"


def main() -> int:
    """Try the chosen breaks and print which survived."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("filter", nargs="?", default="", help="regular expression: names, files")
    parser.add_argument("--check", action="store_true", help="only compare the list with the code")
    parser.add_argument("--list", action="store_true", help="print the chosen breaks and stop")
    parser.add_argument("--no-control", action="store_true", help="trust the unbroken copy")
    parser.add_argument("-x", action="store_true", help="stop at the first that survives")
    parser.add_argument("--jobs", type=int, default=2, help="breaks at a time")
    args = parser.parse_args()

    chosen = [m for m in read_mutants() if re.search(args.filter, f"{m.name} {m.file}")]
    problems = [f"{m.name}: {problem}" for m in chosen if (problem := m.problem(ROOT))]
    print(*(f"stale     {problem}" for problem in problems), sep="\n", end="\n" if problems else "")
    if problems or not chosen:
        return 2
    if args.check or args.list:
        print(*(f"{m.file}: {m.name}" for m in chosen if args.list), f"{len(chosen)} fit", sep="\n")
        return 0
    for name in PRELOAD:
        __import__(name)
    missed, fork = 0, multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        ProcessPoolExecutor(args.jobs, fork, _start_worker, (Path(folder),)) as pool,
    ):
        parts = [] if args.no_control else control_parts(chosen, args.jobs)
        failed = set[str]().union(*pool.map(failed_control, parts))
        results = pool.map(try_mutant, chosen, repeat(failed))
        for mutant, (verdict, line) in zip(chosen, results, strict=True):
            missed += verdict != "caught"
            print(f"{verdict:<10}{mutant.name}  [{line}]", flush=True)
            if missed and args.x:
                pool.shutdown(cancel_futures=True)
                break
    print(f"{missed} of {len(chosen)} not caught" if missed else f"all {len(chosen)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
