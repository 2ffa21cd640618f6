"""A step that is bad leaves no trace under any optimizer, and the host does not wait to know it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner import build, train
from runner.core.interfaces.batch import Batch
from runner.core.interfaces.hook import Step
from runner.core.interfaces.run import Run
from runner.core.optim.fused_kernel import RevertibleStep
from runner.core.optim.optimizer import build_optimizer, find_optimizer
from runner.core.optim.optimizer_step import OptimizerStep
from runner.core.schemas.optimizer import OptimizerConfig
from runner.core.schemas.stability import StabilityConfig
from runner.core.train.step import make_step
from tests import runs

from .steps import (
    FUSED,
    LISTS,
    LOOP,
    OPTIMIZERS,
    assert_same,
    batches,
    make,
    model,
    step,
    take_step,
)

BAD_STEPS = (0, 2)  # before the first step and between two others


def bad_ones(like: Batch) -> dict[str, tuple[Batch, float]]:
    """A batch and what is added to its loss, by what is wrong with it."""
    return {
        "input": ((torch.full_like(like[0], math.nan), like[1]), 0.0),
        "loss": (like, math.inf),
        "negative loss": (like, -math.inf),
        "spike of the loss": (like, 1000.0),
        "buffers": ((1e20 * like[0], like[1]), 0.0),
    }


# fused kernels take the flag and need no undoing; lists take a rate on the device on CUDA only
WAYS = {
    "steady": (FUSED, LISTS, LOOP, {}),
    "scheduled": (FUSED, LISTS, LOOP, {}),
    "undone": (LISTS, LOOP, {}),
    "undone scheduled": (LOOP, {}),
}


@pytest.mark.parametrize(
    ("way", "name", "options", "how"),
    [(way, *case) for way, fits in WAYS.items() for case in OPTIMIZERS if case[2] in fits],
)
def test_a_skipped_step_is_bit_equal_to_a_batch_never_seen(
    way: str, name: str, options: Any, how: Any
) -> None:
    good = batches(5)
    results = []
    for bad in (False, True):
        net = model(name != "Muon")
        update = make(net, name, options, how, "scheduled" not in way, ema=0.9)
        if "undone" in way:  # as on an accelerator
            update.revertible = RevertibleStep(update.optimizer)
        if way == "undone scheduled":
            update.schedule_on_device()
        update.set_limits(100.0, math.inf)
        for i, batch in enumerate(good):
            if bad and i in BAD_STEPS:
                for cause, (spoiled, beside) in bad_ones(batch).items():
                    assert step(net, update, spoiled, beside, parts=2)[1], cause
            assert not step(net, update, batch, parts=2)[1]
        results.append([net.state_dict(), update.state(), update.lr_at(int(update.updates))])
    assert_same(*results)


SPARSE = [
    ("SGD", {"momentum": 0.9}, {}),
    ("SGD", {}, LISTS),
    ("Adagrad", {}, {}),
    ("SparseAdam", {}, {}),
]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # Adagrad makes sparse tensors
@pytest.mark.parametrize(("name", "options", "how"), SPARSE)
@pytest.mark.parametrize("cause", [math.nan, 1000.0])
def test_so_it_is_with_sparse_gradients(name: str, options: Any, how: Any, cause: float) -> None:
    noise = torch.Generator().manual_seed(1)
    ids, classes = torch.Size([8, 3]), torch.Size([8])
    good = [
        (torch.randint(0, 9, ids, generator=noise), torch.randint(0, 4, classes, generator=noise))
        for _ in range(4)
    ]
    results = []
    for bad in (False, True):
        torch.manual_seed(0)
        net = nn.EmbeddingBag(9, 4, sparse=True, mode="sum")
        config = OptimizerConfig(name=name, lr=0.05, options=options, weight_decay=0.0)
        optimizer = build_optimizer(config, find_optimizer(name), net, how)
        update = OptimizerStep(net, optimizer, StabilityConfig(), 0.05, [1.0], ema=0.9)
        update.set_limits(math.inf, 100.0)
        for i, batch in enumerate(good):
            if bad and i in BAD_STEPS:
                x, y = batch
                norm, skipped = take_step(
                    update,
                    lambda net=net, x=x, y=y: nn.functional.cross_entropy(net(x), y) * cause,
                )
                assert skipped and math.isfinite(cause) == math.isfinite(norm)
            assert not step(net, update, batch)[1]
        results.append([net.state_dict(), update.state()])
    assert_same(*results)


CNN = [
    *["optimization=none", "data=digits", "model=cnn", "model.width=4", "model.stages=1"],
    *["model.blocks=1", "training.batch_size=16"],
]
FUSED_STEP = "optimization.fused_optimizer.enabled=true"


def test_huge_finite_inputs_leave_loss_and_gradients_finite_and_batchnorm_at_infinity() -> None:
    config = runs.config(*CNN, "training.steps=9", "stability.guard=false")
    for guard in (False, True):
        with build(config) as run:
            run.update.guard = guard
            run.model.train()
            batch = next(run.train.batches(0))
            made, _ = make_step(run, (batch[0] * 1e20, batch[1]))
            assert math.isfinite(float(made.loss)) and math.isfinite(float(made.grad_norm))
            sound = all(bool(b.isfinite().all()) for b in run.model.buffers())
            assert sound == guard
            assert bool(made.skipped) == guard


class Reads(TorchDispatchMode):
    """Counts what makes a host wait for an accelerator: numbers that leave a tensor."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "_to_dense", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in self.WAITS
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """What no dispatcher sees, since on a CPU nothing is to be done for it, is counted too."""
    reads = Reads()
    for name in ("tolist", "numpy", "cpu", "__array__"):
        own = getattr(Tensor, name)

        def read(self: Tensor, *args: Any, own: Any = own, **kwargs: Any) -> Any:
            reads.count += 1
            return own(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, read)
    with reads:
        yield reads


def reads_between_steps(run: Run, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, int], int]:
    """Train; return the reads of each step, but of those after a report, and the number of all."""
    counts, before = dict[int, int](), 0

    def count(run: Run) -> None:
        nonlocal before
        step = run.progress.step
        if step > 1 and (step - 1) % run.report_every:
            counts[step] = reads.count - before
        before = reads.count

    run.hooks.append(runs.AtSteps(range(run.total_steps + 1), count))
    with counted(monkeypatch) as reads:
        train(run)
    return counts, reads.count


LOOP_OF = [
    *[*CNN, "monitoring.every=6", "training.steps=24", "training.validate_every=1000"],
    "optimizer.ema=0.9",
    "checks.inputs.enabled=false",  # they read a batch where it lies, before it is moved
]


@pytest.mark.parametrize(
    ("overrides", "undone"),
    [
        ([FUSED_STEP, "schedule=cosine"], False),
        ([FUSED_STEP, "stability.clip_value=0.1", "stability.clip_adaptive=0.1"], False),
        ([FUSED_STEP, "training.micro_batch=4"], False),
        (["optimizer=sgd", "schedule=constant"], True),
    ],
)
def test_nothing_is_read_between_reports(
    overrides: list[str], undone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with runs.opened(*LOOP_OF, *overrides) as run:
        if undone:
            run.update.revertible = RevertibleStep(run.update.optimizer)
        counts, total = reads_between_steps(run, monkeypatch)
    assert total > 0  # reports do read, so the count counts
    assert len(counts) == 20
    made_state = 2 if undone else 0  # the first step reads whether to keep what it made
    assert {n: c for n, c in counts.items() if c and n > made_state} == {}


def test_an_optimizer_that_is_not_fused_reads_one_flag_a_step_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with runs.opened(*LOOP_OF, "optimizer=sgd", "schedule=constant") as run:
        assert not run.update.host_waits  # since it is free there
        counts = reads_between_steps(run, monkeypatch)[0]
    assert set(counts.values()) == {1}


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["AdamW", "RAdam", "Adamax", "RMSprop"])
def test_cuda_raises_nothing_between_reports(optimizer: str) -> None:
    def set_mode(run: Run, step: Step) -> None:
        free = step.number > 6 and step.number % run.report_every
        torch.cuda.set_sync_debug_mode("error" if free else "default")

    overrides = ["device=cuda", FUSED_STEP, f"optimizer.name={optimizer}", "schedule=cosine"]
    try:
        with runs.opened(*LOOP_OF, *overrides) as run:
            assert not run.update.host_waits
            run.hooks.append(runs.hook(on_step=set_mode))
            summary = train(run)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert summary.status == "done"
