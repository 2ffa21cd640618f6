"""What is compared with what: the parts of the verdict, with numbers made by hand."""

import math

import pytest
import torch
from torch import Tensor

from runner.core.optim.schedule import lr_factors
from runner.core.schemas.optimizer import ScheduleConfig, ScheduleKind
from runner.measure.parity.distance import (
    KINK_ERROR,
    Distances,
    ErrorKind,
    TensorKey,
    Tolerance,
    compare_steps,
    is_equal,
    judge_tensors,
)
from runner.measure.parity.trajectory import StepRecord, TrajectoryState, first_update

STEPS = 40
GRADIENT, LOSS = TensorKey(ErrorKind.gradient, "w"), TensorKey(ErrorKind.loss, "loss")


def series(key: TensorKey, errors: list[float]) -> Distances:
    """A tensor of norm 1 that is off by so much at each step."""
    found = Distances()
    for error in errors:
        found.add(key, torch.tensor([1.0, error]), torch.tensor([1.0, 0.0]), floor=0.0)
    return found


def beyond(key: TensorKey, errors: list[float], plain: float = 1e-7) -> list[int]:
    """The step that is called wrong, where one is."""
    tolerance = Tolerance(series(key, [plain] * len(errors)), 64.0)
    return [
        one.step for one in judge_tensors(series(key, errors), tolerance) if one.error > one.bound
    ]


def test_the_kink_of_an_activation_is_forgiven_at_some_steps_and_a_small_fault_is_not() -> None:
    few, many = STEPS // 5, STEPS // 5 + 1
    small, large = KINK_ERROR / 2, KINK_ERROR * 2
    assert beyond(GRADIENT, [small] * few + [1e-7] * (STEPS - few)) == []
    assert beyond(GRADIENT, [1e-7] * (STEPS - many) + [small] * many) == [STEPS - many + 1]
    assert beyond(GRADIENT, [1e-7] * (STEPS - 1) + [large]) == [STEPS]
    assert beyond(LOSS, [1e-7] * (STEPS - 1) + [1e-4]) == [STEPS]  # which has no kink


def record(gradients: dict[str, Tensor], **buffers: Tensor) -> StepRecord:
    return StepRecord(torch.ones(()), torch.ones(()), gradients, TrajectoryState({}, buffers, {}))


def test_a_count_has_to_be_the_same() -> None:
    one, two = (record({}, seen=torch.tensor(n)) for n in (1, 2))
    key = TensorKey(ErrorKind.buffer, "seen")
    for ours, error in ((two, math.inf), (one, 0.0)):
        (step,) = compare_steps([ours], [one], [TrajectoryState({}, {}, {})]).steps[key]
        assert step.error == error


def test_a_tensor_without_a_gradient_in_some_steps_has_a_gradient_of_zero_there() -> None:
    one = torch.ones(2)
    start, key = TrajectoryState({"w": one}, {}, {}), TensorKey(ErrorKind.gradient, "w")
    ours = [record({"v": one}), record({"w": one, "v": one}), record({"v": one})]
    truth = [record({"v": one}), record({"w": one, "v": one}), record({"w": one, "v": one})]
    starts = [TrajectoryState(start.parameters | {"v": one}, {}, {})] * 3
    assert [step.error for step in compare_steps(ours, truth, starts).steps[key]] == [
        *(0.0, 0.0, math.sqrt(2)),
    ]


def test_the_imaginary_part_of_a_complex_tensor_is_compared() -> None:
    ours, truth = torch.tensor([1 + 1j]), torch.tensor([1 + 3j])
    found = Distances()
    found.add(GRADIENT, ours, truth)
    found.add_change(GRADIENT, ours, truth, torch.tensor([1 + 0j]))
    assert [step.error for step in found.steps[GRADIENT]] == [2.0, 2.0]
    assert [step.floor > 0 for step in found.steps[GRADIENT]] == [True, True]


def test_an_error_where_the_reference_is_zero_widens_no_other_bound() -> None:
    plain, wrong = Distances(), Distances()
    for truth in (torch.zeros(2), torch.ones(2)):
        plain.add(GRADIENT, truth + 1e-7, truth, floor=0.0)
        wrong.add(GRADIENT, truth + (0.5 if truth.any() else 1e-7), truth, floor=0.0)
    (judged,) = judge_tensors(wrong, Tolerance(plain, 64.0))
    assert judged.step == 2 and judged.error > judged.bound and math.isfinite(judged.bound)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_value_exceeds_the_distance_unless_the_reference_has_it_too(
    bad: float,
) -> None:
    good, broken = torch.ones(3), torch.tensor([1.0, bad, 1.0])
    tolerance = Tolerance(series(GRADIENT, [1.0]), 1.0)
    for truth, wrong in ((good, True), (broken.double(), False)):
        found = Distances()
        found.add(GRADIENT, broken, truth)
        (judged,) = judge_tensors(found, tolerance)
        assert (not judged.error <= judged.bound) is wrong
    assert is_equal(broken, broken.clone())


@pytest.mark.parametrize(
    ("kind", "warmup", "first"),
    [("constant", 0.0, 0), ("constant", 100.0, 100), ("linear", 0.1, 100), ("step", 0.0, 291)],
)
def test_the_steps_are_after_the_warm_up_and_where_the_rate_changes_most(
    kind: str, warmup: float, first: int
) -> None:
    assert (
        first_update(lr_factors(ScheduleConfig(ScheduleKind(kind), warmup), 1000), STEPS) == first
    )
