"""Preservation of each module's training mode, and the modules that take hooks.

`model.train()` would also change parts that the user keeps in evaluation mode, such as a frozen
backbone with BatchNorm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode while entered, and restore each module's mode."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def hookable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules that take hooks: all but scripted ones."""
    import torch

    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            yield name, module
