"""job=benchmark with real processes: rows, files, exit codes, and nothing left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from runner.core.errors import Regression
from runner.measure.benchmark import job
from runner.measure.benchmark.result import FILE, ArmResult, BenchmarkResult, Load, machine_facts
from tests import runs

TINY = [
    "job=benchmark", "name=tiny", "data=cancer", "model.width=8", "model.depth=1", "device=cpu",
    "device.threads=1", "training.batch_size=64", "training.steps=30", "benchmark.block_s=0.02",
    "benchmark.budget_s=2", "benchmark.warmup_steps=4", "benchmark.narrow=0.5",
]  # fmt: skip
BROKEN = "broken: optimization=basic device.affinity=[9999]"


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return runs.command(folder, *TINY, *overrides, COLUMNS="100")


def home(folder: Path) -> Path:
    (result,) = (folder / "outputs" / "benchmarks" / "tiny").iterdir()
    return result


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a benchmark of two arms, and one that cannot be built."""
    folder = tmp_path_factory.mktemp("benchmark")
    done = run(folder, f'benchmark.arms=[none,basic,"{BROKEN}"]')
    assert done.returncode == 7
    assert "error: 1 of 3 arms failed: broken (failed: " in done.stderr
    assert all(name in done.stdout for name in ("none", "basic", "broken"))
    return home(folder)


def test_two_arms_are_measured_on_real_steps_and_the_third_is_a_failure_with_its_reason(
    measured: Path,
) -> None:
    result = BenchmarkResult.read(measured)
    assert [arm.status for arm in result.arms] == ["done", "done", "failed"]
    assert "device.affinity" in result.arm("broken").reason
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
    assert (result.machine["device"], result.machine["threads"]) == ("cpu", 1)
    files = {path.name for path in measured.iterdir()}
    pages = {"comparison.json", "comparison.md", "comparison.html"}
    assert {FILE, *pages, "run.log", "none", "basic"} <= files
    assert "summary.json" not in files  # it is no run
    assert (measured / "basic" / "summary.json").is_file()
    rows = runs.read(measured, "comparison.json")["rows"]
    assert [row["status"] for row in rows] == ["done", "done", "failed"]


def planted(none_ms: float, basic_ms: float) -> BenchmarkResult:
    arms = [
        ArmResult(
            level, [f"optimization={level}"], "done",
            per_sample_ms=[ms * (1 + n / 1e4) for n in range(24)],
        )
        for level, ms in (("none", none_ms), ("basic", basic_ms))
    ]  # fmt: skip
    facts = {"noise_floor": 0.0, "processes": 5, "machine": machine_facts(), "load": Load(0.0)}
    return BenchmarkResult("tiny", "none", arms, **facts)  # type: ignore[arg-type]


def test_a_stored_result_that_was_faster_is_a_regression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted(1.0, 0.01).write(tmp_path / "stored")
    monkeypatch.setattr(job, "measure", lambda *arms, **how: planted(1.0, 1.0))
    arms = ["benchmark.arms=[none,basic]", f"benchmark.baseline={tmp_path / 'stored'}"]
    with pytest.raises(Regression, match="1 regression against .*basic takes") as caught:
        job.main(runs.config(*TINY, *arms), tmp_path)
    assert caught.value.exit_code == 6
    baseline = BenchmarkResult.read(tmp_path).baseline
    assert baseline is not None and baseline["regressed"]
    assert "next to none" in capsys.readouterr().out


@pytest.mark.slow
def test_ctrl_c_keeps_the_rows_and_leaves_no_process(tmp_path: Path) -> None:
    typed = [*TINY, "benchmark.arms=[none,basic]", "benchmark.narrow=0.00001",
             "benchmark.budget_s=300", "monitoring.line_every_s=0.01"]  # fmt: skip
    variables = {"PYTHONPATH": str(runs.TESTS.parent), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "runner", *typed], cwd=tmp_path, env=os.environ | variables,
        text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        assert any("block 8 " in line for line in process.stderr)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 3  # two arms and the control
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, err
    assert "interrupted by Ctrl-C after" in err and "interrupted" in out
    result = BenchmarkResult.read(home(tmp_path))
    assert result.stopped == "interrupted" and result.blocks >= 8
    assert [arm.status for arm in result.arms] == ["interrupted"] * 2
    assert all(arm.step_ms for arm in result.arms)
    assert (home(tmp_path) / "comparison.html").is_file()
    assert psutil.wait_procs(children, timeout=10)[1] == []


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("benchmark.arms=[none,ultr]", "did you mean ultra"),
        ("benchmark.baseline=damaged", "arms[0].per_sample_ms has a time ≤ 0"),
    ],
)
def test_a_mistake_is_answered_before_anything_is_started(
    tmp_path: Path, override: str, says: str
) -> None:
    arm = ArmResult("none", [], "done", per_sample_ms=[-1.0])
    BenchmarkResult("tiny", "none", [arm], machine=machine_facts()).write(tmp_path / "damaged")
    done = run(tmp_path, override)
    assert done.returncode == 2
    assert says in done.stderr and done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]
