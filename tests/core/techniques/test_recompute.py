"""Recompute holds less, computes more, and changes no number."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from runner import train
from runner.core.build.setup import Components
from runner.core.errors import ConfigError
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import TechniqueStatus
from runner.core.models.transformer import Block
from runner.core.schemas.optimization import RecomputePolicy
from runner.core.techniques import recompute
from runner.core.techniques.recompute import RecomputedBlocks
from runner.core.train.step import forward_backward
from tests import runs

QUICK = ["training.steps=2", "optimization=none"]
GPT = [
    *[*QUICK, "data=synthetic", "data.form=tokens", "data.sequence=64", "data.vocab=64"],
    *["data.samples=64", "model=gpt", "model.width=64", "model.dropout=0.1"],
    "training.batch_size=8",
]
CNN = [*QUICK, "data=digits", "model=cnn", "model.width=8", "training.batch_size=16"]
CLASSIFIER = [
    *[*QUICK, "data=stdlib_parts", "model=classifier", "model.width=16", "model.heads=2"],
    "training.batch_size=4",
]


def recomputing(what: str) -> list[str]:
    return ["optimization.recompute.enabled=true", f"optimization.recompute.what={what}"]


def step(*overrides: str) -> tuple[dict[str, Tensor], Run]:
    """Gradients and buffers behind one forward and backward."""
    with runs.opened(*overrides) as run:
        forward_backward(run, next(run.train.batches(0)))
        values = {n: p.grad for n, p in run.model.named_parameters() if p.grad is not None}
        return values | {n: b.clone() for n, b in run.model.named_buffers()}, run


@pytest.mark.parametrize("what", ["full", "selective", "every"])
@pytest.mark.parametrize("data", [GPT, CNN, CLASSIFIER], ids=["gpt", "cnn", "classifier"])
def test_gradients_and_buffers_are_bit_equal_and_keys_stay(data: list[str], what: str) -> None:
    plain, without = step(*data)
    same, run = step(*data, *recomputing(what))
    assert run.recompute is not None and run.recompute.recomputed
    assert plain.keys() == same.keys()
    assert [n for n in plain if not torch.equal(plain[n], same[n])] == []
    assert run.model.state_dict().keys() == without.model.state_dict().keys()


def test_evidence_counts_the_blocks_that_ran_again() -> None:
    full = runs.status(runs.trained(*GPT, *recomputing("full")), "recompute")
    assert full.engaged and full.evidence["recomputed_blocks"] == 4
    assert full.evidence["held_bytes"] < 0.5 * full.evidence["held_bytes_without"]
    third = [*recomputing("every"), "optimization.recompute.every=3"]
    row = runs.status(runs.trained(*GPT, *third), "recompute")
    assert row.engaged and row.evidence["recomputed_blocks"] == 2  # the first and the fourth


def test_auto_recomputes_as_little_as_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = runs.trained(*GPT, *recomputing("auto"))
    row = runs.status(summary, "recompute")
    assert not row.engaged and "MiB with nothing: it fits in" in row.reason
    needed = float(row.reason.split(" MiB")[0])
    for free, policy in ((needed * 0.9, "selective"), (needed * 0.1, "full")):
        free_bytes = round(free * 2**20)

        def usable(builder: Any, share: float, free_bytes: int = free_bytes) -> float:
            return free_bytes * share / 0.8

        monkeypatch.setattr(recompute, "usable_bytes", usable)
        row = runs.status(runs.trained(*GPT, *recomputing("auto")), "recompute")
        assert row.engaged and row.evidence["what"] == policy, row.reason


def test_strict_allows_an_automatic_choice_that_needs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strict = "optimization.strict=true"
    row = runs.status(runs.trained(*GPT, *recomputing("auto"), strict), "recompute")
    assert not row.engaged and row.status == "skipped" and "it fits in" in row.reason
    row = runs.status(
        runs.trained(*GPT, "optimization.accumulation.enabled=true", strict), "accumulation"
    )
    assert not row.engaged and "already fits in one micro-batch" in row.reason
    with pytest.raises(ConfigError, match="optimization.recompute: .*no repeated blocks"):
        runs.trained(*QUICK, "data=cancer", "model=mlp", *recomputing("auto"), strict)
    fixed = ["optimization.accumulation.enabled=true", "optimization.accumulation.micro_batch=8"]
    with pytest.raises(ConfigError, match="optimization.accumulation: .*already fits"):
        runs.trained(*GPT, *fixed, strict)


def test_flops_of_none_selective_and_full() -> None:
    width, tokens = 32, 2 * 16
    blocks = nn.Sequential(*[Block(width, 4, 0.0, True) for _ in range(2)])
    x = torch.randn(2, 16, width, requires_grad=True)

    def flops(what: RecomputePolicy | None) -> int:
        with ExitStack() as scope, FlopCounterMode(display=False) as counter:
            if what is not None:
                RecomputedBlocks(what, list(blocks)).wrap(scope)
            blocks(x).sum().backward()
        return counter.get_total_flops()

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        blocks(x)
    forward, none = counter.get_total_flops(), flops(None)
    # a block's last product is not saved, so recomputing stops before it
    last = 2 * tokens * (4 * width) * width * len(blocks)
    assert flops(RecomputePolicy.full) == none + forward - last
    assert flops(RecomputePolicy.selective) == none


class Growing(nn.Module):
    """Its blocks make larger tensors each time that they are called."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(30, 30)

        def forward(self, x: Tensor, calls: list[int]) -> Tensor:
            calls.append(1)
            return self.inner(x.repeat(len(calls), 1)).relu()[: len(x)]

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Growing.Part() for _ in range(2))
        self.head = nn.Linear(30, 2)

    def forward(self, x: Tensor) -> Tensor:
        calls: list[int] = []
        for part in self.parts:
            x = part(x, calls)
        return self.head(x)


def test_blocks_that_can_run_only_once_are_left_as_they_are() -> None:
    asked = [*QUICK, "data=cancer", *recomputing("full")]
    with runs.opened(*asked, given=Components(Growing())) as run:
        refused = runs.status(train(run), "recompute")
    assert not refused.engaged and "cannot be computed twice" in refused.reason


@pytest.mark.slow
@runs.needs_compiler
@pytest.mark.parametrize("what", ["full", "selective"])
def test_a_compiled_graph_holds_less_and_counts_batchnorm_once(what: str) -> None:
    def trained(*more: str) -> tuple[dict[str, Tensor], TechniqueStatus | None]:
        with runs.opened(*CNN, "optimization.compile.enabled=true", *more) as run:
            summary = train(run)
            buffers = {n: b.clone() for n, b in run.model.named_buffers()}
            return buffers, runs.status(summary, "recompute")

    plain, _ = trained()
    same, took = trained(*recomputing(what))
    assert took is not None and took.engaged
    assert took.evidence["compiled_held_bytes"] < took.evidence["held_bytes_without"]
    for name, buffer in plain.items():
        assert torch.allclose(buffer, same[name], atol=1e-5), name
