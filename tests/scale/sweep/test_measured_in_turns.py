"""A sweep over modes ends with its configurations measured in turns, by the benchmark's parts."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from runner.core.record.hydra_files import overrides_by_key
from runner.measure.benchmark.result import BenchmarkResult
from runner.measure.comparison_row import ComparisonRow
from runner.measure.speed import FOLDER
from runner.measure.sweep_speed import select_rows
from tests.runs import command, wait_until
from tests.scale.sweep.conftest import only, read, start_sweep

DIGITS = ("data=digits", "device=cpu", "device.threads=1", "training.steps=40")


def rows(*jobs: str, failed: tuple[int, ...] = ()) -> list[ComparisonRow]:
    return [
        ComparisonRow(job.split(), "failed" if number in failed else "done")
        for number, job in enumerate(jobs)
    ]


def names(found: list[ComparisonRow]) -> list[str]:
    return [" ".join(row.overrides) for row in found]


def test_other_swept_keys_are_those_of_the_first_job() -> None:
    jobs = [f"optimization={x} seed={n} optimizer.lr={r}"
            for r in (1, 2) for n in (4, 5) for x in ("none", "ultra")]  # fmt: skip
    assert names(select_rows(rows(*jobs))) == jobs[:2]
    assert names(select_rows(rows(*jobs, failed=(1,)))) == jobs[:1]


@pytest.mark.parametrize(
    "jobs",
    [
        ["optimizer.lr=1", "optimizer.lr=2"],
        ["seed=1", "seed=2"],
        ["optimization=none seed=1", "optimization=none seed=2"],
        [f"optimization.amp.min_mflop={n}" for n in range(7)],
    ],
)
def test_only_two_to_six_modes_are_measured(jobs: list[str]) -> None:
    assert select_rows(rows(*jobs)) == []


@pytest.mark.parametrize("key", ["optimization.fused_optimizer.enabled", "debug", "debug.every"])
def test_techniques_and_debug_are_modes(key: str) -> None:
    jobs = [f"{key}={value}" for value in range(6)]
    assert names(select_rows(rows(*jobs))) == jobs


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("measured")
    typed = (*DIGITS, "optimization=none,basic,advanced", "seed=0,1", "sweep.benchmark_s=3")
    return folder, command(folder, "-m", *typed)


@pytest.mark.slow
def test_speed_ups_of_a_sweep_over_modes_are_those_measured_in_turns(
    measured: tuple[Path, Any],
) -> None:
    folder, done = measured
    place = only(folder)
    assert done.returncode == 0, done.stderr
    result = BenchmarkResult.read(place / FOLDER)
    assert result.reference == "none" and 0 < result.seconds < 5
    arms = {arm.name: arm for arm in result.arms}
    assert [*arms] == ["none", "basic", "advanced"]
    # on a CPU without fast 16-bit products the last two engage the same, which is measured once
    for row in read(place, "comparison.json")["rows"]:
        assert row["speedup"] == arms[overrides_by_key(row["overrides"])["optimization"]].speedup
        assert 0 <= row["summary"]["throughput"]["other_cpu_share"] <= 1
    assert "of the CPUs" in done.stdout or arms["basic"].speedup_interval is None
    assert not [path for path in place.iterdir() if path.name.startswith(".runs")]


@pytest.mark.slow
def test_a_repeated_sweep_with_nothing_to_run_shows_the_stored_figures(
    measured: tuple[Path, Any],
) -> None:
    folder, _ = measured
    before = read(only(folder), "comparison.json")["rows"]
    stored = (only(folder) / FOLDER / "benchmark.json").stat()
    typed = (*DIGITS, "optimization=none,basic,advanced", "seed=0,1", "sweep.benchmark_s=3")
    again = command(folder, "-m", *typed)
    assert again.returncode == 0 and "6 of 6 done before" in again.stderr
    assert "measured in turns" not in again.stderr
    assert (only(folder) / FOLDER / "benchmark.json").stat().st_mtime_ns == stored.st_mtime_ns
    assert read(only(folder), "comparison.json")["rows"] == before


@pytest.mark.slow
def test_ctrl_c_while_measuring_leaves_the_first_comparison_and_exits_130(tmp_path: Path) -> None:
    typed = [*DIGITS, "optimization=none,basic", "sweep.benchmark_s=500"]
    process, console = start_sweep(tmp_path, *typed), tmp_path / "console"
    wait_until(lambda: "starting basic" in console.read_text(), process)
    first = (only(tmp_path) / "comparison.json").read_text()
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert (only(tmp_path) / "comparison.json").read_text() == first
    assert not (only(tmp_path) / FOLDER).exists() and "sweep digits-mlp" in console.read_text()
