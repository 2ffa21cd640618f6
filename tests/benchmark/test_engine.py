"""From arms to a result, on planted times: what was planted is found, what fails is a row.

The processes are simulated here; `tests/jobs/test_benchmark.py` has real ones.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from runner.benchmark.arms import Arm
from runner.benchmark.blocks import ArmEnded, Turn, TurnLoad
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.engine import Cut, failures, measure
from runner.benchmark.result import SAME, BenchmarkResult
from runner.benchmark.workers.messages import Finished, Ready
from runner.composing import compose
from tests.benchmark.simulated import Simulation, World

SPEEDUPS = {"fused_optimizer": 1.5, "compile": 1.0, "amp": 1.0}
CONTROL = "none, again"


@dataclass
class Stage(World):
    """What is planted besides speed."""

    refuses: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # at its start
    setups: Mapping[str, float] = field(default_factory=dict)  # seconds to the first step
    compiles: Mapping[str, float] = field(default_factory=dict)
    settles: Mapping[str, float] = field(default_factory=dict)  # seconds of it after that step
    loads: TurnLoad = field(default_factory=TurnLoad)
    slow: Mapping[str, float] = field(default_factory=dict)  # whatever its techniques do
    idle: Mapping[str, list[str]] = field(default_factory=dict)  # signs that it does not train
    pauses: Mapping[str, float] = field(default_factory=dict)  # seconds, once a turn
    calls: int = 0
    signals: int = 0  # is sent at that turn
    number: int = signal.SIGINT

    def crew(
        self,
        arms: Sequence[Arm],
        settings: BenchmarkConfig,
        folder: Path | None,
        given: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> Any:
        return Actors(self, arms)


class Actors(Simulation):
    """In place of `WorkerPool`."""

    world: Stage

    def start(self, name: str) -> Ready:
        if name in self.world.refuses:
            raise ArmEnded(*self.world.refuses[name])
        ready = super().start(name)
        return replace(
            ready,
            setup_seconds=self.world.setups.get(name, 3.0),
            compile_seconds=self.world.compiles.get(name, 0.0),
            settling_seconds=self.world.settles.get(name, 0.0),
        )

    def turn(self, name: str, seconds: float) -> Turn:
        self.world.calls += 1
        if self.world.calls == self.world.signals:
            os.kill(os.getpid(), self.world.number)
        found = super().turn(name, seconds)
        factor = self.world.slow.get(name, 1.0)
        return replace(
            found,
            median_ms=found.median_ms * factor,
            per_sample_ms=found.per_sample_ms * factor,
            step_ms=[found.median_ms * factor] * 4,
            seconds=found.seconds + self.world.pauses.get(name, 0.0),
            load=self.world.loads,
        )

    def finish(self, name: str) -> Finished:
        return replace(super().finish(name), problems=self.world.idle.get(name, []))


CONFIGS = {level: compose([f"optimization={level}"]) for level in ("none", "basic", "amp")}


def arm(level: str) -> Arm:
    return Arm(level, CONFIGS[level], [f"optimization={level}"], folder=level)


def measured(world: World, *levels: str, folder: Path | None = None, **how: Any) -> BenchmarkResult:
    usual = {"parity": False, "budget_s": 60.0, "narrow": 0.01}
    settings = BenchmarkConfig(**{**usual, **how})
    arms = [arm(level) for level in levels or ("none", "basic", "amp")]
    return measure(arms, settings, folder, pool=world.crew, clock=world.clock)


def test_planted_speedups_are_found_and_nothing_else_is_claimed() -> None:
    found = measured(Stage(SPEEDUPS))
    none, basic, amp = found.arms
    assert (none.speedup, none.speedup_interval, none.claim) == (1.0, None, "")
    assert basic.speedup_interval is not None and amp.speedup_interval is not None
    assert basic.speedup_interval[0] < 1.5 < basic.speedup_interval[1]
    assert amp.speedup_interval[0] < 1.0 < amp.speedup_interval[1]
    assert (basic.claim, amp.claim) == ("faster", "same")
    assert found.control is not None and found.control.interval[0] < 1 < found.control.interval[1]
    assert 0 < found.noise_floor < 0.1
    assert found.blocks == basic.blocks == len(basic.per_sample_ms) >= 8
    assert "within" in found.stopped


def test_what_starting_takes_longer_is_paid_back_after_so_many_steps() -> None:
    world = Stage(
        SPEEDUPS, noise=0.0, setups={"none": 9.0, CONTROL: 3.0, "basic": 13.0},
        compiles={"basic": 8.0}, settles={"none": 1.0, CONTROL: 1.0, "basic": 5.0},
    )  # fmt: skip
    found = measured(world)
    basic = found.arm("basic")
    assert (basic.setup_seconds, basic.compile_seconds) == (13.0, 8.0)
    # ten seconds more than the faster start of the plain run, four more until its steps are fast;
    # a third of a step is saved each time
    saved = (found.arm("none").step_ms or 0) / 1e3 * (1 - 1 / 1.5)
    assert basic.break_even_steps == pytest.approx(14.0 / saved, rel=0.05)
    assert found.arm("amp").break_even_steps is None  # it saves nothing


def test_an_arm_that_fails_at_its_start_is_a_row_and_the_others_go_on() -> None:
    world = Stage(SPEEDUPS, refuses={"amp": ("oom", "took 9 GiB")})
    found = measured(world)
    row = found.arm("amp")
    assert (row.status, row.reason, row.speedup, row.claim) == ("oom", "took 9 GiB", None, "")
    assert found.arm("basic").claim == "faster"
    assert failures(found) == ["amp (oom: took 9 GiB)"]


def test_an_arm_that_dies_meanwhile_keeps_its_times_and_claims_nothing() -> None:
    world = Stage(SPEEDUPS, dies={"basic": ("killed", "by SIGKILL")}, dies_after=12)
    row = measured(world, narrow=0.0001, budget_s=20.0).arm("basic")
    assert (row.status, row.reason, row.claim) == ("killed", "by SIGKILL", "")
    assert row.blocks == 12 and row.step_ms is not None


def test_without_the_reference_there_are_times_and_no_ratios() -> None:
    found = measured(Stage(SPEEDUPS, refuses={"none": ("failed", "no such file")}))
    assert [row.speedup for row in found.arms] == [None, None, None]
    assert [row.step_ms is None for row in found.arms] == [True, False, False]
    assert any("the reference, none, ended (failed: no such file)" in note for note in found.notes)


def test_without_the_control_the_noise_floor_is_not_known_and_that_is_said() -> None:
    found = measured(Stage(SPEEDUPS, refuses={CONTROL: ("failed", "x")}))
    assert (found.control, found.noise_floor, found.unclaimed) == (None, None, None)
    assert "the control ended (failed: x)" in found.notes
    assert any("the noise floor is not known, so nothing is claimed" in n for n in found.notes)
    assert [row.claim for row in found.arms] == ["", "", ""]
    found = measured(Stage(SPEEDUPS), control=False)
    assert (found.control, found.noise_floor, found.unclaimed) == (None, 0.0, SAME)
    assert found.arm("basic").claim == "faster"


def test_a_control_that_differs_from_itself_lifts_the_floor_and_is_said() -> None:
    found = measured(Stage({"fused_optimizer": 1.05}, slow={CONTROL: 1.2}, noise=0.005))
    assert found.noise_floor > 0.15
    assert found.arm("basic").claim == ""  # 5 % is less than what nothing at all comes to
    assert any("the reference against itself" in note for note in found.notes)


def test_a_noisy_machine_is_a_note_and_a_quiet_one_is_not() -> None:
    noisy = measured(Stage(SPEEDUPS, loads=TurnLoad(others=0.3)))
    assert any("other processes took 30% of the CPUs" in note for note in noisy.notes)
    found = measured(Stage(SPEEDUPS, loads=TurnLoad(others=0.01, mhz=3000.0)))
    assert found.notes == []
    assert (found.load.others, found.load.mhz, found.load.mhz_spread) == (0.01, 3000.0, 0.0)


def test_what_did_not_take_hold_and_what_does_not_train_is_said() -> None:
    world = Stage(
        SPEEDUPS, holds=lambda name, on: "it is none" if name == "amp" else "",
        idle={"basic": ["the loss does not move"]},
    )  # fmt: skip
    found = measured(world)
    assert found.arm("amp").notes == ["1 of 1 techniques did not take hold: amp"]
    assert found.arm("basic").problems == ["the loss does not move"]
    assert found.arm("basic").notes == ["does not train: the loss does not move"]


def test_steps_that_are_rare_and_slow_are_said_where_the_median_hides_them() -> None:
    assert not any("rare" in note for row in measured(Stage(SPEEDUPS)).arms for note in row.notes)
    found = measured(Stage(SPEEDUPS, pauses={"basic": 1.0}))
    assert found.arm("basic").claim == "faster"
    assert any("with rare, slow steps in it, 0." in note for note in found.arm("basic").notes)


def test_arms_that_make_other_steps_are_compared_by_the_sample() -> None:
    big = compose(["optimization=none", "training.batch_size=64", "model.width=8"])
    world = Stage({}, noise=0.01)
    settings = BenchmarkConfig(parity=False, narrow=0.01)
    arms = [arm("none"), Arm("big", big, ["training.batch_size=64"])]
    found = measure(arms, settings, pool=world.crew, clock=world.clock)
    assert any("times are compared per sample" in note for note in found.notes)
    assert any("big: another model than none" in note for note in found.notes)


def test_the_result_is_written_with_all_that_failed(tmp_path: Path) -> None:
    found = measured(Stage(SPEEDUPS, refuses={"amp": ("failed", "x")}), folder=tmp_path)
    assert BenchmarkResult.read(tmp_path) == found
    assert found.machine["cores"] >= 1
    assert found.machine["cpu"]
    assert found.arm("basic").config["training.batch_size"] == 32


def test_a_full_disk_does_not_cost_the_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    found = measured(Stage(SPEEDUPS), folder=tmp_path / "file")
    assert found.arm("basic").claim == "faster"
    assert "not written" in caplog.text


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, number: int, code: int) -> None:
    world = Stage(SPEEDUPS, signals=50, number=number)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Cut) as caught:
        measured(world, folder=tmp_path, narrow=0.0001)
    assert caught.value.exit_code == code
    found = BenchmarkResult.read(tmp_path)
    assert found == caught.value.result
    assert found.stopped == "interrupted" and found.blocks == 12
    assert [row.status for row in found.arms] == ["interrupted"] * 3
    assert found.arm("basic").speedup == pytest.approx(1.5, rel=0.1)
    assert found.arm("basic").claim == "faster"  # the last look's interval holds
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
