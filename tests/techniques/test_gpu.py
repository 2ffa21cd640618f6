"""Techniques that need a GPU: TF32 seen in how a product is rounded, CUDA graphs in launches."""

from __future__ import annotations

import pytest
import torch

from runner import build, compose, train
from runner.techniques.base import TechniqueStatus

CUDA = ["training.steps=6", "monitoring.progress=false", "device=cuda", "optimization=custom"]


def row(name: str, *overrides: str) -> TechniqueStatus:
    asked = [*CUDA, f"optimization.{name}.enabled=true", *overrides]
    with build(compose(asked)) as run:
        return next(row for row in train(run).techniques if row.name == name)


@pytest.mark.gpu
def test_products_are_rounded_while_the_run_lasts() -> None:
    before = torch.get_float32_matmul_precision()
    rounded = row("tf32", "model.width=256")
    assert rounded.engaged
    assert rounded.evidence["products_are_rounded"]
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.gpu
def test_a_compiled_step_launches_graphs_and_another_says_what_is_missing() -> None:
    compiled = row("cuda_graphs", "optimization.compile.enabled=true")
    assert compiled.engaged and compiled.evidence["graph_launches_per_step"] >= 1
    assert "optimization.compile.enabled=true" in row("cuda_graphs").reason


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["dynamic", "weight_only"])
def test_the_int8_copy_runs_on_a_gpu(mode: str) -> None:
    assert row(
        "quantization", f"optimization.quantization.mode={mode}", "training.steps=40"
    ).engaged
