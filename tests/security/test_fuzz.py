"""A short form of scripts/fuzz_security.py: mutants of files and configs break no invariant."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.security.files import judging
from tests.security.files.mutants import mutant, originals

ROOT = Path(__file__).resolve().parents[2]


def test_a_changed_file_is_refused_or_the_same_or_caught_by_its_digest(tmp_path: Path) -> None:
    outcomes = Counter(
        judging.judge_file(mutant(seed, number), tmp_path)
        for seed in (1, 2)
        for number in range(48)
    )
    assert outcomes[judging.REFUSED] > 40  # most are seen to be wrong
    assert outcomes[judging.CAUGHT] > 0  # and some only by their digest


def test_what_loads_and_has_the_promised_digest_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge is no rubber stamp: with a door that compares no digest it says so."""
    monkeypatch.setattr(judging, "open_file", lambda *args, **kwargs: None)
    with pytest.raises(judging.Violation, match="digest"):
        for number in range(400):
            judging.judge_file(mutant(1, number), tmp_path)


def test_each_original_loads(tmp_path: Path) -> None:
    for name, data in originals().values():
        found = judging._examine(data, tmp_path / name)
        assert not found.reasons and found.content is not None


def test_the_same_seed_gives_the_same_mutants() -> None:
    assert [mutant(3, n).data for n in range(40)] == [mutant(3, n).data for n in range(40)]
    assert mutant(3, 8).data != mutant(4, 8).data
    assert judging.mutated_case(3, 5) == judging.mutated_case(3, 5)


def test_a_changed_config_passes_or_is_answered_and_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(judging.set_traps(tmp_path))
    here = tmp_path / "here"
    outcomes: Counter[str] = Counter()
    for number in range(0, 6 * 23, 23):  # of all corners of both corpora
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir()
        monkeypatch.chdir(here)
        outcomes[judging.judge_config(judging.mutated_case(5, number), tmp_path)] += 1
    assert outcomes.total() == 6


@pytest.mark.slow
def test_the_script_says_that_every_invariant_holds() -> None:
    script = [sys.executable, str(ROOT / "scripts/fuzz_security.py")]
    done = subprocess.run(
        [*script, "--checkpoints", "2000", "--configs", "100", "--seed", "9"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every invariant holds" in done.stdout
