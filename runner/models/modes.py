"""Training and evaluation mode, each module's own; which of them take hooks.

`model.train()` would also set a part to training that its owner keeps in evaluation mode, such as
a frozen backbone whose BatchNorm must not learn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, and afterwards each module as it was."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def hookable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules, by name, that take hooks; scripted ones take none from outside."""
    import torch

    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            yield name, module
