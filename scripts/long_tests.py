"""Choose the tests that only scripts/nightly runs, so that the check of each change is short.

    TEST_CPU_TIMES=times.txt .venv/bin/python -m pytest -q -n 2 --dist loadfile -m ""
    python scripts/long_tests.py times.txt [--seconds 850]

`tests/long_tests.txt` lists them; they count as marked `slow`. The longest of all go, by CPU time,
until the others take `--seconds` together; CPU time hardly depends on what else the machine does.
Of each test function with several cases the shortest one stays, and of each file the shortest test.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).parents[1] / "tests" / "long_tests.txt"
SHORT_S = 0.15  # a test of less is never in the list


def choose(seconds: dict[str, float], total: float) -> list[str]:
    """Return the ids of the longest tests, without which the others take `total` seconds."""
    of_function, of_file = defaultdict(list), defaultdict(list)
    for test in sorted(seconds, key=seconds.__getitem__):
        of_function[test.partition("[")[0]].append(test)
        of_file[test.partition("::")[0]].append(test)
    cases = {tests[0] for tests in of_function.values() if len(tests) > 1}
    kept = {tests[0] for tests in of_file.values()}
    left, chosen = sum(seconds.values()), []
    # cases first: their function is still tested
    for keep in (kept | cases, kept):
        for test in sorted(seconds, key=lambda test: -seconds[test]):
            is_first_pass = keep is not kept
            has_sibling = len(of_function[test.partition("[")[0]]) > 1
            if left <= total or seconds[test] < SHORT_S:
                break
            if test not in keep and test not in chosen and (has_sibling or not is_first_pass):
                chosen.append(test)
                left -= seconds[test]
    return sorted(chosen)


def main() -> None:
    """Write the list."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("times", type=Path, help="lines of CPU seconds and a test's id")
    parser.add_argument("--seconds", type=float, default=850.0, help="CPU time of those that stay")
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
