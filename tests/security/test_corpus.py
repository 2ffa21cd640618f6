"""Hostile, broken and heavy files are refused and do nothing; good ones load as they were saved."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from runner.errors import CheckpointError, SecurityError
from runner.security.gate.assessing import Assessor
from runner.security.gate.door import assess_file, open_file
from runner.security.gate.examine import examine
from runner.security.gate.folder import thing_of
from runner.security.gate.policy import Policy
from runner.security.trust import Trust
from tests.security.files import adaptive, benign, bombs
from tests.security.files.hostile import broken, hostile
from tests.security.files.sample import Sample

ROOT = Path(__file__).resolve().parents[2]
FILES = Path(__file__).parent / "files"
SECONDS, MEGABYTES = 10, 400  # that a heavy file may take at most
HOSTILE, BROKEN, BENIGN = hostile(), broken(), benign.samples()
# What is no file of bytes is for the door, which opens it; the rest is judged by its bytes.
ODD = [sample for sample in HOSTILE if sample.family in ("special", "distributed")]
PLAIN = [sample for sample in HOSTILE if sample not in ODD]


def families(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.family, []).append(sample)
    return found


REFUSED = families(PLAIN + BROKEN)
each_family = pytest.mark.parametrize("samples", REFUSED.values(), ids=list(REFUSED))


def made(sample: Sample, folder: Path) -> tuple[Path, Path]:
    """The file, and the marker that nothing may make."""
    own = folder / str(sample)
    own.mkdir()
    marker = own / "marker"
    return sample.make(own, marker), marker


@each_family
def test_every_file_of_the_family_is_refused_and_does_nothing(
    samples: list[Sample], tmp_path: Path
) -> None:
    passed, fired, silent = [], [], []
    for sample in samples:
        path, marker = made(sample, tmp_path)
        found = examine(path.read_bytes(), path.name, Policy())
        reasons = [str(reason) for reason in found.reasons]
        if not found.refused or found.content is not None:
            passed.append(sample.name)
        if marker.exists():
            fired.append(sample.name)
        if sample.says not in "".join(reasons) or any("\n" in text for text in reasons):
            silent.append((sample.name, reasons))
    assert (passed, fired, silent) == ([], [], [])


@pytest.mark.parametrize("sample", ODD, ids=str)
def test_what_is_no_plain_file_is_refused_at_the_door(sample: Sample, tmp_path: Path) -> None:
    path, marker = made(sample, tmp_path)
    with pytest.raises((SecurityError, CheckpointError)):
        open_file(path, Policy())
    if sample.name != "folder":  # there is nothing in it
        assert assess_file(path, Policy()).trust is Trust.REFUSED
    assert not marker.exists()


FEW = ("os", "legacy_first", "ordered_items")


@pytest.mark.parametrize("sample", [s for s in PLAIN if s.name in FEW], ids=str)
def test_the_door_refuses_it_in_one_line_that_names_the_file(
    sample: Sample, tmp_path: Path
) -> None:
    path, marker = made(sample, tmp_path)
    with pytest.raises((SecurityError, CheckpointError), match=str(path)) as refused:
        open_file(path, Policy())
    assert "\n" not in str(refused.value)
    assert not marker.exists()


def test_the_verdict_on_each_of_them_is_refused_with_reasons(tmp_path: Path) -> None:
    passed = []
    with Assessor(Policy()) as assessor:  # one limited process for all
        for sample in PLAIN + BROKEN:
            path, marker = made(sample, tmp_path)
            verdict = assessor.assess(thing_of(path))
            reasons = [bool(reason.code and reason.evidence) for reason in verdict.refusals]
            if verdict.trust is not Trust.REFUSED or not all(reasons):
                passed.append(str(sample))
            if marker.exists():
                passed.append(f"{sample} ran")
    assert passed == []


@pytest.mark.slow  # each opening starts a limited process
@pytest.mark.parametrize("family", REFUSED)
def test_the_door_refuses_the_first_of_each_family(family: str, tmp_path: Path) -> None:
    path, marker = made(REFUSED[family][0], tmp_path)
    with pytest.raises((SecurityError, CheckpointError)):
        open_file(path, Policy())
    assert not marker.exists()


@pytest.mark.parametrize("sample", BENIGN, ids=str)
def test_a_good_file_loads_as_it_was_saved(sample: benign.Benign, tmp_path: Path) -> None:
    path, content = sample.make(tmp_path)
    found = examine(path.read_bytes(), path.name, Policy())
    assert [str(reason) for reason in found.reasons] == []
    assert benign.same(content, found.content), (content, found.content)


@pytest.mark.slow
@pytest.mark.parametrize("sample", BENIGN, ids=str)
def test_a_good_file_comes_through_the_door(sample: benign.Benign, tmp_path: Path) -> None:
    path, content = sample.make(tmp_path)
    found = open_file(path, Policy())
    assert benign.same(content, found.content)
    assert not found.assessment.refused


def test_the_corpus_is_as_large_as_it_says() -> None:
    assert len(HOSTILE) >= 250
    assert len({str(sample) for sample in HOSTILE}) == len(HOSTILE)
    assert len(BROKEN) >= 140
    assert len(BENIGN) >= 40
    assert sum(sample.live for sample in HOSTILE) >= 120


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


def one_of_each(samples: list[Sample]) -> list[Sample]:
    return list({(sample.family, sample.fires): sample for sample in samples}.values())


@pytest.mark.parametrize(
    "few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_a_careless_reader_would_have_run_them(few: bool, tmp_path: Path) -> None:
    live = [sample for sample in HOSTILE if sample.live]
    samples = one_of_each(live) if few else live
    assert fired(samples, tmp_path) == [str(sample) for sample in samples]


@pytest.mark.parametrize("part", [bombs, adaptive], ids=["bombs", "adaptive"])
def test_a_heavy_file_is_refused_in_bounded_time_and_memory(part: Any, tmp_path: Path) -> None:
    samples = part.samples()
    paths = [made(sample, tmp_path)[0] for sample in samples]
    child = [sys.executable, str(FILES / "measure.py"), *map(str, paths)]
    done = subprocess.run(child, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["name"] for row in rows] == [path.parent.name for path in paths]
    loaded = {row["name"] for row in rows if not row["refused"]}
    assert loaded <= {str(sample) for sample in samples if sample.loads}
    assert [row for row in rows if row["seconds"] > SECONDS or row["megabytes"] > MEGABYTES] == []
