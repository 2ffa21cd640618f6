"""A folder that somebody handed over is reported on, and nothing is changed outside of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.report.__main__ import main
from tests.report.planted_runs import job, run, sweep


@pytest.fixture
def handed(tmp_path: Path) -> Path:
    folder = sweep(tmp_path / "handed", [job(0, "basic"), job(1, "none")])
    for number, level in enumerate(("basic", "none")):
        run(folder / str(number), [f"optimization={level}"])
    return folder


@pytest.mark.parametrize("link", ["comparison", "comparison/events.out.tfevents.1.added"])
def test_a_link_that_leads_out_is_refused_and_nothing_is_written(
    handed: Path, link: str, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = handed.parent / "victim"
    victim.mkdir()
    (victim / "events.out.tfevents.0000000007.added").write_text("precious")
    (handed / link).parent.mkdir(exist_ok=True)
    target = victim if link == "comparison" else next(victim.iterdir())
    (handed / link).symlink_to(target)
    before = sorted(handed.rglob("*"))
    assert main([str(handed)]) == 3
    (said,) = capsys.readouterr().err.splitlines()
    assert f"{link}: refused: it is a link that leads out of" in said
    assert sorted(handed.rglob("*")) == before
    assert [path.read_text() for path in victim.iterdir()] == ["precious"]


def test_what_lies_under_the_name_of_a_temporary_file_is_not_written_to(handed: Path) -> None:
    assert main([str(handed)]) == 0
    victim = handed.parent / "victim"
    victim.write_text("precious")
    out = handed.parent / "out"
    (out / "comparison").mkdir(parents=True)
    for name in ("comparison.json", "comparison.html"):
        (out / f".{name}.tmp").hardlink_to(victim)
    assert main([str(handed), "--out", str(out)]) == 0
    assert victim.read_text() == "precious" and (out / "comparison.html").stat().st_nlink == 1


PIPES = ["sweep.json", "0/summary.json", "0/metrics.jsonl", "0/.lock", "0/.hydra/overrides.yaml",
         "0/.hydra/config.yaml", "0/events.out.tfevents.1", "comparison.json"]  # fmt: skip


def test_a_pipe_is_not_waited_for(handed: Path) -> None:
    for name in PIPES:
        (handed / name).unlink(missing_ok=True)
        os.mkfifo(handed / name)
    assert main([str(handed)]) == 0
