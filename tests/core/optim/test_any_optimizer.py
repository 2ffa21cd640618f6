"""Clip, skip, average and schedule do the same at every level, whoever wrote the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from runner import build, train
from runner.core.config.run_config import RunConfig
from runner.core.train.step import make_step
from runner.loops.guarded_optimizer import train_step
from tests import runs

from .my_training import Net
from .steps import assert_same

TORCHS = (
    "AdamW Adam SGD Adagrad RMSprop Rprop NAdam RAdam Adamax Adadelta ASGD Adafactor Muon "
    "SparseAdam"
).split()
OWN = ["SignedAdamW", "ShrunkSGD", "PlainInit", "FromScratch"]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in TORCHS},
    "SGD momentum": {"name": "SGD", "options": {"momentum": 0.9, "nesterov": True}},
    "SGD dampening": {"name": "SGD", "options": {"momentum": 0.9, "dampening": 0.5}},
    **{name: {"_target_": f"my_training.{name}"} for name in OWN},
    "transformers": {
        "_target_": "transformers.optimization.Adafactor",
        "options": {"relative_step": False, "scale_parameter": False},
    },
}
EAGER = ["optimization.compile.enabled=false", "optimization.whole_step.enabled=false"]
LEVELS = {
    "none": [],
    "basic": [],
    "ultra": EAGER,
    "compiled": ["optimization.whole_step.cpp_wrapper=false"],
}
COMPILED = ["AdamW", "SGD momentum", "Adagrad", "NAdam", "SignedAdamW", "ShrunkSGD"]
SLOW = [pytest.mark.slow]
COMPILING = [*SLOW, runs.needs_compiler]
FAST = {*OWN, "AdamW", "RAdam", "SGD momentum", "SparseAdam", "transformers"}
CASES = [
    *[pytest.param("basic", name, marks=() if name in FAST else SLOW) for name in OPTIMIZERS],
    *[pytest.param("ultra", name, marks=SLOW) for name in OPTIMIZERS],
    *[pytest.param("compiled", name, marks=COMPILING) for name in COMPILED],
]
pytestmark = pytest.mark.usefixtures("importable")


def config(name: str, level: str, lr: float = 0.02, **stability: Any) -> RunConfig:
    if name == "transformers":
        pytest.importorskip("transformers")
    base = runs.config(
        *["device.threads=1", f"optimization={'ultra' if level == 'compiled' else level}"],
        *["data._target_=my_training.Rows", "security.trusted=[my_training,transformers]"],
        f"model._target_=my_training.{'Bag' if name == 'SparseAdam' else 'Net'}",
        *["checks.inputs.enabled=false", "checks.model.enabled=false", "optimizer.ema=0.9"],
        *["schedule=cosine", "training.batch_size=16", "training.steps=20"],
        *["training.validate_every=1000", *LEVELS[level], "optimization.measure=false"],
    )
    optimizer = replace(base.optimizer, lr=lr, weight_decay=0.0, **OPTIMIZERS[name])
    return replace(base, optimizer=optimizer, stability=replace(base.stability, **stability))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("level", "name"), CASES)
def test_a_skipped_step_is_bit_equal_to_a_batch_never_seen(name: str, level: str) -> None:
    results = []
    for bad_steps in ((), (0, 2)):
        with build(config(name, level)) as run:
            run.model.train()
            source = run.train.batches(0)
            for i in range(4):
                inputs, target = next(source)
                if i in bad_steps:
                    made, _ = make_step(run, (inputs * math.nan, target))
                    assert made.skipped.item() == 1
                made, _ = make_step(run, (inputs, target))
                assert made.skipped.item() == 0
            one_graph = level == "compiled" and name in ("AdamW", "SGD momentum")
            assert (run.step_graph is not None and run.step_graph.steps > 0) == one_graph
            update = run.update
            own = {k: v for k, v in vars(update.optimizer).items() if k in ("calls", "velocity")}
            results.append(
                [run.model.state_dict(), update.state(), own, update.lr_at(int(update.updates))]
            )
    assert_same(*results)


def trained(name: str, level: str) -> tuple[list[Tensor], float, int]:
    """How far weights and average moved in 20 steps, the weights' norm, and the steps skipped."""
    with build(config(name, level, lr=0.1, clip_norm=1e-4)) as run:
        run.model.train()
        before = [p.detach().clone() for p in run.update.parameters]
        source, skipped = run.train.batches(0), 0
        for i in range(20):
            inputs, target = next(source)
            made, _ = make_step(run, (inputs * (math.nan if i % 7 == 2 else 1.0), target))
            skipped += int(made.skipped.item())
        moved = [
            torch.cat([(x.detach() - y).flatten() for x, y in zip(now, before, strict=True)])
            for now in (run.update.parameters, run.update.average)
        ]
        size = float(torch.cat([p.detach().flatten() for p in run.update.parameters]).norm())
        return moved, size, skipped


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("level", "name"), CASES)
def test_weights_and_average_move_as_without_any_technique(name: str, level: str) -> None:
    plain, size, skipped = trained(name, "none")
    moved, _, also = trained(name, level)
    assert skipped == also == 3
    for ours, other in zip(moved, plain, strict=True):
        assert float(other.norm()) > 0 and bool(other.isfinite().all())
        rounding = 1e-6 * size  # of the weights that the movement is added to
        assert float((ours - other).norm()) <= 1e-3 * float(other.norm()) + rounding


def shrink(optimizer: Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            torch._foreach_mul_(group["params"], 0.9)


def patched_instance(optimizer: Optimizer, scope: ExitStack) -> None:
    own = optimizer.step

    @wraps(own)
    def step(closure: Any = None) -> None:
        own()
        shrink(optimizer)

    optimizer.step = step  # type: ignore[method-assign]


def patched_class(optimizer: Optimizer, scope: ExitStack) -> None:
    own = type(optimizer).step

    @wraps(own)
    def step(self: Optimizer, closure: Any = None) -> None:
        own(self)
        shrink(self)

    scope.enter_context(mock.patch.object(type(optimizer), "step", step))


def hook(optimizer: Optimizer, scope: ExitStack) -> None:
    optimizer.register_step_post_hook(shrink)


def global_hook(optimizer: Optimizer, scope: ExitStack) -> None:
    scope.callback(register_optimizer_step_post_hook(shrink).remove)


@pytest.mark.parametrize("late", [False, True], ids=["before", "between steps"])
@pytest.mark.parametrize(
    ("change", "cls"),
    [
        (patched_instance, torch.optim.AdamW),
        (patched_class, torch.optim.SGD),
        (hook, torch.optim.Adagrad),
        (global_hook, torch.optim.AdamW),
    ],
)
def test_code_put_around_a_step_is_not_run_where_the_step_is_skipped(
    cls: type[Optimizer], change: Callable[[Optimizer, ExitStack], None], late: bool
) -> None:
    results = []
    for who in ("plain loop", "train_step", "train_step and a NaN"):
        torch.manual_seed(0)
        net = Net(6, 2)
        optimizer = cls(net.parameters(), lr=0.1)  # type: ignore[call-arg]
        noise = torch.Generator().manual_seed(1)
        with ExitStack() as scope:
            for i in range(4):
                if i == 2 * late:
                    change(optimizer, scope)
                x, y = torch.randn(8, 6, generator=noise), torch.arange(8) % 2
                if who == "plain loop":
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(net(x), y).backward()
                    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
                    optimizer.step()
                    continue
                if who.endswith("NaN") and i in (0, 2, 3):
                    bad = train_step(net, optimizer, (x * math.nan, y), nn.CrossEntropyLoss())
                    assert bad.skipped.item() == 1
                train_step(net, optimizer, (x, y), nn.CrossEntropyLoss(), clip_norm=1e-3)
        results.append(net.state_dict())
    plain, guarded, with_nan = results
    assert_same(guarded, with_nan)
    for name, value in plain.items():
        assert torch.allclose(value.double(), guarded[name].double(), rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize(
    ("name", "options", "engaged", "guard"),
    [
        ("AdamW", {"fused": False}, False, "host reads a flag"),
        ("SignedAdamW", {}, False, None),
        ("SignedAdamW", {"fused": True}, False, None),
    ],
)
def test_the_summary_says_what_makes_the_update(
    name: str, options: dict[str, bool], engaged: bool, guard: str | None
) -> None:
    settings = config(name, "basic")
    optimizer = replace(settings.optimizer, options=options)
    training = replace(settings.training, steps=2)
    with build(replace(settings, optimizer=optimizer, training=training)) as run:
        summary = train(run)
        (group, *_) = run.update.optimizer.param_groups
        assert {key: group.get(key) for key in options} == options  # as the config says
    row = runs.status(summary, "fused_optimizer")
    assert row.requested and row.engaged == engaged and bool(row.reason) != engaged
    assert row.evidence.get("guard") == guard
    assert guard or f"the step() of {name} is not torch's own" in row.reason
