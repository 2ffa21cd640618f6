import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from runner.core.errors import WorkerFailure
from runner.measure.benchmark.blocks import Measurements, StoppingRule, Turn, run_blocks
from tests.measure.benchmark.simulated_machine import (
    BASE,
    EFFECTS,
    NOISES,
    PROCESSES,
    Machine,
    Noise,
    coverage,
)

TWO_MINUTES = StoppingRule(target_half_width=0.02, budget_s=120)
ENDLESS = StoppingRule(target_half_width=1e-9, budget_s=math.inf)


def run(
    machine: Machine,
    rule: StoppingRule,
    turn: Callable[[str, float], Turn] | None = None,
    watch: Callable[[Measurements], None] | None = None,
    seed: int = 0,
) -> Measurements:
    names = list(machine.effects)
    return run_blocks(turn or machine.turn, names, BASE, rule, 0.25, seed, machine.clock, watch)


def ending(
    machine: Machine, ends: Mapping[str, int], error: type[BaseException] = WorkerFailure
) -> Callable[[str, float], Turn]:
    """Turns of a machine on which an arm can make so many, and no more."""

    def turn(name: str, seconds: float) -> Turn:
        if machine.order.count(name) >= ends.get(name, 10**9):
            raise error("oom", "no memory") if error is WorkerFailure else error
        return machine.turn(name, seconds)

    return turn


HEAVY = "heavy-tailed 2 %"


@pytest.mark.parametrize(
    ("noise", "narrow", "runs"),
    [
        (HEAVY, 0.02, 200),
        *(pytest.param(n, w, 1000, marks=pytest.mark.slow) for n in NOISES for w in (0.01, 0.05)),
    ],
)
def test_intervals_hold_through_the_stopping_rule(noise: str, narrow: float, runs: int) -> None:
    covered, _ = coverage(NOISES[noise], StoppingRule(narrow, 120), runs)
    assert min(covered.values()) >= 0.94, covered


@pytest.mark.slow
def test_blocks_that_resemble_the_ones_before_make_intervals_wider_and_take_more() -> None:
    """0.5 from turn to turn: intervals that take blocks for independent would hold in 91 %."""
    covered, more = coverage(Noise(0.02, stalls=0.0, memory=0.5), TWO_MINUTES, runs=150)
    assert min(covered.values()) >= 0.94, covered
    _, blocks = coverage(Noise(0.02, stalls=0.0), TWO_MINUTES, runs=40)
    assert more > 1.3 * blocks


TWO = "2 % from process to process"
OVER_PROCESSES = [(name, processes, 1000, 0.935) for name in PROCESSES for processes in (3, 5, 8)]


@pytest.mark.parametrize(
    ("noise", "processes", "count", "least"),
    [
        (TWO, 5, 150, 0.91),  # 0.95, two standard errors below
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OVER_PROCESSES),
    ],
)
def test_intervals_over_processes_hold_where_these_differ(
    noise: str, processes: int, count: int, least: float
) -> None:
    """Of one process each, they hold in 52 % at 2 %."""
    covered, _ = coverage(PROCESSES[noise], replace(TWO_MINUTES, processes=processes), count)
    assert min(covered.values()) >= least, covered


def launched(
    restart_s: float, budget_s: float = 60.0, ends: Mapping[str, int] | None = None
) -> tuple[Measurements, list[float]]:
    """Five processes of each arm, if starting all of them takes so long; and when they started."""
    machine, starts = Machine(Noise(0.01), EFFECTS, 0), list[float]()

    def relaunch(names: Sequence[str], within_s: float) -> dict[str, WorkerFailure]:
        starts.append(machine.now)
        machine.now += min(restart_s, within_s)
        if restart_s > within_s:
            raise TimeoutError
        machine.start(names)
        return {n: WorkerFailure("oom", "x") for n, at in (ends or {}).items() if at == len(starts)}

    rule = StoppingRule(0.001, budget_s, 5, restart_s=min(restart_s, 10.0))
    how = (0.25, 0, machine.clock, None, relaunch)
    return run_blocks(machine.turn, list(EFFECTS), BASE, rule, *how), starts


def test_all_arms_start_again_within_the_budget_for_as_many_blocks_each_time() -> None:
    measured, _ = launched(5.0)
    first = measured.launch_starts[1]
    assert first >= 3 and len(measured.launch_starts) == 5
    ends = [*measured.launch_starts[1:], measured.blocks]
    assert all(3 <= b - a <= first for a, b in zip(measured.launch_starts, ends, strict=True))
    assert all(len(turns) == measured.blocks for turns in measured.turns.values())
    assert measured.seconds <= 60 + 3 * 1.1  # a launch has three blocks in any case
    assert {one.processes for one in measured.estimates.values()} == {5}
    dear, starts = launched(20.0, 45.0)  # at first said to take 10 s
    assert dear.processes == 2 and dear.seconds <= 45 + 3 * 1.1 and len(starts) == 1
    late, starts = launched(55.0)
    assert late.processes == 1 and late.seconds <= 60 + 3 * 1.1 and len(starts) == 1
    assert late.stop_reason == "the budget of 60 s is spent"
    short, starts = launched(10.0, 15.0)
    assert (short.processes, starts) == (1, [])


def test_an_arm_that_does_not_start_again_is_estimated_from_the_processes_it_had() -> None:
    measured, _ = launched(3.0, ends={"small": 3})
    assert len(measured.turns["small"]) == measured.launch_starts[3] < measured.blocks
    assert measured.failures["small"].status == "oom"
    assert measured.estimates["small"].processes == 3
    assert measured.estimates["large"].processes == 5
    assert math.isfinite(measured.estimates["small"].half_width)


def test_every_arm_has_a_turn_in_every_block_in_an_order_drawn_by_lot() -> None:
    machine = Machine(Noise(), EFFECTS, 0)
    run(machine, replace(ENDLESS, interim_blocks=(20,)))
    blocks = [tuple(machine.order[i : i + 4]) for i in range(0, 80, 4)]
    assert len(machine.order) == 80
    assert all(sorted(block) == sorted(EFFECTS) for block in blocks)
    assert len(set(blocks)) > 10
    again, other = Machine(Noise(), EFFECTS, 0), Machine(Noise(), EFFECTS, 0)
    run(again, replace(ENDLESS, interim_blocks=(20,)))
    run(other, replace(ENDLESS, interim_blocks=(20,)), seed=1)
    assert again.order == machine.order != other.order


def test_looks_come_at_the_blocks_that_were_fixed_and_the_plan_ends() -> None:
    looks: list[int] = []
    rule = replace(ENDLESS, interim_blocks=(8, 12, 16))
    measured = run(Machine(Noise(), EFFECTS, 0), rule, None, lambda m: looks.append(m.blocks))
    assert looks == [8, 12, 16]
    assert measured.stop_reason == "all 16 planned blocks are measured"


def test_the_budget_ends_it_but_for_six_blocks_and_the_last_look_spends_what_is_left() -> None:
    measured = run(Machine(Noise(0.05), EFFECTS, 0), StoppingRule(1e-9, 13))
    assert measured.stop_reason == "the budget of 13 s is spent"
    assert 8 < measured.blocks < 16 and 13 <= measured.seconds < 14.5
    assert measured.alphas["large"] > 0.02  # a look in between may spend less than 0.01
    measured = run(Machine(Noise(), EFFECTS, 0), StoppingRule(0.02, 1))
    assert measured.blocks == 6 and "too small for the 6 blocks" in measured.stop_reason
    assert math.isfinite(measured.estimates["large"].half_width)


@pytest.mark.parametrize("budget_s", [0.1, 1, 13])
def test_a_budget_that_must_not_be_overdrawn_ends_within_a_turn_and_with_whole_blocks(
    budget_s: float,
) -> None:
    measured = run(Machine(Noise(), EFFECTS, 0), StoppingRule(1e-9, budget_s, overdraws=False))
    assert budget_s <= measured.seconds < budget_s + 0.6
    assert {len(turns) for turns in measured.turns.values()} == {measured.blocks}
    assert measured.stop_reason.startswith(f"the budget of {budget_s:g} s")
    enough = measured.blocks >= 6
    assert all(math.isfinite(x.half_width) == enough for x in measured.estimates.values())


def test_an_arm_that_ends_is_out_and_the_others_go_on() -> None:
    machine = Machine(Noise(0.01), EFFECTS, 0)
    measured = run(machine, replace(ENDLESS, interim_blocks=(8, 12)), ending(machine, {"small": 7}))
    assert measured.failures["small"].status == "oom"
    counts = {name: len(turns) for name, turns in measured.turns.items()}
    assert counts == {BASE: 12, "control": 12, "small": 7, "large": 12}
    assert measured.stop_reason == "all 12 planned blocks are measured"
    assert measured.estimates["small"].ratio == pytest.approx(1.02, rel=0.05)
    assert math.isfinite(measured.estimates["small"].half_width)


@pytest.mark.parametrize("ends", [{BASE: 2, "other": 4}, {BASE: 0, "other": 0}])
def test_when_all_arms_end_it_ends(ends: dict[str, int]) -> None:
    machine = Machine(Noise(), {BASE: 1.0, "other": 1.0}, 0)
    measured = run(machine, TWO_MINUTES, ending(machine, ends))
    assert measured.stop_reason == "every arm ended early"
    assert set(measured.failures) == {BASE, "other"}
