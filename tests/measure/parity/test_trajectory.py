"""What is recorded of a step whose gradients stay inside one graph."""

from __future__ import annotations

import pytest
import torch

from runner import build, compose
from runner.measure.parity import trajectory

SMALL = ["device=cpu", "device.threads=1", "model.width=8", "optimization=none"]


@pytest.mark.parametrize(
    "optimizer", [["optimizer=adamw"], ["optimizer=sgd", "optimizer.weight_decay=0.1"]]
)
def test_gradients_are_inferred_from_the_moments_of_the_optimizer(optimizer: list[str]) -> None:
    fused = "optimization.fused_optimizer.enabled=true"
    with build(compose([*SMALL, *optimizer, fused, "stability.clip_norm=0.5"])) as run:
        batches = run.train.batches(0)
        for _ in range(3):
            capture, before = trajectory.TrajectoryCapture(), trajectory._copy_moments(run)
            step = trajectory.make_finite_step(run, next(batches), [capture])
            inferred = trajectory._infer_gradients(run, step, before)
            assert inferred.keys() == capture.gradients.keys()
            for name, gradient in capture.gradients.items():
                error = torch.linalg.vector_norm(inferred[name] - gradient)
                assert error <= 1e-4 * torch.linalg.vector_norm(gradient), name
            run.progress.step += 1
