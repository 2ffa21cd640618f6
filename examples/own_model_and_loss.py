"""A model, a loss and a data set of your own; everything else is the runner's."""

# %% Any module, any map-style data set or pair of tensors, any mean of (output, target).
import torch
from torch import nn

import runner

torch.manual_seed(0)
angles = torch.rand(2000, 1) * 6.28
points = torch.cat([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(2000, 2)


class Circle(nn.Module):
    """Guesses the radius and the noise of points, from nothing but the points."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.layers(points)


def off_the_circle(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """How far the answers lie from the point, and from the circle."""
    to_point = (output - target).square().sum(1)
    to_circle = (output.norm(dim=1) - 1).square()
    return (to_point + 4 * to_circle).mean()


# %% A run with checkpoints, metrics, TensorBoard and a report; `overrides` are the command line's.
with runner.create_training_pipeline(
    Circle(),
    (points, points),
    loss_fn=off_the_circle,
    level="basic",
    name="circle",
    overrides=["training.epochs=10", "optimizer.lr=3e-3"],
) as pipeline:
    summary = pipeline.train()
    print(f"{summary.metrics['val/loss']:.4f}", pipeline.folder)

# %% What engaged, and what did not, with the reason.
for technique in summary.techniques:
    if technique.requested:
        print(technique.name, technique.engaged, technique.reason)
