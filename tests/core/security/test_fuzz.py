"""A short form of scripts/fuzz_security.py: mutants of files and configs break no invariant."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.core.security.files import judging
from tests.core.security.files.mutants import mutant, originals
from tests.runs import python


def test_a_changed_file_is_refused_or_the_same_or_caught_by_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, data in originals().values():
        verdict = judging.examined(data, tmp_path / name)
        assert not verdict.reasons and verdict.content is not None
    mutants = [mutant(seed, number) for seed in (1, 2) for number in range(48)]
    assert [one.data for one in mutants[:8]] == [mutant(1, number).data for number in range(8)]
    outcomes = Counter(judging.judge_file(one, tmp_path) for one in mutants)
    assert outcomes[judging.REFUSED] > 40  # most are seen to be wrong
    assert outcomes[judging.CAUGHT] > 0  # and some only by their digest
    # the judge itself is checked: with a loader that compares no digest it says so
    monkeypatch.setattr(judging, "open_file", lambda *args, **kwargs: None)
    with pytest.raises(judging.Violation, match="digest"):
        for one in mutants:
            judging.judge_file(one, tmp_path)


def test_a_changed_config_passes_or_is_answered_and_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(judging.set_traps(tmp_path))
    here = tmp_path / "here"
    for number in range(0, 6 * 23, 23):  # of all corners of both corpora
        shutil.rmtree(here, ignore_errors=True)
        here.mkdir()
        monkeypatch.chdir(here)
        judging.judge_config(judging.mutated_case(5, number), tmp_path)


@pytest.mark.slow
def test_the_script_says_that_every_invariant_holds() -> None:
    options = ("--checkpoints=2000", "--configs=100", "--seed=9")
    done = python("scripts/fuzz_security.py", *options, OMP_WAIT_POLICY="passive")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every invariant holds" in done.stdout
