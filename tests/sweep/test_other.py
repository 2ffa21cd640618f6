"""Other launchers and sweepers, and a sweep over ways to benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.cli.arguments import read_arguments
from runner.cli.preflight import check
from runner.errors import ConfigError
from runner.sweep.identity import sweep_hash

from .conftest import NET, only, sweep, told


def test_hydras_own_launcher_ends_in_the_same_table(folder: Path) -> None:
    done = sweep(folder, *NET, "+model.how=fine,fail", "hydra/launcher=basic")
    assert done.returncode == 7 and "1 of 2 jobs failed" in done.stderr
    rows = told(only(folder), "comparison.json")["rows"]
    assert [row["status"] for row in rows] == ["done", "failed"]
    assert "sweep cancer-Net" in done.stdout


@pytest.mark.slow
def test_a_sweeper_is_told_the_value_of_each_job_and_learns_from_failures(folder: Path) -> None:
    done = sweep(folder, *NET, "hydra/sweeper=two_rounds")
    value, failure = (only(folder) / "seen.txt").read_text().splitlines()
    assert float(value) == pytest.approx(told(only(folder) / "0", "summary.json")["best"])
    assert failure.startswith("learned: #1") and "model.how: there is no such key" in failure
    assert [job["number"] for job in told(only(folder))["jobs"]] == [0, 1]
    assert done.returncode == 7 and "1 of 2 jobs failed" in done.stderr


def test_a_sweep_of_benchmarks_is_refused_with_the_key_that_compares_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^job: .*leave -m out.*benchmark\.arms=\[none,basic\]"):
        check(read_arguments(["-m", "job=benchmark", "optimization=none,basic"]))


def test_the_same_command_is_the_same_whatever_the_order_and_the_launcher() -> None:
    one = sweep_hash(["seed=0,1", "data=cancer", "hydra.launcher.jobs=2"])
    assert one == sweep_hash(["data=cancer", "seed=2", "seed=0,1", "sweep.resume=auto"])
    assert one != sweep_hash(["data=cancer", "seed=0,2"])
    assert one != sweep_hash(["data=cancer", "seed=0,1"], ["--config-dir=mine"])
