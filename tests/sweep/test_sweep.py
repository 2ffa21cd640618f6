"""A sweep whose jobs end in every way, and then the same command again."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import NET, only, own_folder, statuses, sweep, told

TYPED = [*NET, "+model.how=big,fine,fail,die", "hydra.launcher.jobs=2"]


@dataclass
class Mixed:
    folder: Path
    done: subprocess.CompletedProcess[str]

    @property
    def sweep(self) -> Path:
        return only(self.folder)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    folder = own_folder(tmp_path_factory.mktemp("mixed"))
    return Mixed(folder, sweep(folder, *TYPED))


def test_a_job_that_fails_or_is_killed_is_a_row_and_the_others_finish(mixed: Mixed) -> None:
    assert statuses(mixed.sweep) == ["done", "done", "failed", "killed"], mixed.done.stderr
    assert mixed.done.returncode == 7
    assert "2 of 4 jobs failed:" in mixed.done.stderr
    assert len(re.findall(r" #\d .*: started\n", mixed.done.stderr)) == 4
    assert re.search(r"\n  #2 .*\+model.how=fail.*: told to fail", mixed.done.stderr)
    assert re.search(r"\n  #3 .*\+model.how=die.*signal 9", mixed.done.stderr)
    for word in ("Traceback", "Error executing job", "HYDRA_FULL_ERROR"):
        assert word not in mixed.done.stderr + mixed.done.stdout


def test_every_job_has_a_process_of_its_own_and_none_shares_its_memory(mixed: Mixed) -> None:
    said = [(mixed.sweep / str(n) / "console.log").read_text() for n in range(4)]
    pids = [re.search(r"pid (\d+) of (\d+)", text) for text in said]
    assert len({found[1] for found in pids if found}) == 4
    assert len({found[2] for found in pids if found}) == 1
    big, fine = (
        told(mixed.sweep / str(n), "summary.json")["memory"]["peak_process_bytes"] for n in (0, 1)
    )
    assert big - fine > 2**28


def test_every_job_leaves_a_record_that_says_how_it_ended(mixed: Mixed) -> None:
    records = [told(mixed.sweep / str(n), "summary.json") for n in range(4)]
    assert [record["status"] for record in records] == ["done", "done", "failed", "killed"]
    assert "told to fail" in records[2]["reason"] and "signal 9" in records[3]["reason"]
    assert "Traceback" in (mixed.sweep / "2" / "run.log").read_text()
    for number, how in enumerate(["big", "fine", "fail", "die"]):
        place = mixed.sweep / str(number)
        assert f"how={how}" in (place / ".hydra" / "overrides.yaml").read_text()
        typed = records[number]["command"]
        assert typed.startswith("python -m runner ") and f"+model.how={how}" in typed
        assert "hydra." not in typed and "monitoring" not in typed  # it can be typed as it is


def test_the_comparison_is_there_although_jobs_failed(mixed: Mixed) -> None:
    rows = told(mixed.sweep, "comparison.json")["rows"]
    assert [row["status"] for row in rows] == ["done", "done", "failed", "killed"]
    assert all(row["speedup_interval"] is None and row["parity"] is None for row in rows)
    for name in ("comparison.md", "comparison.html"):
        assert (mixed.sweep / name).stat().st_size > 0
    assert "sweep cancer-Net" in mixed.done.stdout and "killed" in mixed.done.stdout


def test_nothing_that_lies_in_the_current_folder_is_run_as_a_plugin(mixed: Mixed) -> None:
    assert (mixed.folder / "hydra_plugins" / "trap.py").exists()
    assert not (mixed.folder / "trapped").exists()


def test_the_same_command_again_runs_what_failed_and_nothing_else(mixed: Mixed) -> None:
    damaged = Path("checkpoints") / "step_00000003" / "manifest.json"  # of the one that was killed
    (mixed.sweep / "3" / damaged).parent.mkdir(parents=True)
    (mixed.sweep / "3" / damaged).write_text("{}")
    before = {n: (mixed.sweep / n / "summary.json").stat().st_mtime_ns for n in "0123"}
    (mixed.folder / "spared").touch()
    again = sweep(mixed.folder, *TYPED)
    assert "2 of 4 done before; 2 to run, 1 of them from a checkpoint" in again.stderr
    assert "no usable checkpoint" in again.stderr  # so it begins afresh, and they are kept
    assert (mixed.sweep / ".earlier" / "3-1" / damaged).exists()
    assert statuses(mixed.sweep) == ["done", "done", "failed", "done"]
    assert again.returncode == 7 and "1 of 4 jobs failed:" in again.stderr
    after = {n: (mixed.sweep / n / "summary.json").stat().st_mtime_ns for n in "0123"}
    assert [n for n in "0123" if after[n] != before[n]] == ["2", "3"]
    rows = told(mixed.sweep, "comparison.json")["rows"]
    assert [row["status"] for row in rows] == ["done", "done", "failed", "done"]
