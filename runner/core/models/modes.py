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


def enter_training(model: nn.Module) -> str:
    """Put the model in training mode; parts that are in evaluation mode stay there.

    One that is so as a whole, as from `from_pretrained`, is trained. Returns a note for the user.
    """
    whole = not model.training
    frozen = {} if whole else {n: m for n, m in model.named_modules() if not m.training}
    model.train()  # always called: some models freeze parts in their own `train`
    for module in frozen.values():
        module.training = False
    if whole:
        return "given in evaluation mode as a whole, so all its parts are trained"
    roots = [name for name in frozen if name.rpartition(".")[0] not in frozen]
    return f"in evaluation mode when given, and stays there: {', '.join(roots)}" if roots else ""


def hookable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of the modules that accept hooks; scripted ones do not."""
    import torch

    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            yield name, module
