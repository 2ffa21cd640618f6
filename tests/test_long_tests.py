"""The list of tests that scripts/nightly alone runs fits the tests, and is chosen by CPU time."""

import ast
import runpy
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
long_tests = runpy.run_path(str(ROOT / "scripts" / "long_tests.py"))


def test_every_long_test_exists() -> None:
    names = defaultdict(set)
    for line in long_tests["LIST"].read_text().splitlines():
        file, _, test = line.partition("::")
        names[file].add(test.partition("[")[0])
    assert len(names) > 50
    for file, long in names.items():
        defined = {n.name for n in ast.walk(ast.parse((ROOT / file).read_text()))
                   if isinstance(n, ast.FunctionDef)}  # fmt: skip
        assert long <= defined, f"{file}: {long - defined}"


def test_the_longest_tests_go_and_of_each_file_the_shortest_stays() -> None:
    choose = long_tests["choose"]
    seconds = {"a::x": 5.0, "a::y[1]": 3.0, "a::y[2]": 0.5, "b::z": 4.0, "c::w": 0.1}
    assert choose(seconds, 100.0) == []
    assert choose(seconds, 8.0) == ["a::x"]
    assert choose(seconds, 1.0) == ["a::x", "a::y[1]"]  # z is the only one of b
