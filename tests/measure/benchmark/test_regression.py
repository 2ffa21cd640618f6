"""Compared with a stored result: what is worse is a regression, and noise is not."""

import random
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from runner.core.errors import ConfigError
from runner.core.schemas.jobs import BenchmarkConfig
from runner.measure.benchmark.regression import (
    BaselineComparison,
    compare_with_baseline,
    load_baseline,
)
from runner.measure.benchmark.result import ArmResult, BenchmarkResult, Load, machine_facts

MIB = 1 << 20
BUSY = Load(others=0.6)


def times(middle: float, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [middle * draw.lognormvariate(0, 0.02) for _ in range(24)]


def result(seed: int, none: float = 1.0, ultra: float = 0.5) -> BenchmarkResult:
    rows = [
        ArmResult(
            name, [f"optimization={name}"], "done", per_sample_ms=times(middle, seed + n),
            config={"training.batch_size": 32}, parity="exact", peak_process_bytes=400 * MIB,
        )
        for n, (name, middle) in enumerate((("none", none), ("ultra", ultra)))
    ]  # fmt: skip
    load = Load(others=0.01)
    return BenchmarkResult(
        "x", "none", rows, noise_floor=0.01, machine=machine_facts(), load=load, processes=5
    )


def compared(
    now: BenchmarkResult, then: BenchmarkResult | None = None, **settings: Any
) -> BaselineComparison:
    return compare_with_baseline(
        now, then or result(100), BenchmarkConfig(baseline="old", **settings)
    )


def slower(comparison: BaselineComparison) -> list[str]:
    return [line.split(" takes ")[0] for line in comparison.regressions]


def baseline(folder: Path | None, *names: str) -> BenchmarkResult | None:
    return load_baseline(BenchmarkConfig(baseline=folder and str(folder)), names or ["none"])


def test_the_same_again_is_no_regression() -> None:
    for seed in range(5):
        plain = compared(result(seed)).to_dict()
        assert plain["sentences"] == ["no regressions"] and not plain["regressed"]


def test_an_arm_that_got_slower_is_a_regression_with_its_interval() -> None:
    comparison = compared(result(1, ultra=0.6))
    (line,) = comparison.regressions
    assert line.startswith("ultra takes ")
    assert 17 < float(line.split()[2].rstrip("%")) < 23
    assert comparison.compared[1]["ratio"] == pytest.approx(1 / 1.2, rel=0.03)
    assert "less time" in compared(result(1, ultra=0.4)).notes[0]


def test_less_than_the_tolerance_or_the_noise_floor_is_no_regression() -> None:
    assert compared(result(1, ultra=0.515)).regressions == []
    assert compared(result(1, ultra=0.6), tolerance=0.3).regressions == []
    noisy = result(1, ultra=0.6)
    noisy.noise_floor = 0.3
    assert compared(noisy).regressions == []
    noisy.noise_floor = None  # of a control that died
    assert (compared(noisy).regressions, compared(noisy).compared) == ([], [])
    other_step = result(1, ultra=0.6)
    other_step.compared = "mean step"
    assert compared(other_step).regressions == []


@pytest.mark.parametrize("load", [Load(), BUSY])
def test_the_reference_is_judged_on_a_quiet_machine_only(load: Load) -> None:
    now = result(1, none=3.0)
    assert slower(compared(now)) == ["none"]
    now.load = load
    comparison = compared(now)
    assert comparison.regressions == []
    assert "none takes" in comparison.notes[0] and "not judged: " in comparison.notes[0]


@pytest.mark.parametrize("load", [Load(others=0.01), BUSY])
def test_a_change_common_to_all_arms_is_reported_and_the_rest_is_judged(load: Load) -> None:
    now = result(1, none=3.0, ultra=1.5)
    now.load = load
    comparison = compared(now)
    (text,) = [*comparison.regressions, *comparison.notes]
    factor, low, high = map(float, re.findall(r"\d\.\d\d", text))
    assert text.startswith("all arms took ")
    assert low < factor < high and factor == pytest.approx(3, rel=0.05)
    assert bool(comparison.notes) is ("not judged: " in text) is (load is BUSY)
    now.arms[1].per_sample_ms = times(1.5 * 1.27, 1)  # beyond the change of all
    comparison = compared(now)
    assert slower(comparison)[-1] == "ultra" and "next to none" in comparison.regressions[-1]
    assert sum("all arms" in line for line in comparison.to_dict()["sentences"]) == 1
    for name in ("none", "ultra"):
        alone = compared(result(1, **{"none": 1.0, "ultra": 0.5, name: 1.27}))
        assert slower(alone) == [name] and "all arms" not in "".join(alone.regressions)


def test_a_reference_that_got_faster_makes_no_regression_of_the_others() -> None:
    comparison = compared(result(1, none=0.7))
    assert comparison.regressions == []
    assert any("its own time is within the limit" in note for note in comparison.notes)


def test_text_of_a_baseline_cannot_forge_lines() -> None:
    then = result(100)
    then.arms[1].overrides = ["\x1b[31mred\nforged"]
    then.machine["torch"], then.started = "1\n2", "\x1b]0;x"
    plain = compared(result(1), then).to_dict()
    text = "".join([*plain["sentences"], plain["started"]])
    assert "\x1b" not in text and "\n" not in text


def test_memory_parity_and_a_failure_that_got_worse_are_regressions() -> None:
    now = result(1)
    row = now.arms[1]
    row.peak_process_bytes = 410 * MIB  # two runs of the same differ by as much
    assert compared(now).regressions == []
    row.peak_process_bytes = 500 * MIB
    row.parity, row.parity_reason = "FAIL", "gradient at step 1"
    row.status, row.reason = "oom", "took 9 GiB"
    assert compared(now).regressions == [
        "ultra ended: oom: took 9 GiB",
        "ultra uses 100 MiB more peak process memory (25%)",
        "ultra: parity is FAIL, was exact (gradient at step 1)",
    ]


def test_other_work_and_arms_of_one_session_alone_are_notes() -> None:
    now = result(1, ultra=0.9)
    now.arms[1].config = {"training.batch_size": 64, "a.new.key": 1}
    assert compared(now).regressions == []
    assert "ultra is not compared: training.batch_size is 64, was 32" in compared(now).notes
    now.arms[1].config = {"training.batch_size": 32, "a.new.key": 1}
    assert len(compared(now).regressions) == 1
    now.arms[1].overrides = ["optimization=maximum"]
    assert "its command is optimization=maximum" in compared(now).notes[0]
    now.arms[1] = deepcopy(now.arms[1])
    now.arms[1].name = "mine"
    assert compared(now).notes == ["mine is not in the baseline", "ultra is only in the baseline"]


def test_another_machine_is_refused_by_what_differs(tmp_path: Path) -> None:
    then = result(1)
    then.machine |= {"cores": 999, "cpu": "abacus"}
    with pytest.raises(ConfigError, match="cpu is .*, was abacus; cores is .*, was 999"):
        compared(result(1), then)
    then.write(tmp_path)
    with pytest.raises(ConfigError, match=r"benchmark\.baseline: was measured on another machine"):
        baseline(tmp_path)
    other_torch = result(100)
    other_torch.machine["torch"] = "1.0"
    assert any(", was 1.0" in note for note in compared(result(1), other_torch).notes)


def test_a_stored_result_without_these_arms_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"benchmark\.baseline: .*No such file"):
        baseline(tmp_path)
    result(1).write(tmp_path)
    with pytest.raises(ConfigError, match="has none of the measured arms, only none, ultra"):
        baseline(tmp_path, "basic")
    assert baseline(tmp_path, "ultra", "x") == result(1)
    assert baseline(None) is None
