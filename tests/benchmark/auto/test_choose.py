"""`optimization=auto`: what is chosen, what must never be, and what is left behind."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from runner.benchmark.agreement import Verdict
from runner.benchmark.auto.advice import sentence
from runner.benchmark.auto.decide import again, decide, effort, take
from runner.benchmark.auto.search import ALIVE, Search
from runner.benchmark.auto.space import NONE, Space, space_of
from runner.benchmark.auto.tried import Found, Tried
from runner.benchmark.blocks import ArmEnded
from runner.benchmark.statistics import Estimate
from tests.benchmark.planted import PlantedCrew

ROOT = Path(__file__).parents[3]

HERE = {name: "not here" for name in ("tf32", "cuda_graphs", "channels_last", "pipeline")}
SPACE = space_of(HERE, [], memory=False)
EFFECTS = {"amp": 0.6, "whole_step": 0.8, "compile": 0.85, "attention": 0.9}
COMPILING_S = 12.0


def factors(space: Space, effects: dict[str, float] = EFFECTS) -> dict[str, float]:
    found = {}
    for one in space.all():
        found[one.name] = 1.0
        for name in one.techniques:
            found[one.name] *= effects.get(name, 1.0)
    return found


def setups(space: Space) -> dict[str, float]:
    return {one.name: COMPILING_S if one.compiles else 1.0 for one in space.all()}


def right(name: str) -> Verdict:
    return Verdict("explained by precision" if "amp" in name else "exact")


def searched(
    crew: PlantedCrew,
    steps: int = 10_000,
    judge: Callable[[str], Verdict] = right,
    budget_s: float = 120.0,
    space: Space = SPACE,
    limit_bytes: float | None = None,
) -> Found:
    search = Search(space, crew, steps, budget_s, 0.2, crew.clock, lambda line: None, crew.seed)
    found = decide(search, lambda name, within_s: judge(name), limit_bytes)
    assert crew.alive == set()  # nothing is left running
    assert crew.most_alive <= ALIVE
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_search_finds_what_an_exhaustive_one_would_to_within_five_percent(seed: int) -> None:
    draw = random.Random(seed)
    effects = {name: draw.uniform(0.6, 1.15) for name in EFFECTS}
    planted = factors(SPACE, effects)
    crew = PlantedCrew(planted, setups=setups(SPACE), noise=0.02, seed=seed)
    found = searched(crew, steps=100_000, budget_s=300.0)
    best = min([1.0, *planted.values()])
    assert planted.get(found.chosen, 1.0) <= 1.05 * best


def test_fewer_are_tried_than_there_are_and_every_one_says_why_it_went() -> None:
    crew = PlantedCrew(factors(SPACE), setups=setups(SPACE))
    found = searched(crew)
    assert set(found.techniques) >= {"amp", "whole_step", "attention"}
    assert len({name for name in crew.started if name in SPACE_NAMES}) < len(SPACE.all())
    assert all(row.why or row.state == "chosen" for row in found.tried)
    assert {row.state for row in found.tried} <= {"chosen", "ran up", "out", "not tried", "ended"}


SPACE_NAMES = {one.name for one in SPACE.all()}


@pytest.mark.parametrize(("steps", "compiled"), [(600, False), (100_000, True)])
def test_compiling_is_chosen_only_for_a_run_that_is_long_enough_for_it(
    steps: int, compiled: bool
) -> None:
    crew = PlantedCrew(factors(SPACE), setups=setups(SPACE), none_ms=100.0)
    found = searched(crew, steps=steps, budget_s=300.0)
    assert ("whole_step" in found.techniques) is compiled
    assert "amp" in found.techniques


def test_a_stored_choice_is_made_anew_for_the_number_of_steps_at_hand() -> None:
    crew = PlantedCrew(factors(SPACE), setups=setups(SPACE), none_ms=100.0)
    found = searched(crew, steps=20_000, budget_s=300.0)
    assert "whole_step" in found.techniques
    again(found, steps=1)
    assert found.chosen == NONE  # every one takes longer to set up than the whole run
    again(found, steps=20_000)
    assert "whole_step" in found.techniques


ALONE = Space((), ("whole_step",), {})


def alone(steps: int, setup: float = 173.0, budget_s: float = 600.0) -> Found:
    """The search of a run whose only candidate saves 15 ms of 59.5 a step."""
    crew = PlantedCrew({"whole_step": 0.75}, none_ms=59.5, setups={"whole_step": setup})
    return searched(crew, steps=steps, budget_s=budget_s, space=ALONE)


def test_an_interval_of_too_few_blocks_is_open_over_the_run_too() -> None:
    row = Tried("amp", ["amp"], final_ratio=3.0, final_interval=(0.0, math.inf))
    assert row.worth(100.0) == (3.0, 0.0, math.inf)
    row.extra_seconds = 50.0
    assert row.worth(100.0) == (pytest.approx(1.2), 0.0, pytest.approx(2.0))


def test_that_compiling_is_not_paid_back_is_said_with_the_steps_from_which_it_would_be() -> None:
    found = alone(8_000)
    why = "compiling (172 s) would not be paid back in 8,000 steps; from about 13,000 steps on"
    assert found.chosen == NONE
    assert "over 8,000 steps; with whole_step a step is 1.3" in found.reason
    assert why in found.reason
    assert found.outgrown(14_000)  # so it is not taken from what is stored
    assert not found.outgrown(10_000)
    stored = alone(40_000)
    assert stored.chosen == "whole_step"
    again(stored, 1_000)
    assert "would not be paid back in 1,000 steps" in stored.reason


def test_what_saves_the_run_less_than_it_takes_to_judge_is_given_up_and_said() -> None:
    found = alone(18_000)  # it pays for itself by then, but not for being judged
    assert found.chosen == NONE
    assert "with whole_step a step is 1.3" in found.reason
    assert "finding out takes about 190 s, and it could save 87 s" in found.reason


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("budget_s", [15.0, 30.0, 60.0, 120.0])
def test_a_search_takes_half_its_budget_more_at_most_and_less_than_the_run_could_gain(
    seed: int, budget_s: float
) -> None:
    draw = random.Random(seed)
    setup = {one.name: draw.uniform(5, 200) if one.compiles else 1.0 for one in SPACE.all()}
    crew = PlantedCrew(factors(SPACE), setups=setup, seed=seed)

    def judge(name: str) -> Verdict:
        crew.now += 10.0 + 2 * (setup[name] if "whole_step" in name else 0.0)
        return right(name)

    found = searched(crew, steps=int(20 * budget_s), budget_s=budget_s, judge=judge)
    assert found.seconds < 1.5 * budget_s
    assert found.seconds == pytest.approx(crew.now)


def test_what_saves_a_long_run_much_is_judged_though_the_budget_is_spent() -> None:
    setup = {one.name: 45.0 if one.compiles else 4.0 for one in SPACE.all()}
    speed = {one.name: 0.3 if one.compiles else 0.5 for one in SPACE.all()}
    crew = PlantedCrew(speed, none_ms=600.0, setups=setup)

    def judge(name: str) -> Verdict:
        crew.now += 100.0
        return right(name)

    found = searched(crew, steps=40_000, budget_s=180.0, judge=judge)
    assert "compile" in found.chosen


def test_where_the_budget_is_too_small_for_any_candidate_nothing_but_none_is_begun() -> None:
    crew = PlantedCrew(factors(SPACE), setups=setups(SPACE))
    found = searched(crew, budget_s=10.0)
    assert crew.started == [NONE]
    assert all(row.no_time() for row in found.tried)
    assert any("s are left of optimization.auto.budget_s=10" in row.why for row in found.tried)


def test_what_compiles_and_got_no_final_says_what_compiling_left_of_it() -> None:
    row = Tried("whole_step", ["whole_step"], "out", extra_seconds=45.3, heat_ratio=1.5)
    found = Found(steps=3_000, none_ms=50.1, noise_floor=0.02, tried=[row])
    take(found, None)
    assert "1.50 times as fast, but compiling (45 s) leaves 1.03 times" in found.reason


def test_what_the_budget_left_is_said() -> None:
    crew = PlantedCrew({}, setups=dict.fromkeys(SPACE_NAMES, 12.0))
    found = searched(crew, budget_s=60.0)
    said, untried = effort(found), sum(row.state == "not tried" for row in found.tried)
    assert untried > 1
    assert f"{len(found.tried) - untried} of {len(found.tried)} candidates tried" in said
    assert "not: the budget leaves no time for it" in said
    assert f"the budget left {untried} of {len(found.tried)} candidates untried" in found.reason
    assert all(row.why and row.state != "running" for row in found.tried)


def test_what_computes_something_else_is_never_chosen_however_fast() -> None:
    def judge(name: str) -> Verdict:
        return Verdict("FAIL", "a wrong mask") if "whole_step" in name else right(name)

    crew = PlantedCrew(factors(SPACE), setups=setups(SPACE))
    found = searched(crew, judge=judge)
    assert "whole_step" not in found.techniques
    assert "amp" in found.techniques  # the others are not lost by it
    wrong = [row for row in found.tried if row.parity == "FAIL"]
    assert wrong
    assert all(row.state == "out" and "a wrong mask" in row.why for row in wrong)
    nobody = searched(PlantedCrew(factors(SPACE)), judge=lambda name: Verdict("FAIL", "wrong"))
    assert nobody.chosen == NONE


def test_what_nobody_could_judge_is_not_chosen() -> None:
    found = searched(PlantedCrew(factors(SPACE)), judge=lambda name: Verdict(None, "killed"))
    assert found.chosen == NONE


def test_a_candidate_beyond_the_memory_budget_is_out() -> None:
    peaks = {name: 3 * 10**9 for name in SPACE_NAMES if "amp" in name}
    crew = PlantedCrew(factors(SPACE), setups=setups(SPACE), peaks=peaks)
    found = searched(crew, limit_bytes=2e9)
    assert found.techniques
    assert "amp" not in found.techniques
    over = [row for row in found.tried if (row.peak_bytes or 0) > 2e9]
    assert over
    assert all("memory_budget_mb" in row.why for row in over)


def test_where_none_itself_holds_too_much_what_fits_is_chosen_though_it_is_slower() -> None:
    space = space_of(
        {**HERE, "compile": "x", "whole_step": "x", "amp": "x", "attention": "x"}, [], True
    )
    planted = factors(space, {"recompute": 1.3})
    peaks = {name: 10**9 if "recompute" in name else 3 * 10**9 for name in [NONE, *planted]}
    found = searched(PlantedCrew(planted, peaks=peaks), space=space, limit_bytes=2e9)
    assert "recompute" in found.techniques


@pytest.mark.parametrize(("seed", "noise"), list(product(range(10), (0.02, 0.1))))
def test_where_nothing_is_faster_it_stays_at_none(seed: int, noise: float) -> None:
    crew = PlantedCrew({}, setups={name: 1.0 for name in SPACE_NAMES}, noise=noise, seed=seed)
    assert searched(crew).chosen == NONE


def test_what_is_no_faster_than_the_same_process_once_more_is_not_chosen() -> None:
    lucky = {name: 0.95 for name in [*SPACE_NAMES, "none again"]}  # by where its memory lies, say
    crew = PlantedCrew(lucky, setups={name: 1.0 for name in SPACE_NAMES}, noise=0.005)
    assert searched(crew).chosen == NONE


def test_what_is_slower_is_not_chosen() -> None:
    crew = PlantedCrew({name: 1.2 for name in SPACE_NAMES}, setups=setups(SPACE))
    assert searched(crew).chosen == NONE


def test_a_candidate_that_ends_costs_itself_alone() -> None:
    ended = {name: ArmEnded("oom", "no memory") for name in SPACE_NAMES if "whole_step" in name}
    found = searched(PlantedCrew(factors(SPACE), setups=setups(SPACE), ended=ended))
    assert "amp" in found.techniques
    assert all(row.state == "ended" for row in found.tried if row.why == "oom: no memory")
    with pytest.raises(ArmEnded):
        searched(PlantedCrew({}, ended={NONE: ArmEnded("failed", "a bug")}))


def test_the_budget_is_kept_but_for_what_was_begun() -> None:
    slow = {name: 40.0 for name in SPACE_NAMES if "compile" in name}
    crew = PlantedCrew(factors(SPACE), setups=slow)
    searched(crew, budget_s=60.0)
    assert crew.now < 60 + 40 + 30


def test_a_space_is_small_and_leaves_out_what_can_do_nothing() -> None:
    everything = space_of({}, [], memory=True)
    assert len(everything.all()) <= 16
    assert not any(
        "recompute" in o.techniques and "whole_step" in o.techniques for o in everything.all()
    )
    names = [*HERE, "amp", "compile", "whole_step", "attention"]
    bare = space_of(dict.fromkeys(names, "no"), [], memory=False)
    assert [one.name for one in bare.all()] == ["system fused_optimizer"]
    assert not any("amp" in one.techniques for one in space_of(HERE, ["amp"], False).all())


def test_a_batch_size_is_advised_only_where_it_is_clearly_better() -> None:
    assert sentence(64, 32, Estimate(1.4, 1.35, 1.46)).startswith(
        "training.batch_size=64 would be 1.40 times as efficient per sample as 32 (1.35 to 1.46)"
    )
    assert sentence(64, 32, Estimate(1.4, 0.9, 1.8)) == ""
    assert sentence(64, 32, Estimate(1.02, 1.01, 1.03)) == ""
