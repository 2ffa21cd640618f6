"""A default dtype that user code has left set changes no number of a run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runner import train
from tests.runs import OURS, opened

ROOT = Path(__file__).parents[2] / "runner"
FLOAT_FACTORIES = {"zeros", "ones", "full", "empty", "rand", "randn", "linspace", "eye"}
COMMON = (
    *OURS, "data=cancer", "model._target_=my_package.WithDefault", "training.steps=8",
    "training.batch_size=32", "training.validate_every=4",
)  # fmt: skip
CONFIGS = {
    "guard, loss weights, named metrics": [
        "optimization=none", "objective.class_weights=balanced", "objective.metrics=[AUROC]",
    ],
    "schedule, average, clipping, loss scale": [
        "optimization=amp", "optimization.amp.dtype=fp16", "schedule=cosine", "optimizer.ema=0.9",
        "stability.clip_norm=1",
    ],
    "micro-batches, bad samples": [
        "optimization=none", "training.micro_batch=7", "data.bad_samples=drop",
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def results(overrides: list[str], folder: Path, dtype: str) -> tuple[Any, ...]:
    torch.set_default_dtype(torch.float32)
    with opened(*COMMON, f"+model.dtype={dtype}", *overrides, folder=folder) as run:
        assert torch.get_default_dtype() is getattr(torch, dtype)
        summary = train(run)
        weights = [value.clone() for value in run.model.state_dict().values()]
        return summary.metrics, weights, [value.clone() for value in run.update.average]


@pytest.mark.parametrize("overrides", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_run_with_a_default_dtype_left_by_the_model_has_the_same_bits(
    overrides: list[str], tmp_path: Path, my_package: None
) -> None:
    expected = results(overrides, tmp_path / "float32", "float32")
    for dtype in ("bfloat16", "float64"):
        metrics, *tensors = results(overrides, tmp_path / dtype, dtype)
        assert metrics == expected[0]
        for ours, theirs in zip(tensors, expected[1:], strict=True):
            assert len(ours) == len(theirs)
            assert all(map(torch.equal, ours, theirs))


def test_a_default_dtype_left_by_the_data_leaves_our_models_in_float32(
    my_package: None,
) -> None:
    overrides = [*OURS, "data._target_=my_package.DataWithDefault", "training.steps=2"]
    with opened(*overrides, "optimization=none") as run:
        assert torch.get_default_dtype() is torch.bfloat16
        assert {p.dtype for p in run.model.parameters()} == {torch.float32}
        assert train(run).status == "done"


def test_our_constants_state_their_dtype() -> None:
    untyped = []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            module, name = node.func.value, node.func.attr
            is_factory = isinstance(module, ast.Name) and module.id == "torch"
            keywords = {keyword.arg for keyword in node.keywords}
            if is_factory and name in FLOAT_FACTORIES and not keywords & {"dtype", None}:
                untyped.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not untyped
