"""job=benchmark with real processes: rows, files, exit codes, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from runner.benchmark.machine import machine
from runner.benchmark.result import FILE, ArmResult, BenchmarkResult
from tests import runs

ROOT = Path(__file__).parents[2]
TINY = [
    "job=benchmark", "name=tiny", "data=cancer", "model.width=8", "model.depth=1", "device=cpu",
    "device.threads=1", "training.batch_size=64", "training.steps=30", "benchmark.block_s=0.02",
    "benchmark.budget_s=2", "benchmark.warmup_steps=4", "benchmark.narrow=0.5",
]  # fmt: skip
BROKEN = "broken: optimization=basic device.affinity=[9999]"


def command(*overrides: str) -> list[str]:
    return [sys.executable, "-m", "runner", *TINY, *overrides]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return runs.command(folder, *TINY, *overrides, COLUMNS="100")


def home(folder: Path) -> Path:
    (result,) = (folder / "outputs" / "benchmarks" / "tiny").iterdir()
    return result


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, str, int]]:
    """A benchmark of two arms, and one that cannot be built."""
    folder = tmp_path_factory.mktemp("benchmark")
    ended = run(folder, f'benchmark.arms=[none,basic,"{BROKEN}"]')
    yield home(folder), ended.stdout, ended.stderr, ended.returncode


def test_two_arms_are_measured_and_the_third_is_a_failure_with_its_reason(
    done: tuple[Path, str, str, int],
) -> None:
    folder, out, err, code = done
    result = BenchmarkResult.read(folder)
    assert [arm.status for arm in result.arms] == ["done", "done", "failed"]
    assert "device.affinity" in result.arm("broken").reason
    assert code == 7
    assert "error: 1 of 3 arms failed: broken (failed: " in err
    for name in ("none", "basic", "broken"):
        assert name in out


def test_what_was_measured_is_of_real_steps(done: tuple[Path, str, str, int]) -> None:
    result = BenchmarkResult.read(done[0])
    none, basic = result.arm("none"), result.arm("basic")
    for arm in (none, basic):
        assert arm.blocks == result.blocks >= 6
        assert arm.step_ms is not None and arm.step_ms > 0
        assert arm.samples_per_step == 64
        assert arm.peak_process_bytes is not None and arm.peak_process_bytes > 50 << 20
        assert len(arm.losses) >= 4 and arm.problems == []
        assert arm.summary["device"]["kind"] == "cpu"
    assert basic.speedup_interval is not None
    assert basic.speedup_interval[0] <= (basic.speedup or 0) <= basic.speedup_interval[1]
    assert (none.parity, basic.parity) == ("exact", "explained by precision")
    assert result.control is not None
    assert result.machine["device"] == "cpu"
    assert result.machine["threads"] == 1


def test_the_folder_holds_every_file_and_every_arms_run(done: tuple[Path, str, str, int]) -> None:
    folder = done[0]
    files = {path.name for path in folder.iterdir()}
    assert {
        FILE, "comparison.json", "comparison.md", "comparison.html", "run.log",
        "none", "basic",
    } <= files  # fmt: skip
    assert "summary.json" not in files  # it is no run
    assert (folder / "basic" / "summary.json").is_file()
    rows = json.loads((folder / "comparison.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["done", "done", "failed"]


def test_a_stored_result_that_was_faster_is_a_regression(
    done: tuple[Path, str, str, int], tmp_path: Path
) -> None:
    stored = BenchmarkResult.read(done[0])
    basic = stored.arm("basic")  # as if it had taken a hundredth of the time
    basic.per_sample_ms = [ms / 100 for ms in basic.per_sample_ms]
    stored.noise_floor = 0.0
    stored.write(tmp_path)
    ended = run(
        tmp_path,
        *("benchmark.arms=[none,basic]", "benchmark.parity=false", "benchmark.control=false"),
        f"benchmark.baseline='{tmp_path}'",
    )
    result = BenchmarkResult.read(home(tmp_path))
    assert ended.returncode == 6, ended.stderr
    assert "1 regression against" in ended.stderr
    assert "basic takes" in ended.stderr and "next to none" in ended.stderr
    assert result.baseline is not None and result.baseline["regressed"]


@pytest.mark.slow
def test_ctrl_c_keeps_the_rows_and_leaves_no_process(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(
            "benchmark.arms=[none,basic]", "benchmark.narrow=0.00001", "benchmark.budget_s=300",
            "monitoring.line_every_s=0.01",
        ),
        cwd=tmp_path, env=environment(), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "block 8 " in line:
                break
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 3  # two arms and the control
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert "interrupted by Ctrl-C after" in err
    assert "interrupted" in out
    result = BenchmarkResult.read(home(tmp_path))
    assert result.stopped == "interrupted" and result.blocks >= 8
    assert [arm.status for arm in result.arms] == ["interrupted"] * 2
    assert all(arm.step_ms for arm in result.arms)
    assert (home(tmp_path) / "comparison.html").is_file()
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("benchmark.arms=[none,ultr]", "did you mean ultra"),
        ("benchmark.baseline=nowhere", "No such file"),
        ("benchmark.baseline={damaged}", "arms[0].per_sample_ms has a time that is not above 0"),
    ],
)
def test_a_mistake_is_answered_before_anything_is_started(
    tmp_path: Path, override: str, says: str
) -> None:
    result = BenchmarkResult(
        "tiny", "none", [ArmResult("none", [], "done", per_sample_ms=[-1.0])], machine=machine()
    )
    result.write(tmp_path / "damaged")
    ended = run(tmp_path, override.format(damaged=tmp_path / "damaged"))
    assert ended.returncode == 2
    assert says in ended.stderr and ended.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]
