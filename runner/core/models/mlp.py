"""A multi-layer perceptron, for tables and small images."""

from __future__ import annotations

from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers with ReLU between: [batch, …] of `in_features` values -> [batch, classes]."""

    def __init__(
        self, *, in_features: int, classes: int, width: int, depth: int, dropout: float
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        fan_in = in_features
        for _ in range(depth):
            layer = nn.Linear(fan_in, width)
            # He et al. 2015; torch's default is far too small for deep ReLU networks
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
            layers += [layer, nn.ReLU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
            fan_in = width
        layers.append(nn.Linear(fan_in, classes))
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits or regression values, [batch, classes]."""
        if inputs.ndim != 2:
            inputs = inputs.flatten(1)
        return self.layers(inputs)  # type: ignore[no-any-return]
