"""A benchmark from its arms to its result, with processes of planted times."""

import signal
from pathlib import Path
from typing import Any

import pytest

from runner import compose
from runner.core.schemas.jobs import BenchmarkConfig
from runner.measure.benchmark.arms import Arm
from runner.measure.benchmark.engine import BenchmarkInterrupted, list_failed_arms, measure
from runner.measure.benchmark.result import NEGLIGIBLE, BenchmarkResult
from runner.measure.benchmark.statistics import ONE_PROCESS_NOISE
from tests.measure.benchmark.simulated import World

SPEEDUPS = {"fused_optimizer": 1.5, "compile": 1.0, "amp": 1.0}
CONTROL = "none, again"
CONFIGS = {level: compose([f"optimization={level}"]) for level in ("none", "basic", "amp")}


def arm(level: str) -> Arm:
    return Arm(level, CONFIGS[level], [f"optimization={level}"], folder=level)


def measured(world: World, *others: Arm, folder: Path | None = None, **how: Any) -> BenchmarkResult:
    settings = BenchmarkConfig(**{"parity": False, "budget_s": 60.0, "narrow": 0.01, **how})
    arms = [arm("none"), *others] if others else [arm(level) for level in CONFIGS]
    return measure(arms, settings, folder, pool=world.pool, clock=world.clock)


def test_planted_speedups_are_recovered_and_nothing_else_is_claimed(tmp_path: Path) -> None:
    result = measured(World(SPEEDUPS, others=0.01), folder=tmp_path, narrow=0.02, budget_s=120.0)
    none, basic, amp = result.arms
    assert (none.speedup, none.speedup_interval, none.claim) == (1.0, None, "")
    assert basic.speedup_interval is not None and amp.speedup_interval is not None
    assert basic.speedup_interval[0] < 1.5 < basic.speedup_interval[1]
    assert amp.speedup_interval[0] < 1.0 < amp.speedup_interval[1]
    assert (basic.claim, amp.claim) == ("faster", "same")
    assert result.control is not None
    assert result.control.interval[0] < 1 < result.control.interval[1]
    assert result.noise_floor is not None and 0 < result.noise_floor < 0.1
    assert result.blocks == basic.blocks == len(basic.per_sample_ms) >= 8
    assert result.processes == len(result.process_starts) == 5
    assert (result.notes, result.load.others) == ([], 0.01)
    assert result.machine["cores"] >= 1 and result.machine["cpu"]
    assert basic.config["training.batch_size"] == 32
    assert BenchmarkResult.read(tmp_path) == result


def test_a_slower_start_is_paid_back_after_so_many_steps() -> None:
    world = World(
        SPEEDUPS,
        noise=0.0,
        setups={"none": 9.0, CONTROL: 3.0, "basic": 13.0},
        compiles={"basic": 8.0},
        settles={"none": 1.0, CONTROL: 1.0, "basic": 5.0},
    )
    result = measured(world)
    basic = result.arm("basic")
    assert (basic.setup_seconds, basic.compile_seconds) == (13.0, 8.0)
    # 10 s more than the faster start of the plain run, 4 more until its steps are fast
    saved = (result.arm("none").step_ms or 0) / 1e3 * (1 - 1 / 1.5)
    assert basic.break_even_steps == pytest.approx(14.0 / saved, rel=0.05)
    assert result.arm("amp").break_even_steps is None  # it saves nothing


def test_an_arm_that_ends_early_is_a_row_and_the_others_continue(tmp_path: Path) -> None:
    dies = {"basic": ("killed", "by SIGKILL")}
    world = World({}, refuses={"amp": ("oom", "took 9 GiB")}, dies=dies, dies_after=12)
    result = measured(world, folder=tmp_path, narrow=0.0001, budget_s=20.0)
    _, basic, amp = result.arms
    assert (amp.status, amp.reason, amp.speedup, amp.claim) == ("oom", "took 9 GiB", None, "")
    assert (basic.status, basic.reason, basic.claim) == ("killed", "by SIGKILL", "")
    assert basic.blocks == 12 and basic.step_ms is not None
    assert list_failed_arms(result) == ["basic (killed: by SIGKILL)", "amp (oom: took 9 GiB)"]
    assert BenchmarkResult.read(tmp_path) == result


def test_without_the_reference_there_are_times_and_no_ratios() -> None:
    result = measured(World(SPEEDUPS, refuses={"none": ("failed", "no such file")}))
    assert [row.speedup for row in result.arms] == [None, None, None]
    assert [row.step_ms is None for row in result.arms] == [True, False, False]
    assert any(
        "the reference, none, ended early (failed: no such file)" in note for note in result.notes
    )


def test_without_a_control_the_noise_floor_is_unknown_and_that_is_stated() -> None:
    result = measured(World(SPEEDUPS, refuses={CONTROL: ("failed", "x")}))
    assert (result.control, result.noise_floor, result.claim_threshold) == (None, None, None)
    assert any("the control, none, again, ended early (failed: x)" in note for note in result.notes)
    assert any("the noise floor is unknown, so no difference is claimed" in n for n in result.notes)
    assert [row.claim for row in result.arms] == ["", "", ""]
    result = measured(World(SPEEDUPS), control=False)
    assert (result.control, result.noise_floor, result.claim_threshold) == (None, 0.0, NEGLIGIBLE)
    assert result.arm("basic").claim == "faster"


def test_a_control_that_differs_from_itself_raises_the_floor_and_is_a_note() -> None:
    result = measured(World({"fused_optimizer": 1.05}, factors={CONTROL: 1.2}, noise=0.005))
    assert result.noise_floor is not None and result.noise_floor > 0.15
    assert result.arm("basic").claim == ""  # 5 % is less than what nothing at all comes to
    assert any("the reference against itself" in note for note in result.notes)


def test_a_noisy_machine_idle_techniques_and_an_arm_that_does_not_train_are_notes() -> None:
    world = World(
        SPEEDUPS,
        others=0.3,
        holds=lambda name, on: "it is none" if name == "amp" else "",
        problems={"basic": ["the loss does not move"]},
    )
    result = measured(world)
    assert any("other processes used 30% of the CPUs" in note for note in result.notes)
    assert result.arm("amp").notes == ["1 of 1 techniques did not engage: amp"]
    assert result.arm("basic").problems == ["the loss does not move"]
    assert result.arm("basic").notes == ["does not train: the loss does not move"]


def test_arms_with_other_batches_are_compared_by_the_sample_and_a_full_disk_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    big = compose(["optimization=none", "training.batch_size=64", "model.width=8"])
    arms = arm("basic"), Arm("big", big, ["training.batch_size=64"])
    result = measured(World(SPEEDUPS), *arms, folder=tmp_path / "file")
    assert any("times are compared per sample" in note for note in result.notes)
    assert any("big: different model from none" in note for note in result.notes)
    assert result.arm("basic").claim == "faster" and "not written" in caplog.text


def test_several_processes_of_each_arm_take_no_more_than_the_budget() -> None:
    world = World(SPEEDUPS, processes=0.02)
    result = measured(world, budget_s=60.0)
    assert result.processes == 5 and world.started.count("basic") == 5
    assert world.now <= 4 * 1.0 + 60.0 + 4 * 3 * 0.25  # the first start, three blocks
    assert result.noise_floor is not None and 0.01 < result.noise_floor < 0.15
    dear = measured(World(SPEEDUPS, setups={"amp": 40.0}), budget_s=60.0)
    assert dear.processes == 1
    assert dear.noise_floor == dear.claim_threshold == ONE_PROCESS_NOISE
    (note,) = [note for note in dear.notes if "in one process" in note]
    assert "no difference within 7% is claimed" in note and "benchmark.budget_s" in note
    assert [row.claim for row in dear.arms] == ["", "faster", ""]  # too little is known for `same`


def test_the_intervals_of_all_arms_hold_together() -> None:
    """Two besides the reference share the 5 %, so naming the fastest is no selection."""
    how: dict[str, Any] = {"processes": 1, "budget_s": 1.0, "control": False}
    one, two = measured(World(SPEEDUPS), arm("basic"), **how), measured(World(SPEEDUPS), **how)
    assert one.blocks == 6 and two.blocks == 7


@pytest.mark.parametrize(
    ("number", "code", "processes", "status"),
    [(signal.SIGINT, 130, 1, "interrupted"), (signal.SIGTERM, 143, 5, "done")],
)
def test_ctrl_c_keeps_the_measurements(
    tmp_path: Path, number: int, code: int, processes: int, status: str
) -> None:
    """Arms that have a further process have ended the first one's run as they should."""
    world = World(SPEEDUPS, interrupt_at=50, signal=number)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(BenchmarkInterrupted) as caught:
        measured(world, folder=tmp_path, narrow=0.0001, processes=processes)
    assert caught.value.exit_code == code
    result = BenchmarkResult.read(tmp_path)
    assert result == caught.value.result
    assert result.stopped == "interrupted" and result.blocks == 12
    assert [row.status for row in result.arms] == [status] * 3
    assert result.arm("basic").speedup == pytest.approx(1.5, rel=0.1)
    assert result.arm("basic").claim == "faster"  # the last look's interval holds
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
