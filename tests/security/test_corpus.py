"""Hostile files execute nothing, at no level; what is loaded is what was saved."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from runner.errors import CheckpointError, SecurityError
from runner.findings import Reason, Severity
from runner.security.config import SecurityLevel
from runner.security.files.file_bytes import FileBytes
from runner.security.files.loader import open_file
from runner.security.files.policy import FileLimits, FilePolicy
from runner.security.files.rules import ZIP_RULES, FileRule, Zip
from runner.security.files.sandbox import Sandbox
from tests.security.files import (
    benign,
    bombs,
    hostile_archives,
    hostile_calls,
    hostile_kinds,
    hostile_opcodes,
)
from tests.security.files.sample import Sample

FILES = Path(__file__).parent / "files"
PARTS = (hostile_calls, hostile_opcodes, hostile_archives, hostile_kinds)
HOSTILE = [sample for part in PARTS for sample in part.samples()]
# What is no file of bytes is refused where it is opened.
ODD = [sample for sample in HOSTILE if sample.family in ("special", "distributed")]
PLAIN = [sample for sample in HOSTILE if sample not in ODD]
LIVE = [sample for sample in HOSTILE if sample.live]
FAMILIES = sorted({sample.family for sample in PLAIN})
TIGHT = FileLimits(cpu_s=2, memory=1 << 30)
SLOW = ("hashed_tree", "hashed_tree_in_set", "legacy_lists", "tuples", "dicts")  # others are alike


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """One for all: it takes seconds to start."""
    with Sandbox() as opened:
        yield opened


def made(sample: Sample, folder: Path) -> tuple[Path, Path]:
    """The file, and the marker that nothing may make."""
    own = folder / str(sample)
    own.mkdir(parents=True)
    marker = own / "marker"
    return sample.make(own, marker), marker


def refusals(sandbox: Sandbox, path: Path, limits: FileLimits = TIGHT) -> list[Reason]:
    with FileBytes.watch(path) as data:
        _, reasons = sandbox.examine(data, path.name, limits)
    return [reason for reason in reasons if reason.severity is Severity.REFUSAL]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_file_of_the_family_is_refused_in_one_line_and_does_nothing(
    family: str, sandbox: Sandbox, tmp_path: Path
) -> None:
    passed, fired, silent = [], [], []
    for sample in [sample for sample in PLAIN if sample.family == family]:
        path, marker = made(sample, tmp_path)
        texts = [str(reason) for reason in refusals(sandbox, path)]
        if not texts and not sample.inert:
            passed.append(sample.name)
        if marker.exists():
            fired.append(sample.name)
        if texts and (sample.says not in texts[0] or "\n" in texts[0]):
            silent.append((sample.name, texts))
    assert (passed, fired, silent) == ([], [], [])


@pytest.mark.parametrize("level", SecurityLevel, ids=lambda level: level.name)
def test_nothing_live_is_opened_at_any_level(
    level: SecurityLevel, sandbox: Sandbox, tmp_path: Path
) -> None:
    opened, fired = [], []
    for sample in LIVE:
        path, marker = made(sample, tmp_path)
        try:
            open_file(path, FilePolicy(level, limits=TIGHT), sandbox=sandbox)
            opened.append(str(sample))
        except (SecurityError, CheckpointError) as error:
            assert str(path) in str(error) and "\n" not in str(error)
        if marker.exists():
            fired.append(str(sample))
    assert (opened, fired) == ([], [])


@pytest.mark.parametrize("sample", ODD, ids=str)
def test_what_is_no_plain_file_is_refused_where_it_is_opened(
    sample: Sample, sandbox: Sandbox, tmp_path: Path
) -> None:
    path, marker = made(sample, tmp_path)
    with pytest.raises((SecurityError, CheckpointError)):
        open_file(path, FilePolicy(), sandbox=sandbox)
    assert not marker.exists()


@pytest.mark.parametrize("sample", benign.samples(), ids=str)
def test_an_honest_file_loads_as_it_was_saved(
    sample: benign.Benign, sandbox: Sandbox, tmp_path: Path
) -> None:
    path, content = sample.make(tmp_path)
    found = open_file(path, FilePolicy(), sandbox=sandbox)
    assert benign.same(content, found.content), (content, found.content)
    assert [r.code for r in found.assessment.reasons if r.severity is not Severity.NOTE] == []


BOMBS = [
    pytest.param(one, id=str(one), marks=[pytest.mark.slow] if one.name in SLOW else [])
    for one in bombs.samples()
]


@pytest.mark.parametrize("sample", BOMBS)
def test_a_bomb_is_refused_within_the_limits_of_the_sandbox(
    sample: Sample, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sandbox, "deaths", 0)
    path, _ = made(sample, tmp_path)
    assert refusals(sandbox, path)
    if sandbox.process is not None:  # it was not ended by this file
        usage = psutil.Process(sandbox.process.pid).memory_info().rss
        assert usage < 1 << 30


@pytest.mark.parametrize("rule", ZIP_RULES, ids=lambda rule: rule.code)
def test_each_rule_keeps_its_good_sample_and_refuses_its_bad_one(rule: FileRule) -> None:
    assert rule.check(Zip(rule.good(), rule.limits)) == ""
    assert rule.check(Zip(rule.bad(), rule.limits))


def test_the_corpus_is_as_large_as_it_says() -> None:
    assert len(HOSTILE) >= 140 and len({str(sample) for sample in HOSTILE}) == len(HOSTILE)
    assert len(LIVE) >= 80


def fired(samples: list[Sample], folder: Path) -> list[str]:
    """The names of those that make their marker when somebody careless reads them."""
    plan = []
    for sample in samples:
        path, marker = made(sample, folder)
        plan.append({"path": str(path), "marker": str(marker), "reader": sample.fires})
    (folder / "plan.json").write_text(json.dumps(plan))
    command = [sys.executable, str(FILES / "careless.py"), str(folder / "plan.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [str(samples[place]) for place in json.loads(done.stdout)]


@pytest.mark.slow
def test_a_careless_reader_would_have_run_them(tmp_path: Path) -> None:
    assert fired(LIVE, tmp_path) == [str(sample) for sample in LIVE]
