"""Recompute holds less, computes more, and changes no number."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from runner import train
from runner.models.transformer import Block
from runner.techniques.base import TechniqueStatus
from runner.techniques.config import RecomputePolicy
from runner.techniques.recompute import Recomputed
from runner.training.run import Run
from runner.training.step import forward_backward
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


def row(*overrides: str) -> TechniqueStatus:
    return runs.status(runs.trained(*overrides), "recompute")


@pytest.mark.parametrize("what", ["full", "selective"])
@pytest.mark.parametrize("data", [GPT, CNN, CLASSIFIER], ids=["gpt", "cnn", "classifier"])
def test_gradients_and_buffers_are_bit_equal_and_keys_stay(data: list[str], what: str) -> None:
    plain, without = step(*data)
    same, run = step(*data, *recomputing(what))
    assert run.recompute is not None and run.recompute.again
    assert plain.keys() == same.keys()
    assert [n for n in plain if not torch.equal(plain[n], same[n])] == []
    assert run.model.state_dict().keys() == without.model.state_dict().keys()


def test_evidence_counts_the_blocks_that_ran_again() -> None:
    full = row(*GPT, *recomputing("full"))
    assert full.engaged and full.evidence["recomputed_blocks"] == 4
    assert full.evidence["held_bytes"] < 0.5 * full.evidence["held_bytes_without"]


def test_flops_of_none_selective_and_full() -> None:
    width, tokens = 32, 2 * 16
    blocks = nn.Sequential(*[Block(width, 4, 0.0, True) for _ in range(2)])
    x = torch.randn(2, 16, width, requires_grad=True)

    def flops(what: RecomputePolicy | None) -> int:
        with ExitStack() as scope, FlopCounterMode(display=False) as counter:
            if what is not None:
                Recomputed(what, list(blocks)).wrap(scope)
            blocks(x).sum().backward()
        return counter.get_total_flops()

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        blocks(x)
    forward, none = counter.get_total_flops(), flops(None)
    # a block's last product is saved by nobody, so recomputing stops before it
    last = 2 * tokens * (4 * width) * width * len(blocks)
    assert flops(RecomputePolicy.full) == none + forward - last
    assert flops(RecomputePolicy.selective) == none


class Own(nn.Module):
    """A user's: blocks called by keyword with a dict, tied weights, BatchNorm, dropout."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
            self.drop = nn.Dropout(0.5)

        def forward(self, *, given: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"x": given["x"] + self.drop(self.inner(given["x"]))}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Own.Part(), Own.Part(), Own.Part()
        self.third.inner[0].weight = self.first.inner[0].weight

    def forward(self, x: Tensor) -> Tensor:
        given = {"x": x}
        for part in (self.first, self.second, self.third):
            given = part(given=given)
        return given["x"]


def test_a_model_of_anybodys_is_bit_equal_too() -> None:
    def run(chosen: RecomputePolicy | None) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = Own(), torch.randn(16, 8)
        with ExitStack() as scope:
            if chosen is not None:
                Recomputed(chosen, [model.first, model.second, model.third]).wrap(scope)
            for _ in range(2):
                model(x).square().mean().backward()
        assert "forward" not in vars(model.first)
        return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]

    for a, b in zip(run(None), run(RecomputePolicy.full), strict=True):
        assert torch.equal(a, b)


def test_blocks_that_can_run_only_once_are_left_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "growing.py").write_text(
        "from torch import nn\n"
        "class Part(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.inner = nn.Linear(30, 30)\n"
        "    def forward(self, x, seen):\n"
        "        seen.append(1)\n"
        "        return self.inner(x.repeat(len(seen), 1)).relu()[:len(x)]\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, in_features, classes):\n"
        "        super().__init__()\n"
        "        self.parts = nn.ModuleList(Part() for _ in range(2))\n"
        "        self.head = nn.Linear(30, classes)\n"
        "    def forward(self, x):\n"
        "        seen = []\n"
        "        for part in self.parts:\n"
        "            x = part(x, seen)\n"
        "        return self.head(x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = ["data=cancer", "model._target_=growing.Net", "security.trusted=[growing]"]
    refused = row(*QUICK, *own, *recomputing("full"))
    assert not refused.engaged and "cannot be computed twice" in refused.reason


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ here")
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
