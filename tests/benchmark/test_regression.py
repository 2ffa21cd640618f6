"""Against a stored result: worse is said, and noise is not."""

from __future__ import annotations

import random
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.machine import machine
from runner.benchmark.regression import Against, against, stored
from runner.benchmark.result import ArmResult, BenchmarkResult, Load
from runner.errors import ConfigError
from runner.report.comparison import of_benchmark
from runner.report.verdicts import conclusion

MIB = 1 << 20
SETTINGS = BenchmarkConfig(baseline="old")


def times(middle: float, seed: int, noise: float = 0.02) -> list[float]:
    draw = random.Random(seed)
    return [middle * draw.lognormvariate(0, noise) for _ in range(24)]


def result(
    seed: int, none: float = 1.0, ultra: float = 0.5, noise: float = 0.02
) -> BenchmarkResult:
    rows = [
        ArmResult(
            name, [f"optimization={name}"], "done", per_sample_ms=times(middle, seed + n, noise),
            config={"training.batch_size": 32}, parity="exact", losses=[2.0, 1.5, 1.0],
            peak_process_bytes=400 * MIB, summary={"techniques": []},
        )
        for n, (name, middle) in enumerate((("none", none), ("ultra", ultra)))
    ]  # fmt: skip
    load = Load(others=0.01, stolen=0.0)
    return BenchmarkResult("x", "none", rows, noise_floor=0.01, machine=machine(), load=load)


def held(now: BenchmarkResult, then: BenchmarkResult | None = None, **how: Any) -> Against:
    return against(now, then or result(100), BenchmarkConfig(baseline="old", **how))


def test_the_same_again_is_no_regression() -> None:
    for seed in range(20):
        found = held(result(seed))
        assert found.regressions == []
        assert found.plain()["sentences"] == ["nothing got worse"]
        assert not found.plain()["regressed"]


def test_what_got_slower_is_said_with_its_interval() -> None:
    found = held(result(1, ultra=0.6))
    assert len(found.regressions) == 1
    assert found.regressions[0].startswith("ultra takes ")
    slower = float(found.regressions[0].split()[2].rstrip("%"))
    assert 17 < slower < 23
    assert found.compared[1]["ratio"] == pytest.approx(1 / 1.2, rel=0.03)


def test_less_than_the_tolerance_or_the_noise_floor_is_none() -> None:
    assert held(result(1, ultra=0.515)).regressions == []
    assert held(result(1, ultra=0.6), tolerance=0.3).regressions == []
    noisy = result(1, ultra=0.6)
    noisy.noise_floor = 0.3
    assert held(noisy).regressions == []
    noisy.noise_floor = None  # of a control that died
    found = held(noisy)
    assert (found.regressions, found.compared) == ([], [])
    assert any("a noise floor of the two is not known" in note for note in found.notes)


def test_what_got_faster_is_a_note() -> None:
    found = held(result(1, ultra=0.4))
    assert found.regressions == []
    assert "less time" in found.notes[0]


BUSY = Load(others=0.6, stolen=0.0)
ALL = "all arms took longer per sample: "


def test_a_change_of_all_arms_is_stated_of_all_and_of_no_single_one() -> None:
    for seed in range(20):
        now = result(seed, none=3.0, ultra=1.5)
        (said,) = held(now).regressions
        assert said.startswith(ALL)
        now.load = BUSY
        found = held(now)
        assert found.regressions == []
        assert found.notes[0].startswith(ALL) and "not judged: other processes" in found.notes[0]


def test_the_factor_of_all_arms_comes_with_its_interval() -> None:
    (said,) = held(result(1, none=3.0, ultra=1.5)).regressions
    factor, low, high = map(float, re.findall(r"\d\.\d\d", said))
    assert low < factor < high
    assert low < 3.0 < high < 1.05 * low
    faster = held(result(1, none=0.5, ultra=0.25))
    assert faster.regressions == []
    assert "all arms took less time per sample: 0.5" in faster.notes[0]


@pytest.mark.parametrize("load", [Load(others=0.01, stolen=0.0), BUSY], ids=["quiet", "busy"])
def test_what_one_arm_takes_beyond_the_change_of_all_is_judged(load: Load) -> None:
    for seed in range(20):
        now = result(seed, none=3.0, ultra=1.5 * 1.27)
        now.load = load
        found = held(now)
        (said,) = (one for one in found.regressions if not one.startswith(ALL))
        assert re.match(r"ultra takes 2\d\.\d% more time per sample, held against none", said)
        assert re.search(r"beyond the [23]\.\d\d times as long \(.*\) of all arms", said)
        assert any(one.startswith(ALL) for one in [*found.regressions, *found.notes])


@pytest.mark.parametrize("slower", ["none", "ultra"])
def test_what_one_arm_alone_takes_is_no_change_of_all(slower: str) -> None:
    for seed in range(20):
        middle = {"none": 1.0, "ultra": 0.5}
        middle[slower] *= 1.27
        found = held(result(seed, **middle))
        assert [one.split(" takes ")[0] for one in found.regressions] == [slower]
        assert not any("all arms" in one for one in found.plain()["sentences"])


@pytest.mark.parametrize("load", [Load(others=0.01, stolen=0.0), BUSY], ids=["quiet", "busy"])
def test_without_the_reference_arms_are_held_against_the_one_of_the_median_change(
    load: Load,
) -> None:
    then, now = result(100), result(1, none=3.0, ultra=1.5 * 1.27)
    now.load = load
    for one in (then, now):
        one.reference = "gone"
        one.arms.append(deepcopy(one.arms[0]))
        one.arms[2].name = "third"
    found = held(now, then)
    assert any(one.startswith(ALL) for one in [*found.regressions, *found.notes])
    (said,) = (one for one in found.regressions if not one.startswith(ALL))
    assert said.startswith("ultra takes ") and "beyond the" in said


def test_of_one_arm_it_is_said_that_the_machine_may_be_what_changed() -> None:
    then, now = result(100), result(1, none=3.0)
    now.arms = now.arms[:1]
    (said,) = held(now, then).regressions
    assert "none takes " in said and "one arm alone cannot tell from a slower machine" in said


def test_the_page_tells_the_change_of_all_before_what_is_left() -> None:
    now = result(1, none=3.0, ultra=1.5 * 1.27)
    now.baseline = held(now).plain()
    text = " ".join(one.text for one in conclusion(of_benchmark(now, None)))
    assert 0 < text.index(ALL) < text.index("of all arms")


@pytest.mark.parametrize("when", [0, 1])
def test_times_of_a_busy_machine_are_not_blamed_on_the_code(when: int) -> None:
    pair = result(1, none=1.9, ultra=0.95), result(100)
    pair[when].load.others = 0.6
    found = held(*pair)
    assert found.regressions == []
    assert f"{ALL}1.9" in found.notes[0] and "not judged: other processes" in found.notes[0]
    pair[0].arms[1].per_sample_ms = times(1.3, 7)  # beside the others it still shows
    (said,) = held(*pair).regressions
    assert said.startswith("ultra takes ") and "held against none" in said


def test_a_load_that_is_not_known_is_not_taken_for_quiet() -> None:
    now = result(1, none=1.9, ultra=0.95)
    now.load = Load()
    assert held(now).regressions == []
    assert "not judged: how busy the machine was is not known of both" in held(now).notes[0]


def test_a_reference_that_got_faster_makes_no_regression_of_the_others() -> None:
    found = held(result(1, none=0.7))
    assert found.regressions == []
    assert any("by itself it is within that" in note for note in found.notes)


DAMAGE: dict[str, Any] = {
    "summary.techniques": lambda one: one.arms[1].summary.update(techniques=7),
    "per_sample_ms[0] is -1.0": lambda one: one.arms[1].per_sample_ms.__setitem__(0, -1.0),
    "per_sample_ms[0] is 1e-320": lambda one: one.arms[1].per_sample_ms.__setitem__(0, 1e-320),
    "peak_process_bytes is -5": lambda one: setattr(one.arms[1], "peak_process_bytes", -5),
    "machine.cpu is None": lambda one: one.machine.clear(),
    "noise_floor is -1": lambda one: setattr(one, "noise_floor", -1.0),
    "comes twice": lambda one: one.arms.append(one.arms[1]),
}


@pytest.mark.parametrize("says", DAMAGE)
def test_a_damaged_baseline_is_refused_by_what_is_wrong(says: str, tmp_path: Path) -> None:
    broken = result(1)
    DAMAGE[says](broken)
    broken.write(tmp_path)
    with pytest.raises(ConfigError, match=r"benchmark\.baseline: .*damaged.*") as caught:
        stored(BenchmarkConfig(baseline=str(tmp_path)), ["none"])
    assert says in str(caught.value)


def test_numbers_beyond_any_float_are_damage_too(tmp_path: Path) -> None:
    result(1).write(tmp_path)
    text = (tmp_path / "benchmark.json").read_text()
    for number in ("1" + 400 * "0", "Infinity"):
        bad = tmp_path / "bad.json"
        bad.write_text(text.replace('"noise_floor": 0.01', f'"noise_floor": {number}'))
        with pytest.raises(ConfigError, match="damaged"):
            stored(BenchmarkConfig(baseline=str(bad)), ["none"])


def test_what_a_baseline_says_cannot_forge_lines() -> None:
    then = result(100)
    then.arms[1].overrides = ["\x1b[31mred\nforged"]
    then.machine["torch"], then.started = "1\n2", "\x1b]0;x"
    said = "".join(
        [*held(result(1), then).plain()["sentences"], held(result(1), then).plain()["started"]]
    )
    assert "\x1b" not in said and "\n" not in said


def test_more_memory_is_said_where_it_is_more_than_two_runs_differ_by() -> None:
    now = result(1)
    now.arms[1].peak_process_bytes = 410 * MIB
    assert held(now).regressions == []
    now.arms[1].peak_process_bytes = 500 * MIB
    assert held(now).regressions == [
        "ultra holds 100 MiB more memory of the process at its peak (25%)"
    ]


def test_numbers_that_got_worse_are_said() -> None:
    now = result(1)
    now.arms[1].parity, now.arms[1].parity_reason = "FAIL", "gradient at step 1"
    assert held(now).regressions == ["ultra: parity is FAIL and was exact (gradient at step 1)"]
    now = result(1)
    now.arms[1].losses = [2.0, 1.5 + 1e-7, 1.0]
    assert held(now).regressions == []
    now.arms[1].losses = [2.0, 1.51, 1.0]
    assert held(now).regressions[0].startswith("ultra: the loss at step 2 is 1.51 and was 1.5;")
    now.arms[1].losses = [2.0, float("nan"), 1.0]
    assert "the loss at step 2 is nan" in held(now).regressions[0]


def test_sixteen_bits_may_differ_by_their_roundings() -> None:
    now, then = result(1), result(100)
    for one in (now, then):
        one.arms[1].summary = {"techniques": [{"name": "amp", "engaged": True}]}
    now.arms[1].losses = [2.0, 1.51, 1.0]
    assert held(now, then).regressions == []
    then.arms[1].summary = {"techniques": []}
    now.arms[1].losses = [2.0, 9.0, 1.0]
    found = held(now, then)
    assert found.regressions == []  # it is another computation, which is said
    assert "ultra: took hold now: amp; its losses are not compared" in found.notes


def test_an_arm_that_no_more_comes_to_its_end_is_a_regression() -> None:
    now = result(1)
    now.arms[1].status, now.arms[1].reason = "oom", "took 9 GiB"
    assert held(now).regressions == ["ultra did not come to its end (oom: took 9 GiB)"]


def test_other_work_under_the_same_name_is_not_compared() -> None:
    now = result(1, ultra=0.9)
    now.arms[1].config = {"training.batch_size": 64, "a.new.key": 1}
    assert held(now).regressions == []
    assert "ultra is not compared: training.batch_size is 64 and was 32" in held(now).notes
    now.arms[1].config = {"training.batch_size": 32, "a.new.key": 1}
    assert len(held(now).regressions) == 1
    now.arms[1].overrides = ["optimization=maximum"]
    assert "stands for optimization=maximum" in held(now).notes[0]


def test_another_machine_is_refused_by_what_differs(tmp_path: Path) -> None:
    then = result(1)
    then.machine |= {"cores": 999, "cpu": "abacus"}
    with pytest.raises(ConfigError, match="cpu is .* and was abacus; cores is .* and was 999"):
        held(result(1), then)
    then.write(tmp_path)
    with pytest.raises(ConfigError, match=r"benchmark\.baseline: is of another machine"):
        stored(BenchmarkConfig(baseline=str(tmp_path)), ["none"])


def test_another_torch_is_compared_and_said() -> None:
    then = result(100)
    then.machine["torch"] = "1.0"
    assert any("and was 1.0" in note for note in held(result(1), then).notes)


def test_a_stored_result_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"benchmark\.baseline: .*No such file"):
        stored(BenchmarkConfig(baseline=str(tmp_path)), ["none"])
    result(1).write(tmp_path)
    with pytest.raises(ConfigError, match="none of its arms is measured now: it has none, ultra"):
        stored(BenchmarkConfig(baseline=str(tmp_path)), ["basic"])
    assert stored(BenchmarkConfig(baseline=str(tmp_path)), ["ultra", "x"]) == result(1)
    assert stored(BenchmarkConfig(), ["none"]) is None


def test_arms_that_only_one_of_the_two_has_are_said() -> None:
    now = result(1)
    now.arms[1] = deepcopy(now.arms[1])
    now.arms[1].name = "mine"
    found = held(now)
    assert found.notes == ["mine is not in the stored result", "ultra was not measured now"]
