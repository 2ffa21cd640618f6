"""`optimization=auto`: what is chosen, what must never be, and what stays without a decision."""

import math
import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest

from runner import compose
from runner.core.errors import WorkerFailure
from runner.core.schemas.jobs import BenchmarkConfig
from runner.measure.auto import resolve
from runner.measure.auto.search import (
    CANDIDATES_PER_ROUND,
    CONTROL_ARM,
    NONE,
    Candidate,
    Search,
    SearchResult,
    make_candidates,
)
from runner.measure.benchmark.arms import Arm
from runner.measure.benchmark.parity_checker import ParityVerdict
from tests.measure.benchmark.simulated import World
from tests.runs import opened

HERE = ("tf32", "cuda_graphs", "channels_last", "pipeline")
EFFECTS = {"amp": 0.6, "whole_step": 0.8, "compile": 0.85, "attention": 0.9}
CONFIG = compose(["optimization=none"])


def candidates(without: Collection[str] = ()) -> list[Candidate]:
    return make_candidates({*HERE, *without})


NAMES = {one.name: one for one in candidates()}
SETUPS = {name: 13.0 if one.compiles else 3.0 for name, one in NAMES.items()}


def world(effects: Mapping[str, float] = EFFECTS, **more: Any) -> World:
    factors = {
        name: math.prod(effects.get(technique, 1.0) for technique in one.techniques)
        for name, one in NAMES.items()
    }
    usual: dict[str, Any] = {"factors": factors, "setups": {**SETUPS, NONE: 2.0, CONTROL_ARM: 2.0}}
    return World(**{"plain_ms": 100.0, "noise": 0.01, **usual, **more})


def judge(name: str) -> ParityVerdict:
    return ParityVerdict("explained by precision" if "amp" in name else "exact")


def searched(
    world: World,
    steps: int = 10_000,
    parity: Callable[[str], ParityVerdict] = judge,
    budget_s: float = 120.0,
    check: Any = None,
) -> SearchResult:
    space = candidates()
    arms = {name: Arm(name, CONFIG) for name in (NONE, CONTROL_ARM, *NAMES)}
    options = world.options(BenchmarkConfig(warmup_steps=5, block_s=0.2))
    check = check or (lambda arm, choices, within_s: parity(arm.name))
    step_s = world.plain_ms / 1e3
    result = Search(space, arms, options, check, steps, step_s, budget_s, world.seed).run()
    assert world.alive == set()  # nothing is left running
    assert world.most_alive <= CANDIDATES_PER_ROUND + 1
    assert all(row.why or row.state == "chosen" for row in result.tried)
    assert {row.state for row in result.tried} <= {"chosen", "ran up", "out", "not tried", "ended"}
    return result


@pytest.mark.parametrize("seed", range(2))
def test_the_search_is_within_five_percent_of_an_exhaustive_one(seed: int) -> None:
    draw = random.Random(seed)
    planted = world({name: draw.uniform(0.6, 1.15) for name in EFFECTS}, noise=0.02, seed=seed)
    result = searched(planted, steps=100_000, budget_s=300.0)
    best = min([1.0, *planted.factors.values()])
    assert planted.factors.get(result.chosen, 1.0) <= 1.05 * best


@pytest.mark.parametrize(("steps", "compiled"), [(400, False), (100_000, True)])
def test_compiling_is_chosen_only_for_a_run_that_is_long_enough(steps: int, compiled: bool) -> None:
    result = searched(world(), steps=steps, budget_s=300.0)
    assert ("whole_step" in result.techniques) is compiled
    assert "amp" in result.techniques


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("budget_s", [15.0, 120.0])
def test_a_search_takes_half_its_budget_more_at_most(seed: int, budget_s: float) -> None:
    draw = random.Random(seed)
    setups = {n: draw.uniform(7, 200) if one.compiles else 3.0 for n, one in NAMES.items()}
    planted = world(setups={**setups, NONE: 2.0, CONTROL_ARM: 2.0}, seed=seed)
    limits: list[float] = []

    def take_all(arm: Arm, choices: Any, within_s: float) -> ParityVerdict:
        limits.append(within_s)
        planted.now += min(within_s, 10.0)
        return judge(arm.name)

    result = searched(planted, int(20 * budget_s), budget_s=budget_s, check=take_all)
    assert result.seconds == pytest.approx(planted.now)
    measuring = 6 * (CANDIDATES_PER_ROUND + 1) * 0.3  # the fewest blocks of a round that was begun
    assert result.seconds < 1.5 * budget_s + measuring + 10.0 * sum(limit > 10 for limit in limits)


@pytest.mark.parametrize(("plain_ms", "budget_s"), [(450.0, 90.0), (150.0, 60.0), (13.0, 60.0)])
def test_a_slow_compiler_costs_no_gain_that_needs_none(plain_ms: float, budget_s: float) -> None:
    setups = {n: 90.0 if one.compiles else 3.0 for n, one in NAMES.items()}
    effects = {"fused_optimizer": 0.7, "compile": 0.5}
    planted = world(effects, setups={**setups, NONE: 2.0, CONTROL_ARM: 2.0}, plain_ms=plain_ms)
    result = searched(planted, steps=10**6, budget_s=budget_s)
    assert "fused_optimizer" in result.techniques
    assert result.seconds < 1.5 * budget_s


def test_a_budget_too_small_for_any_candidate_leaves_none_and_says_so() -> None:
    result = searched(planted := world(), budget_s=5.0)
    assert planted.started == [] and result.chosen == NONE
    assert all("no time left of optimization.auto.budget_s=5" in row.why for row in result.tried)
    assert f"({len(NAMES)} of {len(NAMES)} candidates were not tried)" in result.reason
    slow = world(setups=dict.fromkeys((NONE, CONTROL_ARM, *NAMES), 7.0))  # `none` alone fits in
    assert searched(slow, budget_s=10.0).chosen == NONE


@pytest.mark.parametrize(
    "verdict", [ParityVerdict("FAIL", "a wrong mask"), ParityVerdict(None, "x")]
)
def test_a_candidate_that_is_not_known_to_be_right_is_never_chosen(verdict: ParityVerdict) -> None:
    def fail_whole_step(name: str) -> ParityVerdict:
        return verdict if "whole_step" in name else judge(name)

    result = searched(world(), parity=fail_whole_step, budget_s=300.0)
    assert "whole_step" not in result.techniques
    assert "amp" in result.techniques  # the others are not lost by it
    wrong = [row for row in result.tried if row.parity_reason == verdict.reason]
    assert wrong
    assert all(row.state == "out" and verdict.reason in row.why for row in wrong)
    assert searched(world(), parity=lambda name: verdict).chosen == NONE


@pytest.mark.parametrize(("seed", "noise"), [(0, 0.02), (1, 0.1)])
def test_where_nothing_is_faster_it_stays_at_none(seed: int, noise: float) -> None:
    result = searched(world({}, setups=dict.fromkeys(NAMES, 3.0), noise=noise, seed=seed))
    assert result.chosen == NONE and "no candidate was faster than none" in result.reason


def test_a_candidate_no_faster_than_the_control_is_not_chosen() -> None:
    lucky = {name: 0.95 for name in [*NAMES, CONTROL_ARM]}  # by where its memory lies, say
    setups = dict.fromkeys(NAMES, 3.0)
    assert searched(world(factors=lucky, setups=setups, noise=0.005)).chosen == NONE
    barely = dict.fromkeys(NAMES, 0.92) | {CONTROL_ARM: 0.95}  # than the control, within its noise
    assert searched(world(factors=barely, setups=setups, noise=0.005)).chosen == NONE
    assert searched(world(factors=dict.fromkeys(NAMES, 1.2))).chosen == NONE


def test_a_candidate_that_ends_costs_itself_alone() -> None:
    ended = {name: ("oom", "no memory") for name in NAMES if "whole_step" in name}
    result = searched(world(refuses=ended))
    assert "amp" in result.techniques
    assert any(row.why == "oom: no memory" for row in result.tried)
    assert all(row.state == "ended" for row in result.tried if row.why == "oom: no memory")
    with pytest.raises(WorkerFailure, match="a bug"):
        searched(world(refuses={NONE: ("failed", "a bug")}))


def test_candidates_are_few_and_leave_out_what_can_do_nothing() -> None:
    assert 8 < len(make_candidates(())) <= 16
    bare = candidates(without=("amp", "compile", "whole_step", "attention"))
    assert [one.name for one in bare] == ["system fused_optimizer"]
    assert not any("amp" in one.techniques for one in candidates(without=["amp"]))


FREE = ["system", "fused_optimizer"]
AUTO = ("optimization=auto", "training.steps=5", "device=cpu")


def plainest(**outcome: object) -> list[Candidate]:
    row = Candidate(" ".join(FREE), FREE)
    for name, value in outcome.items():
        setattr(row, name, value)
    return [row]


def selected(
    result: SearchResult, monkeypatch: pytest.MonkeyPatch, *typed: str
) -> tuple[set[str], str]:
    """The techniques that are on, and the reason, after a search with this result."""
    monkeypatch.setattr(resolve, "_select", lambda config, given: result)
    given = resolve.resolve_auto(compose([*AUTO, *typed]))
    assert given.optimization is not None
    enabled = {name for name, one in given.optimization.techniques() if one.enabled}
    return enabled, given.chosen[0].reason


def test_an_undecided_search_keeps_the_techniques_of_basic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened("optimization=basic", "training.steps=5") as run:
        basic = {row.name for row in run.unapplied_techniques if row.requested}
        basic |= {name for name, _ in run.techniques}
    tried = plainest(final_interval=(0.97, 1.04))
    undecided = SearchResult(reason="no candidate was faster", tried=tried)
    enabled, reason = selected(undecided, monkeypatch)
    assert enabled == basic == set(FREE)
    assert reason == "no candidate was faster; undecided, so the techniques of basic are kept"


def test_a_failed_measurement_keeps_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise WorkerFailure("failed", "it does not start")

    monkeypatch.setattr(resolve, "estimate_run", fail)
    given = resolve.resolve_auto(compose([*AUTO]))
    assert given.optimization is not None
    assert {name for name, one in given.optimization.techniques() if one.enabled} == set(FREE)


@pytest.mark.parametrize(
    ("outcome", "typed", "kept"),
    [
        ({"final_interval": (0.80, 0.95)}, [], set()),  # certainly slower
        ({"parity": "FAIL"}, [], set()),
        ({}, ["optimization.auto.without=[system]"], {"fused_optimizer"}),
        ({}, ["optimization.auto.without=[system,fused_optimizer]"], set()),
    ],
)
def test_what_is_refuted_or_excluded_is_not_kept(
    outcome: dict[str, object], typed: list[str], kept: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    enabled, _ = selected(SearchResult(tried=plainest(**outcome)), monkeypatch, *typed)
    assert enabled == kept


def test_a_selection_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = SearchResult("amp", ["amp"], "1.3 times as fast", tried=plainest())
    assert selected(chosen, monkeypatch)[0] == {"amp"}
    assert NONE == "none"
