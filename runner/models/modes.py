"""Temporary evaluation mode that restores each module's own mode; modules that accept hooks.

`model.train()` would also switch parts to training that are kept in evaluation mode, such as a
frozen backbone with BatchNorm statistics that must not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode while entered; restore each module's mode on exit."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def hookable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of the modules that accept hooks; scripted ones do not."""
    import torch

    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            yield name, module
