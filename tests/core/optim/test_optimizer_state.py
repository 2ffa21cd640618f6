"""A saved optimizer state is checked before it is loaded: names, shapes, dtypes."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from runner.core.optim.optimizer import build_optimizer
from runner.core.optim.optimizer_state import Optimizer, check_optimizer_state, compatible_state
from runner.core.optim.optimizer_step import OptimizerStep
from runner.core.schemas.optimizer import OptimizerConfig
from runner.core.schemas.stability import StabilityConfig

from .steps import OPTIMIZERS, assert_same, take_step

Change = Callable[[dict[int, dict[str, Any]]], object]


def weights() -> list[nn.Parameter]:
    """One that is scalar, one of a size of 1, and one that never gets a gradient."""
    torch.manual_seed(1)
    shapes = [(), (3,), (1, 4), (2, 3, 2, 2), (5,)]
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def updated(name: str, times: int = 2, **options: Any) -> tuple[Optimizer, list[nn.Parameter]]:
    ours = weights()
    optimizer = getattr(torch.optim, name)(ours, **options)
    for step in range(times):
        another(optimizer, ours, step)
    return optimizer, ours


def another(optimizer: Optimizer, ours: list[nn.Parameter], step: int) -> None:
    for weight in ours[:-1]:
        weight.grad = torch.full_like(weight, 0.1 * (step + 1))
    optimizer.step()


@pytest.mark.parametrize(
    ("name", "options", "how"),
    [
        *[case for case in OPTIMIZERS if case[0] != "Muon"],  # it takes matrices alone
        ("Adagrad", {"lr_decay": 0.1}, {}),
        ("ASGD", {"capturable": False}, {}),
    ],
)
def test_what_an_optimizer_keeps_fits_it_whole(name: str, options: Any, how: Any) -> None:
    optimizer, _ = updated(name, **options, **how)
    saved = deepcopy(optimizer.state_dict())
    fitted = compatible_state(optimizer, saved)
    assert fitted["param_groups"] == saved["param_groups"]
    assert fitted["state"].keys() == {key for key, state in saved["state"].items() if state}
    for key, state in fitted["state"].items():
        assert state.keys() == saved["state"][key].keys()
        assert_same(state, {name: saved["state"][key][name] for name in state})
    check_optimizer_state(optimizer)


SWITCHED: list[tuple[str, dict[str, Any], dict[str, Any], set[str]]] = [
    ("SGD", {}, {"momentum": 0.9}, set()),
    ("SGD", {"momentum": 0.9}, {}, set()),
    ("SGD", {"momentum": 0.9}, {"momentum": 0.5}, {"momentum_buffer"}),
    ("AdamW", {"amsgrad": True}, {}, {"step", "exp_avg", "exp_avg_sq"}),
    ("RMSprop", {"momentum": 0.9}, {"fused": None}, {"step", "square_avg"}),
    ("AdamW", {"fused": True}, {"foreach": True}, {"step", "exp_avg", "exp_avg_sq"}),
]


@pytest.mark.parametrize(("name", "before", "then", "kept"), SWITCHED)
def test_an_option_may_be_switched_off_and_what_is_made_when_missed_on(
    name: str, before: dict[str, Any], then: dict[str, Any], kept: set[str]
) -> None:
    saved = updated(name, **before)[0].state_dict()
    then = {key: value for key, value in then.items() if value is not None}
    optimizer, ours = updated(name, 0, **then)
    state = compatible_state(optimizer, saved)["state"]
    assert {key for one in state.values() for key in one} == kept
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    another(optimizer, ours, 3)
    assert all(weight.isfinite().all() for weight in ours)


def put(name: str, value: Any) -> Change:
    return lambda state: state[1].update({name: value})


def by_text(state: dict[Any, Any]) -> None:
    for number in list(state):
        state[str(number)] = state.pop(number)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("RMSprop", lambda state: state[1].pop("square_avg"), "square_avg is missing"),
        ("AdamW", lambda state: state[1].pop("step"), "step is missing"),
        ("AdamW", put("exp_avg", None), "exp_avg is missing"),
        ("AdamW", put("exp_avg", torch.zeros(1)), r"exp_avg must have its weight's shape, \[3\]"),
        ("AdamW", put("exp_avg", torch.zeros(3).to_sparse()), "exp_avg is not a dense tensor"),
        ("AdamW", put("exp_avg", torch.zeros(3, dtype=torch.int8)), "exp_avg is of torch.int8"),
        ("AdamW", put("step", "2"), "step is not a dense tensor"),
        ("AdamW", put("step", torch.tensor(float("nan"))), "step must be one number ≥ 0"),
        ("AdamW", by_text, "keyed by parameter numbers"),
        ("AdamW", lambda state: state.update({1: [1, 2]}), "the state of a weight is a list"),
        ("AdamW", lambda state: state.update({99: {}}), "keyed by parameter numbers"),
    ],
)
def test_what_no_update_leaves_is_refused_by_name(name: str, change: Change, message: str) -> None:
    optimizer, _ = updated(name)
    saved = deepcopy(optimizer.state_dict())
    change(saved["state"])
    with pytest.raises(ValueError, match=message):
        compatible_state(optimizer, saved)


def test_moments_of_a_class_made_from_torchs_have_their_weights_shape() -> None:
    class Own(torch.optim.AdamW):
        pass

    weight = nn.Parameter(torch.ones(30, 30))
    optimizer = Own([weight], fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    saved = optimizer.state_dict()
    assert compatible_state(optimizer, saved)["state"].keys() == {0}
    saved["state"][0] |= {"exp_avg": torch.ones(1, 1), "mine": torch.ones(3)}
    with pytest.raises(ValueError, match="exp_avg must have its weight's shape"):
        compatible_state(optimizer, saved)
    optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match="exp_avg must have its weight's shape"):
        check_optimizer_state(optimizer)


def stepped(momentum: float, fused: bool, state: dict[str, Any] | None) -> OptimizerStep:
    torch.manual_seed(0)
    net, how = nn.Linear(3, 2), {"fused": fused}
    config = OptimizerConfig("SGD", 0.1, 0.0, {"momentum": momentum})
    sgd = build_optimizer(config, torch.optim.SGD, net, how)
    update = OptimizerStep(net, sgd, StabilityConfig(), 0.1, [1.0], ema=0.5)
    if state is not None:
        update.load(state)
    for _ in range(3):
        take_step(update, lambda: net(torch.ones(4, 3)).square().mean())
    return update


@pytest.mark.parametrize("part", [True, False])
def test_momentum_switched_on_is_the_same_fused_and_not(part: bool) -> None:
    plain = deepcopy(stepped(0.9 if part else 0.0, True, None).state())
    if part:  # a weight that had no update yet
        del plain["optimizer"]["state"][0]
    one, other = (stepped(0.9, fused, deepcopy(plain)) for fused in (True, False))
    for a, b in zip(one.parameters, other.parameters, strict=True):
        torch.testing.assert_close(a, b)


def test_averages_of_another_shape_are_refused_before_anything_is_loaded() -> None:
    update = stepped(0.9, True, None)
    state = deepcopy(update.state())
    before = deepcopy(update.optimizer.state_dict()["state"])
    state["average"] = [torch.zeros(1) for _ in state["average"]]
    with pytest.raises(ValueError, match="an average must have its weight's shape"):
        update.load(state)
    assert_same(update.optimizer.state_dict()["state"], before)
