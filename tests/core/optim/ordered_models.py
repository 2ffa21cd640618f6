"""A model whose constructor makes two layers of one shape in the order of an argument."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """The weights of a layer depend on its name, not on the order."""

    def __init__(self, in_features: int, classes: int, order: str = "ab") -> None:
        super().__init__()
        self.stem = nn.Linear(in_features, 8)
        for name in order:
            torch.manual_seed(ord(name))
            setattr(self, name, nn.Linear(8, 8))
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(self.stem(x).relu()).relu()).relu())
