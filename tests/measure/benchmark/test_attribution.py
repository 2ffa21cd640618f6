"""What each technique is worth, recovered from planted effects."""

from dataclasses import replace
from typing import Any

import pytest

from runner.core.config.composing import compose
from runner.core.schemas.jobs import BenchmarkConfig
from runner.measure.benchmark.arms import Arm
from runner.measure.benchmark.attribution import Ablation, attribute, plan_trials
from runner.measure.benchmark.blocks import MIN_LAUNCH_BLOCKS
from runner.measure.benchmark.result import Attribution, Effect
from runner.measure.benchmark.rounds import MeasureOptions
from tests.measure.benchmark.simulated import MIB, Simulation, World

SPEEDUPS = {
    "system": 1.0, "fused_optimizer": 1.1, "tf32": 1.0, "channels_last": 0.9, "amp": 1.5,
    "compile": 1.3,
}  # fmt: skip


def arm(level: str, *more: str) -> Arm:
    return Arm(level, compose([f"optimization={level}", *more]), [f"optimization={level}", *more])


LEVELS = {name: arm(name) for name in ("none", "advanced")}


def attributed(world: World, **how: Any) -> Attribution:
    """`attribute` with the summary that a run of the level has in this world."""
    settings = BenchmarkConfig(**{"attribute_budget_s": 300.0, "narrow": 0.01, **how})
    level = LEVELS["advanced"]
    summary = Simulation(world, [level]).finish(level.name).summary
    return attribute(level, LEVELS["none"], world.options(settings), summary, floor=0.025)


def effect(attribution: Attribution, name: str) -> Effect:
    return next(one for one in attribution.effects if one.name == name)


def test_planted_effects_are_recovered_alone_and_within_the_level() -> None:
    mib = {"compile": 200.0, "amp": -100.0}
    result = attributed(World(SPEEDUPS, seed=1, mib=mib))
    names = ["system", "tf32", "channels_last", "amp", "compile", "fused_optimizer"]
    assert [one.name for one in result.effects] == names  # in order of application
    for name, truth in SPEEDUPS.items():
        one = effect(result, name)
        for interval in (one.added_interval, one.removed_interval):
            assert interval is not None
            assert interval[0] / 1.02 < truth < interval[1] * 1.02
        assert one.interaction == pytest.approx(1.0, abs=0.04)
        assert one.added_memory_bytes == one.removed_memory_bytes == mib.get(name, 0) * MIB
    text = result.sentences
    assert text[0].startswith("advanced is 1")
    assert "% faster without channels_last" in text[0]
    assert text[0].endswith("drop it")
    assert not any("channels_last" in sentence for sentence in text[1:])
    nothing = [one for one in text if one.startswith(("worth no more than", "not known"))]
    assert all(name in " ".join(nothing) for name in ("system", "tf32"))


def test_planted_interactions_are_recovered() -> None:
    world, factor = World(SPEEDUPS, together={("amp", "compile"): 1.25}), 1.25
    result = attributed(world)
    for name in ("amp", "compile"):
        one = effect(result, name)
        assert one.interaction_interval is not None
        assert one.interaction_interval[0] / 1.01 <= factor <= one.interaction_interval[1] * 1.01
        assert one.removed == pytest.approx(factor * SPEEDUPS[name], rel=0.03)
    assert any(s.startswith("compile: alone 1.") for s in result.sentences)
    assert world.most_alive <= 6  # plain, level, two arms for each of two techniques


def test_a_technique_that_is_idle_in_the_level_or_alone_is_a_note() -> None:
    def holds(name: str, on: set[str]) -> str:
        alone = "needs compile" if name == "amp" and "compile" not in on else ""
        return "no GPU" if name == "tf32" else alone

    world = World(SPEEDUPS, holds=holds)
    result = attributed(world)
    idle, dependent = effect(result, "tf32"), effect(result, "amp")
    assert (idle.added, idle.removed) == (None, None)
    assert idle.note == "did not engage in advanced: no GPU"
    assert not any("tf32" in name for name in world.started)
    assert "not measured: tf32" in result.sentences
    assert dependent.added is None and dependent.interaction is None
    assert dependent.note == "alone it does not engage: needs compile"
    assert dependent.removed == pytest.approx(1.5, rel=0.03)
    assert any(s.startswith("amp: alone not known, within advanced 1.") for s in result.sentences)


@pytest.mark.parametrize("dying", ["none + amp", "advanced - amp"])
def test_an_arm_that_dies_costs_its_own_number_only(dying: str) -> None:
    result = attributed(World(SPEEDUPS, dies={dying: ("oom", "killed for memory")}))
    one = effect(result, "amp")
    assert (one.added is None) is ("+" in dying)
    assert (one.removed is None) is ("-" in dying)
    assert one.interaction is None
    assert f"{dying}: oom: killed for memory" in one.note
    assert effect(result, "compile").removed == pytest.approx(1.3, rel=0.03)


def test_the_budget_is_shared_evenly_and_its_end_is_stated() -> None:
    world = World(SPEEDUPS, noise=0.2)
    result = attributed(world, attribute_budget_s=150.0)
    assert "benchmark.attribute_budget_s=150" in result.stopped
    assert "3 of 3 rounds" in result.stopped
    assert all(one.added is not None for one in result.effects)  # each had its share
    starting = 3 * 6 * 1.0  # for the first time
    assert world.now - starting <= 150.0 + 3 * (MIN_LAUNCH_BLOCKS * 6 * 0.25 + 1)


def test_the_intervals_of_all_techniques_hold_together() -> None:
    """Bonferroni: each of 18 intervals takes 10 blocks, where one alone would take 6."""
    world = World(SPEEDUPS)
    result = attributed(world, attribute_budget_s=3.0)
    assert world.now - 1.0 * len(world.started) >= 3 * 6 * 10 * 0.25
    assert all(one.added_interval is not None for one in result.effects)


def planned(level: Arm, reference: Arm, name: str) -> Ablation:
    own = [target.rpartition(".")[2] for target in level.config.optimization.extra]
    names = [*(name for name, _ in level.config.optimization.techniques()), *own]
    summary = {"techniques": [{"name": name, "engaged": True} for name in names]}
    effects, trials = plan_trials(level, reference, summary)
    assert set(effects) >= {trial.name for trial in trials}
    return next(trial for trial in trials if trial.name == name)


def test_an_arm_has_the_knobs_of_the_level_and_nothing_else_of_it() -> None:
    level = arm("ultra", "optimization.strict=true")
    amp = planned(level, LEVELS["none"], "amp")
    alone, without = amp.added, amp.removed
    assert alone.config.optimization.amp == level.config.optimization.amp
    assert [name for name, t in alone.config.optimization.techniques() if t.enabled] == ["amp"]
    assert not without.config.optimization.amp.enabled and level.config.optimization.amp.enabled
    others = replace(without.config.optimization, amp=level.config.optimization.amp)
    assert others.techniques() == level.config.optimization.techniques()
    assert not without.config.optimization.strict


def test_a_users_own_technique_is_added_and_left_out_by_its_class() -> None:
    level = Arm("mine", compose(["optimization=basic"]))
    level.config.optimization.extra = ["my_package.Faster", "my_package.Other"]
    own = planned(level, LEVELS["none"], "Faster")
    assert own.added.config.optimization.extra == ["my_package.Faster"]
    assert own.removed.config.optimization.extra == ["my_package.Other"]
    effects, _ = plan_trials(level, arm("basic"), {"techniques": []})
    assert effects["Other"].note == "did not engage in mine: not seen"


@pytest.mark.slow
def test_a_level_is_taken_apart_in_real_processes() -> None:
    work = ("training.steps=1000", "monitoring=quiet")
    settings = BenchmarkConfig(attribute_budget_s=30.0, block_s=0.1)
    on = [{"name": name, "engaged": True} for name in ("system", "fused_optimizer")]
    level, plain = arm("basic", *work), arm("none", *work)
    result = attribute(level, plain, MeasureOptions(settings), {"techniques": on})
    assert [one.name for one in result.effects] == ["system", "fused_optimizer"]
    one = effect(result, "fused_optimizer")
    assert one.added is not None and one.removed is not None and one.interaction is not None
    assert one.added_interval is not None and one.added_interval[0] < one.added
    assert result.sentences and result.stopped
