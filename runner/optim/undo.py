"""An update that is made, and taken back on the device if the step was to be skipped."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from runner.optim.optimizer import Optimizer, sparse_embeddings
from runner.optimizer_origin import runs_torchs_step


@final
class Undo:
    """For optimizers without a fused kernel whose state is all on the device.

    A copy of weights and state lives while the update is made: three times the weights for
    NAdam, twice for momentum. By then backward has freed its activations, which mostly took more.
    The choice between the two is one small kernel a tensor.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @staticmethod
    def fits(optimizer: Optimizer, model: nn.Module, scheduled: bool) -> bool:
        """Whether no step of this optimizer makes the host wait for an accelerator.

        A rate that is `scheduled` is a tensor, which SGD, Muon and all plain loops would read.
        """
        kind, groups = type(optimizer), optimizer.param_groups
        if not runs_torchs_step(optimizer):
            return False
        if sparse_embeddings(model):
            return False  # the host waits for the number of rows of a sparse gradient
        if kind in (torch.optim.SGD, torch.optim.Muon):
            return not scheduled
        plain_loop = any(group.get("foreach") is False for group in groups)
        return all(group.get("capturable") for group in groups) and not (scheduled and plain_loop)

    def step(self, parameters: list[Tensor], skipped: Tensor) -> None:
        """Update the parameters, which all have a gradient, unless `skipped` is 1."""
        state = self.optimizer.state
        weights = [parameter.detach() for parameter in parameters]
        places = [(state[p], key) for p in parameters if p in state for key in state[p]]
        before = weights + [holder[key] for holder, key in places]
        saved = [torch.empty_like(tensor) for tensor in before]
        torch._foreach_copy_(saved, before)
        self.optimizer.step()
        skip = skipped.bool()
        for now, old in zip(weights + [h[key] for h, key in places], saved, strict=True):
            torch.where(skip, old, now, out=now)
        if len(places) < sum(len(state[p]) for p in parameters if p in state):
            self._drop_new({(id(holder), key) for holder, key in places}, parameters, skipped)

    def _drop_new(
        self, known: set[tuple[int, str]], parameters: list[Tensor], skipped: Tensor
    ) -> None:
        """State that a skipped step has made goes again, for the next one to make afresh."""
        if not skipped.item():  # waits for the device, at a parameter's first update only
            return
        for parameter in parameters:
            holder = self.optimizer.state[parameter]
            for key in [key for key in holder if (id(holder), key) not in known]:
                del holder[key]
            if not holder:
                del self.optimizer.state[parameter]
