from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from runner.benchmark.arms import Arm
from runner.benchmark.attribution import AttributionTrial, attribute, plan_trials
from runner.benchmark.config import BenchmarkConfig
from runner.benchmark.parity_checker import ParityVerdict
from runner.benchmark.result import Attribution, Effect
from runner.benchmark.rounds import MeasureOptions
from runner.composing import compose
from tests.benchmark.simulated import MIB, Simulation, World

SPEEDUPS = {
    "system": 1.0, "fused_optimizer": 1.1, "tf32": 1.0, "channels_last": 0.9, "amp": 1.5,
    "compile": 1.3,
}  # fmt: skip


def arm(level: str, *more: str) -> Arm:
    return Arm(level, compose([f"optimization={level}", *more]), [f"optimization={level}", *more])


def agreed(arm: Arm, choices: Mapping[str, Any]) -> ParityVerdict:
    return ParityVerdict("exact")


def measured(world: World, **how: Any) -> Attribution:
    settings = BenchmarkConfig(**{"attribute_budget_s": 600.0, "narrow": 0.01, **how})
    return attributed(world, settings)


def attributed(
    world: World, settings: BenchmarkConfig, reference: str = "none", check: Any = agreed
) -> Attribution:
    """`attribute` with the summary that a run of the level has in this world."""
    level = arm("advanced")
    summary = Simulation(world, [level]).finish(level.name).summary
    options = MeasureOptions(settings, pool=world.crew, clock=world.clock)
    return attribute(level, arm(reference), options, summary, floor=0.025, check_parity=check)


def effect(found: Attribution, name: str) -> Effect:
    return next(one for one in found.effects if one.name == name)


def test_planted_effects_are_recovered_alone_and_in_company() -> None:
    missed = 0
    for seed in range(3):
        found = measured(World(SPEEDUPS, seed=seed), attribute_budget_s=200.0)
        names = ["system", "tf32", "channels_last", "amp", "compile", "fused_optimizer"]
        assert [one.name for one in found.effects] == names  # in order of application
        for name, truth in SPEEDUPS.items():
            one = effect(found, name)
            for interval in (one.added_interval, one.removed_interval):
                assert interval is not None
                assert interval[0] / 1.02 < truth < interval[1] * 1.02
                missed += not interval[0] <= truth <= interval[1]
            assert one.interaction == pytest.approx(1.0, abs=0.04)
            assert one.parity == "exact"
        text = found.sentences
        assert text[0].startswith("left out of advanced, channels_last makes it 1")
        assert text[0].endswith("drop it")
        assert not any("channels_last" in sentence for sentence in text[1:])
        nothing = [one for one in text if one.startswith(("nothing else", "not known"))]
        assert all(name in " ".join(nothing) for name in ("system", "tf32"))
    assert missed <= 6  # of 36, at 95 %


@pytest.mark.parametrize(("factor", "how"), [(1.25, "more"), (1 / 1.3, "less")])
def test_planted_interactions_are_recovered_and_told(factor: float, how: str) -> None:
    world = World(SPEEDUPS, together={("amp", "compile"): factor})
    found = measured(world)
    for name in ("amp", "compile"):
        one = effect(found, name)
        assert one.interaction_interval is not None
        assert one.interaction_interval[0] / 1.01 <= factor <= one.interaction_interval[1] * 1.01
        assert one.removed == pytest.approx(factor * SPEEDUPS[name], rel=0.03)
    assert effect(found, "fused_optimizer").interaction == pytest.approx(1.0, abs=0.03)
    assert f"amp and compile are worth {how} in company than alone" in found.sentences
    assert any(s.startswith("compile: alone 1.3") for s in found.sentences)
    assert world.most_alive <= 6  # plain, level, two arms for each of two techniques


def test_a_technique_that_did_not_take_hold_is_named_and_not_measured() -> None:
    world = World(SPEEDUPS, holds=lambda name, on: "no GPU" if name == "tf32" else "")
    found = measured(world)
    one = effect(found, "tf32")
    assert (one.added, one.removed) == (None, None)
    assert one.note == "did not take hold in advanced: no GPU"
    assert not any("tf32" in name for name in world.started)
    assert "not measured: tf32" in found.sentences


def test_one_that_needs_another_is_worth_something_in_company_only() -> None:
    needs = World(
        {**SPEEDUPS, "compile": 1.3, "amp": 1.5},
        holds=lambda name, on: "needs compile" if name == "amp" and "compile" not in on else "",
    )
    found = measured(needs)
    one = effect(found, "amp")
    assert one.added is None and one.interaction is None
    assert one.note == "alone it does not take hold: needs compile"
    assert one.removed == pytest.approx(1.5, rel=0.03)
    assert any(s.startswith("amp: alone not known, in company 1.") for s in found.sentences)


@pytest.mark.parametrize("dying", ["none + amp", "advanced - amp"])
def test_an_arm_that_dies_costs_its_own_number_only(dying: str) -> None:
    world = World(SPEEDUPS, dies={dying: ("oom", "killed for memory")})
    found = measured(world)
    one = effect(found, "amp")
    assert (one.added is None) is ("+" in dying)
    assert (one.removed is None) is ("-" in dying)
    assert one.interaction is None
    assert f"{dying}: oom: killed for memory" in one.note
    assert effect(found, "compile").removed == pytest.approx(1.3, rel=0.03)


def test_memory_is_the_difference_of_peaks_and_told_where_it_is_much() -> None:
    found = measured(World(SPEEDUPS, mib={"compile": 200.0, "system": 2.0, "amp": -100.0}))
    assert effect(found, "compile").added_memory_bytes == 200 * MIB
    assert effect(found, "compile").removed_memory_bytes == 200 * MIB
    assert "with compile the peak is 200 MiB more" in found.sentences
    assert "with amp the peak is 100 MiB less" in found.sentences
    assert not any("with system" in sentence for sentence in found.sentences)


def test_the_budget_is_shared_evenly_and_said_when_it_is_spent() -> None:
    world = World(SPEEDUPS, noise=0.2)
    found = measured(world, attribute_budget_s=150.0)
    assert "benchmark.attribute_budget_s=150" in found.stopped and "3 of 3 rounds" in found.stopped
    assert all(one.added is not None for one in found.effects)  # each had its share
    starting = 5.0 * len(world.started)
    assert world.now - starting <= 150.0 + 3 * 6 * 0.25 + 1


def test_a_technique_that_changes_the_numbers_is_told() -> None:
    def judge(arm: Arm, choices: Mapping[str, Any]) -> ParityVerdict:
        return (
            ParityVerdict("FAIL", "loss is off by 1e-2")
            if "amp" in arm.name
            else ParityVerdict("exact")
        )

    world = World(SPEEDUPS)
    settings = BenchmarkConfig(attribute_budget_s=60.0)
    found = attributed(world, settings, check=judge)
    assert effect(found, "amp").parity == "FAIL"
    assert any("amp changes the numbers" in s and "off by 1e-2" in s for s in found.sentences)


def planned(level: Arm, reference: Arm, name: str) -> AttributionTrial:
    own = [target.rpartition(".")[2] for target in level.config.optimization.extra]
    names = [*(name for name, _ in level.config.optimization.techniques()), *own]
    summary = {"techniques": [{"name": name, "engaged": True} for name in names]}
    effects, trials = plan_trials(level, reference, summary)
    assert set(effects) >= {trial.name for trial in trials}
    return next(trial for trial in trials if trial.name == name)


def test_an_arm_has_the_knobs_of_the_level_and_nothing_else_of_it() -> None:
    level = arm("ultra", "optimization.strict=true")
    amp = planned(level, arm("none"), "amp")
    alone, without = amp.added, amp.removed
    assert alone.config.optimization.amp == level.config.optimization.amp
    on = [name for name, t in alone.config.optimization.techniques() if t.enabled]
    assert on == ["amp"]
    assert not without.config.optimization.amp.enabled and level.config.optimization.amp.enabled
    others = replace(without.config.optimization, amp=level.config.optimization.amp)
    assert others.techniques() == level.config.optimization.techniques()
    assert not without.config.optimization.strict
    # what is typed makes the same config
    again = compose(alone.overrides).optimization
    assert replace(again, level="custom") == alone.config.optimization


def test_a_technique_of_ones_own_is_added_and_left_out_by_its_class() -> None:
    level = Arm("mine", compose(["optimization=basic"]))
    level.config.optimization.extra = ["my_package.Faster", "my_package.Other"]
    own = planned(level, arm("none"), "Faster")
    assert own.added.config.optimization.extra == ["my_package.Faster"]
    assert own.removed.config.optimization.extra == ["my_package.Other"]
    assert "optimization.extra=[my_package.Other]" in own.removed.overrides
    effects, _ = plan_trials(level, arm("basic"), {"techniques": []})
    assert effects["Other"].note == "did not take hold in mine: not seen"


@pytest.mark.slow
def test_a_level_is_taken_apart_in_real_processes() -> None:
    work = ("training.steps=1000", "monitoring=quiet")
    settings = BenchmarkConfig(attribute_budget_s=10.0, block_s=0.1)
    on = [{"name": name, "engaged": True} for name in ("system", "fused_optimizer")]
    level, plain = arm("basic", *work), arm("none", *work)
    found = attribute(level, plain, MeasureOptions(settings), {"techniques": on})
    assert [one.name for one in found.effects] == ["system", "fused_optimizer"]
    one = effect(found, "fused_optimizer")
    assert one.added is not None and one.removed is not None and one.interaction is not None
    assert one.added_interval is not None and one.added_interval[0] < one.added
    assert one.parity in ("exact", "explained by precision")
    assert found.sentences and found.stopped


def test_the_intervals_of_all_techniques_hold_together() -> None:
    """Bonferroni: each of 18 intervals takes 10 blocks, where one alone would take 6."""
    world = World(SPEEDUPS)
    found = measured(world, attribute_budget_s=3.0)
    assert world.now - 5.0 * len(world.started) >= 3 * 6 * 10 * 0.25
    assert all(one.added_interval is not None for one in found.effects)
