"""The repeated blocks of a model, ours or anybody's: what recompute and regional compile act on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The largest group, by parameters, of two or more modules of one class under one parent.

    In the order that the parent holds them; of blocks within blocks the outermost are found.
    Empty where nothing repeats.
    """
    best: list[nn.Module] = []
    most = 0
    for parent in model.modules():
        groups: dict[type[nn.Module], list[nn.Module]] = {}
        for child in parent.children():
            groups.setdefault(type(child), []).append(child)
        for group in groups.values():
            size = sum(p.numel() for block in group for p in block.parameters())
            if len(group) > 1 and size > most and any(list(b.children()) for b in group):
                best, most = group, size
    return best
