"""`optimization=auto`: what is chosen and what must never be, with workers of planted times."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection
from itertools import product

import pytest

from runner.benchmark.auto.candidates import NONE, Candidate, SearchResult, make_candidates
from runner.benchmark.auto.search import ALIVE, Search
from runner.benchmark.auto.select import select
from runner.benchmark.blocks import ArmEnded
from runner.benchmark.parity_checker import ParityVerdict
from tests.benchmark.planted import PlantedPool

HERE = {name: "not here" for name in ("tf32", "cuda_graphs", "channels_last", "pipeline")}
EFFECTS = {"amp": 0.6, "whole_step": 0.8, "compile": 0.85, "attention": 0.9}
COMPILING_S = 12.0


def candidates(memory: bool = False, without: Collection[str] = ()) -> list[Candidate]:
    return make_candidates({**HERE, **dict.fromkeys(without, "no")}, [], memory)


NAMES = {one.name: one for one in candidates()}


def factors(effects: dict[str, float] = EFFECTS, memory: bool = False) -> dict[str, float]:
    return {
        one.name: math.prod(effects.get(name, 1.0) for name in one.techniques)
        for one in candidates(memory)
    }


SETUPS = {name: COMPILING_S if one.compiles else 1.0 for name, one in NAMES.items()}


def right(name: str) -> ParityVerdict:
    return ParityVerdict("explained by precision" if "amp" in name else "exact")


def searched(
    workers: PlantedPool,
    steps: int = 10_000,
    parity: Callable[[str], ParityVerdict] = right,
    budget_s: float = 120.0,
    space: list[Candidate] | None = None,
    limit_bytes: float | None = None,
) -> SearchResult:
    space = candidates() if space is None else space
    search = Search(
        space, workers, steps, budget_s, 0.2, workers.clock, lambda line: None, workers.seed
    )
    found = select(search, lambda name, within_s: parity(name), limit_bytes)
    assert workers.alive == set()  # nothing is left running
    assert workers.most_alive <= ALIVE
    assert all(row.why or row.state == "chosen" for row in found.tried)
    assert {row.state for row in found.tried} <= {"chosen", "ran up", "out", "not tried", "ended"}
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_what_an_exhaustive_one_would_to_within_five_percent(seed: int) -> None:
    draw = random.Random(seed)
    planted = factors({name: draw.uniform(0.6, 1.15) for name in EFFECTS})
    workers = PlantedPool(planted, setups=SETUPS, noise=0.02, seed=seed)
    found = searched(workers, steps=100_000, budget_s=300.0)
    best = min([1.0, *planted.values()])
    assert planted.get(found.chosen, 1.0) <= 1.05 * best


@pytest.mark.parametrize(("steps", "compiled"), [(600, False), (100_000, True)])
def test_compiling_is_chosen_only_for_a_run_that_is_long_enough(steps: int, compiled: bool) -> None:
    workers = PlantedPool(factors(), setups=SETUPS, none_ms=100.0)
    found = searched(workers, steps=steps, budget_s=300.0)
    assert ("whole_step" in found.techniques) is compiled
    assert "amp" in found.techniques


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("budget_s", [15.0, 120.0])
def test_a_search_takes_half_its_budget_more_at_most(seed: int, budget_s: float) -> None:
    draw = random.Random(seed)
    setup = {n: draw.uniform(5, 200) if one.compiles else 1.0 for n, one in NAMES.items()}
    workers = PlantedPool(factors(), setups=setup, seed=seed)
    limits: list[float] = []

    def take_all(name: str, within_s: float) -> ParityVerdict:
        limits.append(within_s)
        workers.now += min(within_s, 10.0)
        return right(name)

    search = Search(
        candidates(), workers, int(20 * budget_s), budget_s, 0.2, workers.clock, lambda line: None
    )
    found = select(search, take_all)
    assert found.seconds == pytest.approx(workers.now)
    assert found.seconds < 1.5 * budget_s + 10.0 * sum(limit > 10 for limit in limits)


def test_where_the_budget_is_too_small_for_any_candidate_only_none_is_started() -> None:
    workers = PlantedPool(factors(), setups=SETUPS)
    found = searched(workers, budget_s=10.0)
    assert workers.started == [NONE]
    assert all("left of optimization.auto.budget_s=10" in row.why for row in found.tried)
    assert f"({len(NAMES)} of {len(NAMES)} candidates were not tried)" in found.reason


def test_what_computes_something_else_is_never_chosen_however_fast() -> None:
    def parity(name: str) -> ParityVerdict:
        return ParityVerdict("FAIL", "a wrong mask") if "whole_step" in name else right(name)

    found = searched(PlantedPool(factors(), setups=SETUPS), parity=parity)
    assert "whole_step" not in found.techniques
    assert "amp" in found.techniques  # the others are not lost by it
    wrong = [row for row in found.tried if row.parity == "FAIL"]
    assert wrong
    assert all(row.state == "out" and "a wrong mask" in row.why for row in wrong)


@pytest.mark.parametrize("verdict", [ParityVerdict("FAIL", "wrong"), ParityVerdict(None, "killed")])
def test_what_is_not_known_to_be_right_is_not_chosen(verdict: ParityVerdict) -> None:
    assert searched(PlantedPool(factors()), parity=lambda name: verdict).chosen == NONE


def test_a_candidate_beyond_the_memory_budget_is_out() -> None:
    peaks = {name: 3 * 10**9 for name in NAMES if "amp" in name}
    workers = PlantedPool(factors(), setups=SETUPS, peaks=peaks)
    found = searched(workers, limit_bytes=2e9)
    assert found.techniques
    assert "amp" not in found.techniques
    over = [row for row in found.tried if (row.peak_bytes or 0) > 2e9]
    assert over
    assert all("memory_budget_mb" in row.why for row in over)


def test_where_none_itself_holds_too_much_what_fits_is_chosen_though_it_is_slower() -> None:
    space = candidates(memory=True, without=("compile", "whole_step", "amp", "attention"))
    planted = factors({"recompute": 1.3}, memory=True)
    peaks = {name: 10**9 if "recompute" in name else 3 * 10**9 for name in [NONE, *planted]}
    found = searched(PlantedPool(planted, peaks=peaks), space=space, limit_bytes=2e9)
    assert "recompute" in found.techniques


@pytest.mark.parametrize(("seed", "noise"), list(product(range(3), (0.02, 0.1))))
def test_where_nothing_is_faster_it_stays_at_none(seed: int, noise: float) -> None:
    workers = PlantedPool({}, setups=dict.fromkeys(NAMES, 1.0), noise=noise, seed=seed)
    assert searched(workers).chosen == NONE


def test_what_is_slower_or_no_faster_than_the_control_is_not_chosen() -> None:
    lucky = {name: 0.95 for name in [*NAMES, "none again"]}  # by where its memory lies, say
    workers = PlantedPool(lucky, setups=dict.fromkeys(NAMES, 1.0), noise=0.005)
    assert searched(workers).chosen == NONE
    assert searched(PlantedPool(dict.fromkeys(NAMES, 1.2), setups=SETUPS)).chosen == NONE


def test_a_candidate_that_ends_costs_itself_alone() -> None:
    ended = {name: ArmEnded("oom", "no memory") for name in NAMES if "whole_step" in name}
    found = searched(PlantedPool(factors(), setups=SETUPS, ended=ended))
    assert "amp" in found.techniques
    assert any(row.why == "oom: no memory" for row in found.tried)
    assert all(row.state == "ended" for row in found.tried if row.why == "oom: no memory")
    with pytest.raises(ArmEnded, match="a bug"):
        searched(PlantedPool({}, ended={NONE: ArmEnded("failed", "a bug")}))


def test_candidates_are_few_and_leave_out_what_can_do_nothing() -> None:
    everything = make_candidates({}, [], memory=True)
    assert 8 < len(everything) <= 16
    assert not any({"recompute", "whole_step"} <= set(one.techniques) for one in everything)
    bare = candidates(without=("amp", "compile", "whole_step", "attention"))
    assert [one.name for one in bare] == ["system fused_optimizer"]
    assert not any("amp" in one.techniques for one in make_candidates(HERE, ["amp"], False))
