"""CUDA graphs: launched on a GPU where the model is compiled, refused elsewhere with the reason."""

from __future__ import annotations

import pytest

from runner import build, compose, train
from runner.errors import ConfigError
from runner.techniques.base import TechniqueStatus

QUICK = [
    "training.steps=6",
    "monitoring.progress=false",
    "optimization=custom",
    "optimization.cuda_graphs.enabled=true",
]


def row(*overrides: str) -> TechniqueStatus:
    with build(compose([*QUICK, *overrides])) as run:
        return next(row for row in train(run).techniques if row.name == "cuda_graphs")


def test_cuda_graphs_are_refused_on_a_cpu_and_are_an_error_under_strict() -> None:
    refused = row("device=cpu")
    assert refused.requested
    assert not refused.engaged
    assert "the device is cpu" in refused.reason
    with pytest.raises(ConfigError, match=r"optimization\.cuda_graphs.*the device is cpu"):
        row("device=cpu", "optimization.strict=true")


@pytest.mark.gpu
def test_a_compiled_step_launches_graphs() -> None:
    found = row("device=cuda", "optimization.compile.enabled=true")
    assert found.engaged
    assert found.evidence["graph_launches_per_step"] >= 1


@pytest.mark.gpu
def test_without_a_compiler_it_says_what_is_missing() -> None:
    found = row("device=cuda")
    assert not found.engaged
    assert "optimization.compile.enabled=true" in found.reason
