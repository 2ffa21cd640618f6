"""The proofs of scripts/prove_*.py in their short form."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from runner.core import fork_server
from tests.faults import processes
from tests.faults.crash import Killer
from tests.runs import python

pytestmark = pytest.mark.skipif(not fork_server.available(), reason="forks on Linux alone")


@pytest.mark.parametrize(
    "name",
    ["corruption", *(pytest.param(name, marks=pytest.mark.slow) for name in ("crash", "sweep"))],
)
def test_the_short_form_of_a_proof_holds_and_notices_a_planted_defect(name: str) -> None:
    done = python(f"scripts/prove_{name}.py", "--smoke")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["a stream", "a stream, by 2 workers that skip"])
def test_a_killed_run_on_a_stream_comes_to_the_weights_of_a_whole_one(
    tmp_path: Path, mode: str
) -> None:
    processes.serve()
    tally = Killer(tmp_path, mode, random.Random(4)).run(4, most=2)
    assert tally.differ == [] and tally.equal == tally.kills >= 4


@pytest.mark.slow
def test_killed_runs_with_all_debug_tools_have_the_files_and_steps_of_a_whole_one(
    tmp_path: Path,
) -> None:
    processes.serve()
    tally = Killer(tmp_path, "all debug tools", random.Random(3)).run(8, most=4)
    assert tally.differ == [] and tally.equal == tally.kills >= 8
