"""TF32 on a GPU: seen in the flags, in how a product is rounded and in the kernels' names."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from runner import build, compose, train
from runner.device.numerics import set_tf32
from runner.techniques.tf32 import rounds_to_tf32

TF32 = [
    "training.steps=4",
    "monitoring.progress=false",
    "device=cuda",
    "optimization=custom",
    "optimization.tf32.enabled=true",
    "model.width=256",
]


def test_a_whole_mantissa_is_told_from_a_short_one() -> None:
    assert not rounds_to_tf32(torch.device("cpu"))


@pytest.mark.gpu
def test_products_are_rounded_while_the_run_lasts_and_kernels_say_so() -> None:
    before = torch.get_float32_matmul_precision()
    with build(compose(TF32)) as run:
        train(run)
        evidence = run.evidence["tf32"]
    assert evidence.engaged
    assert evidence.facts["products_are_rounded"]
    assert evidence.facts["kernels"]
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.gpu
def test_products_are_whole_where_it_is_off() -> None:
    with ExitStack() as scope:
        set_tf32(False, scope)
        assert not rounds_to_tf32(torch.device("cuda"))
