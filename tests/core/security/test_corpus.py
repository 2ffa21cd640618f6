"""Hostile files execute nothing, at no level; an honest file is loaded as it was saved."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import psutil
import pytest

from runner.core.errors import CheckpointError, SecurityError
from runner.core.findings import Reason, Severity
from runner.core.schemas.security import SecurityLevel
from runner.core.security.files.file_bytes import FileBytes
from runner.core.security.files.file_rules import check_zip
from runner.core.security.files.formats import FileRefusal
from runner.core.security.files.loader import open_file
from runner.core.security.files.policy import FileLimits, FilePolicy
from runner.scan.sandbox import Sandbox
from tests.core.security.files import benign, hostile
from tests.core.security.files.archives import Member, archive, array
from tests.core.security.files.hostile import Sample

HOSTILE = hostile.samples()
FAMILIES = sorted({sample.family for sample in HOSTILE})
TIGHT = FileLimits(cpu_s=2, memory=1 << 30)


def written(sample: Sample, folder: Path) -> tuple[Path, Path]:
    """The file, and the marker that nothing may make."""
    own = folder / str(sample).replace("/", "")
    own.mkdir()
    (own / sample.file).write_bytes(sample.make(str(own / "marker")))
    return own / sample.file, own / "marker"


def refusals(sandbox: Sandbox, path: Path, limits: FileLimits = TIGHT) -> list[Reason]:
    with FileBytes.open_in_place(path) as data:
        _, reasons = sandbox.examine(data, path.name, limits)
    return [reason for reason in reasons if reason.severity is Severity.REFUSAL]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_file_of_the_family_is_refused_in_one_line_and_does_nothing(
    family: str, sandbox: Sandbox, tmp_path: Path
) -> None:
    passed, fired, unclear = [], [], []
    for sample in [sample for sample in HOSTILE if sample.family == family]:
        path, marker = written(sample, tmp_path)
        texts = [str(reason) for reason in refusals(sandbox, path)]
        if not texts and not sample.inert:
            passed.append(sample.name)
        if marker.exists():
            fired.append(sample.name)
        if texts and (sample.says not in texts[0] or "\n" in texts[0]):
            unclear.append((sample.name, texts))
    assert (passed, fired, unclear) == ([], [], [])


@pytest.mark.parametrize("level", SecurityLevel, ids=lambda level: level.name)
def test_nothing_live_is_ever_opened(
    level: SecurityLevel, sandbox: Sandbox, tmp_path: Path
) -> None:
    opened, fired = [], []
    for sample in [sample for sample in HOSTILE if sample.live]:
        path, marker = written(sample, tmp_path)
        try:
            open_file(path, FilePolicy(level, limits=TIGHT), sandbox=sandbox)
            opened.append(str(sample))
        except (SecurityError, CheckpointError) as error:
            assert str(path) in str(error) and "\n" not in str(error)
        if marker.exists():
            fired.append(str(sample))
    assert (opened, fired) == ([], [])


def test_a_path_to_no_plain_file_is_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for number, target in enumerate(("fifo", "/", "/dev/zero", "/proc/self/mem", "absent")):
        path = tmp_path / f"model{number}.pt"
        path.symlink_to(target)
        for named in (path, tmp_path / target):
            with pytest.raises((SecurityError, CheckpointError)):
                open_file(named, FilePolicy(), sandbox=sandbox)


@pytest.mark.parametrize("name", benign.NAMES)
def test_an_honest_file_loads_as_it_was_saved(name: str, sandbox: Sandbox, tmp_path: Path) -> None:
    path, content = benign.write(name, tmp_path)
    opened = open_file(path, FilePolicy(), sandbox=sandbox)
    assert benign.same(content, opened.content), (content, opened.content)
    assert not [r.code for r in opened.assessment.reasons if r.severity is not Severity.NOTE]


@pytest.mark.parametrize("sample", hostile.bombs(), ids=lambda sample: sample.name)
def test_a_bomb_is_refused_within_the_limits_of_the_sandbox(
    sample: Sample, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sandbox, "crashes", 0)
    assert refusals(sandbox, written(sample, tmp_path)[0])
    if sandbox.process is not None:  # it was not ended by this file
        assert psutil.Process(sandbox.process.pid).memory_info().rss < 1 << 30


GOOD = tuple(Member(f"{name}.npy", array(np.arange(9))) for name in "ab")
LINK = {"external": 0o120777 << 16}


@pytest.mark.parametrize(
    ("code", "bad"),
    [
        ("zip.unique", [*GOOD, Member("A.npy", b"2")]),
        ("zip.paths", [*GOOD, Member("../a", b"")]),
        ("zip.ratio", [*GOOD, Member("c", bytes(1 << 16), zipfile.ZIP_DEFLATED)]),
        ("zip.crc", [*GOOD, Member("c", b"x", central={"crc": 1})]),
        ("zip.gaps", [Member("c", bytes(99), hidden=True), *GOOD]),
        ("zip.links", [*GOOD, Member("c.npy", b"/etc/passwd", central=LINK)]),
        ("zip.members", [*GOOD, Member("c.zip", archive(GOOD))]),
    ],
)
def test_each_rule_keeps_a_good_archive_and_refuses_a_bad_one(code: str, bad: list[Member]) -> None:
    limits = FileLimits(expanded=10_000, ratio=2)
    check_zip(archive(GOOD), limits)
    with pytest.raises(FileRefusal) as refused:
        check_zip(archive(bad), limits)
    assert refused.value.reason.code == code
