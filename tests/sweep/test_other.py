"""Other launchers and sweepers, and a sweep over ways to benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.cli.arguments import read_arguments
from runner.cli.preflight import check
from runner.sweep.command import merge_benchmark
from runner.sweep.identity import sweep_hash

from .conftest import NET, only, sweep, told


def test_hydras_own_launcher_ends_in_the_same_table(folder: Path) -> None:
    done = sweep(folder, *NET, "+model.how=fine,fail", "hydra/launcher=basic")
    assert done.returncode == 7 and "1 of 2 jobs failed" in done.stderr
    rows = told(only(folder), "comparison.json")["rows"]
    assert [row["status"] for row in rows] == ["done", "failed"]
    assert "sweep cancer-Net" in done.stdout


def test_a_sweeper_is_told_the_value_of_each_job_and_learns_from_failures(folder: Path) -> None:
    done = sweep(folder, *NET, "hydra/sweeper=two_rounds")
    value, failure = (only(folder) / "seen.txt").read_text().splitlines()
    assert float(value) == pytest.approx(told(only(folder) / "0", "summary.json")["best"])
    assert failure.startswith("learned: #1") and "model.how: there is no such key" in failure
    assert [job["number"] for job in told(only(folder))["jobs"]] == [0, 1]
    assert done.returncode == 7 and "1 of 2 jobs failed" in done.stderr


@pytest.mark.parametrize(
    ("typed", "arms"),
    [
        (["optimization=none,basic"], "benchmark.arms=['none','basic']"),
        (
            ["optimizer=sgd,adamw", "seed=0,1"],
            "benchmark.arms=['optimizer=sgd seed=0','optimizer=sgd seed=1',"
            "'optimizer=adamw seed=0','optimizer=adamw seed=1']",
        ),
        (["+optimizer.options={a:1},{a:2}"], None),
        (["benchmark.arms=[none]", "seed=0,1"], None),
        (["benchmark.budget_s=1,2"], None),
        (["optimization=glob(*)"], None),
    ],
)
def test_what_is_swept_over_becomes_the_arms_of_one_benchmark(
    typed: list[str], arms: str | None
) -> None:
    found = merge_benchmark(["job=benchmark", "data=cancer", *typed, "hydra.launcher.jobs=2"])
    if arms is None:
        assert found is None or "+optimizer.options" in found[-1]
    else:
        assert found == ["job=benchmark", "data=cancer", arms]


def test_a_sweep_of_benchmarks_is_one_process_in_the_sweeps_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = check(read_arguments(["-m", "job=benchmark", "optimization=none,basic"]))
    assert not request.sweeps and request.session is None
    *_, arms, place = request.arguments
    assert arms == "benchmark.arms=['none','basic']"
    assert place.startswith("hydra.run.dir='outputs/sweeps/digits-mlp/")
    assert "--multirun" not in request.arguments
    kept = check(read_arguments(["-m", "job=benchmark,train", "seed=0,1"]))
    assert kept.sweeps and kept.session is not None


def test_the_same_command_is_the_same_whatever_the_order_and_the_launcher() -> None:
    one = sweep_hash(["seed=0,1", "data=cancer", "hydra.launcher.jobs=2"])
    assert one == sweep_hash(["data=cancer", "seed=2", "seed=0,1", "sweep.resume=auto"])
    assert one != sweep_hash(["data=cancer", "seed=0,2"])
    assert one != sweep_hash(["data=cancer", "seed=0,1"], ["--config-dir=mine"])
