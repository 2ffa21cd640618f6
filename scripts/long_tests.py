"""Choose the tests that only scripts/nightly runs, so that the check of each change is short.

    TEST_CPU_TIMES=times.txt .venv/bin/python -m pytest -q -n 2 --dist loadfile -m ""
    python scripts/long_tests.py times.txt [--seconds 400]

`tests/long_tests.txt` lists them; they count as marked `slow`. The longest of all go, by CPU time,
until the others take `--seconds` together; CPU time hardly depends on what else the machine does.
Of each file the shortest test stays, and all that hold the structure of the code.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path

STRUCTURE = re.compile("tests/test_(architecture|changelog|docs|imports|mutants|names)")
LIST = Path(__file__).parents[1] / "tests" / "long_tests.txt"


def choose(seconds: dict[str, float], total: float) -> list[str]:
    """Return the ids of the longest tests, without which the others take `total` seconds."""
    of_file = defaultdict(list)
    for test in sorted(seconds, key=seconds.__getitem__):
        of_file[test.partition("::")[0]].append(test)
    kept = {tests[0] for tests in of_file.values()}
    kept |= {test for test in seconds if STRUCTURE.match(test)}
    left, chosen = sum(seconds.values()), []
    for test in sorted(seconds, key=lambda test: -seconds[test]):
        if left <= total:
            break
        if test not in kept:
            chosen.append(test)
            left -= seconds[test]
    return sorted(chosen)


def main() -> None:
    """Write the list."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("times", type=Path, help="lines of CPU seconds and a test's id")
    parser.add_argument("--seconds", type=float, default=400.0, help="CPU time of those that stay")
    given = parser.parse_args()
    seconds: dict[str, float] = {}
    for line in given.times.read_text().splitlines():
        value, _, test = line.partition(" ")
        seconds[test] = float(value)
    chosen = choose(seconds, given.seconds)
    LIST.write_text("".join(f"{test}\n" for test in chosen))
    left = sum(seconds.values()) - sum(map(seconds.__getitem__, chosen))
    print(f"{len(chosen)} of {len(seconds)} tests are long; {left:.0f} s of CPU time stay")


if __name__ == "__main__":
    main()
