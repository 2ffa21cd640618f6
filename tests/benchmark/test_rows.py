"""What is claimed of the rows, and what has to be said beside them."""

from __future__ import annotations

from pathlib import Path

from runner.benchmark.blocks import Turn
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.engine import measure
from runner.benchmark.result import BenchmarkResult
from tests.benchmark.test_engine import CONTROL, SPEEDUPS, Actors, Stage, arm, measured


def test_a_control_that_dies_before_it_has_an_interval_says_nothing_either(tmp_path: Path) -> None:
    world = Stage(SPEEDUPS, dies={CONTROL: ("killed", "by SIGKILL")}, dies_after=3)
    found = measured(world, folder=tmp_path)
    assert (found.noise_floor, found.arm("basic").claim) == (None, "")
    assert BenchmarkResult.read(tmp_path).noise_floor is None


def test_less_than_two_percent_is_claimed_by_nobody() -> None:
    found = measured(Stage({"fused_optimizer": 1.015}, noise=0.002), "none", "basic")
    row = found.arm("basic")
    assert row.speedup_interval is not None and row.speedup_interval[0] > 1
    assert row.claim in ("", "same")


def test_blocks_that_depend_on_each_other_are_said() -> None:
    slow = {"basic": 1.0}

    class Spells(Actors):
        def turn(self, name: str, seconds: float) -> Turn:
            slow["basic"] = 1.0 + 0.1 * (self.world.calls // 60 % 2)
            return super().turn(name, seconds)

    world = Stage(SPEEDUPS, slow=slow)
    settings = BenchmarkConfig(parity=False, budget_s=60.0, narrow=0.01)
    found = measure(
        [arm("none"), arm("basic")], settings, crew=lambda arms, *_: Spells(world, arms),
        clock=world.clock,
    )  # fmt: skip
    assert any("blocks depend on each other: ratios of basic" in note for note in found.notes)
    assert found.arm("basic").speedup_interval is None or found.blocks > 30
