"""Updates that the device makes or skips by a flag, without a host sync.

`FusedKernel` calls the optimizer's fused kernel with lists that are made once: `Optimizer.step()`
collects parameters, sorts them by device and dtype and opens a profiler range at each step, some
40 µs for a small model, where the kernel itself takes 6. `RevertibleStep` is for optimizers without
such a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from runner.core.optim.optimizer import Optimizer, sparse_embeddings, uses_torch_step


@dataclass
class KernelGroup:
    """The tensors of a parameter group, as lists for the kernel."""

    options: dict[str, Any]  # the optimizer's own dict, so that a new learning rate takes effect
    parameters: list[Tensor]
    first_moments: list[Tensor]  # exp_avg, or momentum_buffer
    second_moments: list[Tensor]  # exp_avg_sq
    steps: list[Tensor]  # the shared counter, once per parameter


class FusedKernel:
    """Fused steps of Adam, AdamW or SGD, with state in the optimizer's `state`.

    All parameters must get a gradient at every step, since they share one step counter.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.step_count = torch.zeros((), dtype=torch.float32, device=device)  # updates made
        self.one = torch.ones_like(self.step_count)
        self.adam = isinstance(optimizer, torch.optim.Adam)  # AdamW is one
        self.groups: list[KernelGroup] = []
        self._build_groups()

    @staticmethod
    def supports(optimizer: Optimizer) -> bool:
        """Whether there is a fused kernel for the optimizer."""
        is_known = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
        groups = optimizer.param_groups
        is_plain = all(g.get("fused") and not g.get("amsgrad") for g in groups)
        is_uniform = all(len({(p.dtype, p.device) for p in g["params"]}) == 1 for g in groups)
        has_kernels = hasattr(torch, "_fused_adamw_") and hasattr(torch, "_fused_sgd_")
        return is_known and is_plain and is_uniform and has_kernels

    def step(self, divisors: list[Tensor | None], skipped: Tensor) -> None:
        """Update, unless `skipped` is 1; each group's gradients are divided by its divisor."""
        self.step_count.add_(self.one)
        with torch.no_grad():
            for group, divisor in zip(self.groups, divisors, strict=True):
                (self._adam if self.adam else self._sgd)(group, divisor, skipped)
        self.step_count.sub_(skipped)

    def _adam(self, group: KernelGroup, divisor: Tensor | None, skipped: Tensor) -> None:
        options = group.options
        decoupled = options["decoupled_weight_decay"]
        (torch._fused_adamw_ if decoupled else torch._fused_adam_)(
            group.parameters,
            [p.grad for p in group.parameters],  # type: ignore[misc]  # every one has a gradient
            group.first_moments,
            group.second_moments,
            [],
            group.steps,
            lr=options["lr"],
            beta1=options["betas"][0],
            beta2=options["betas"][1],
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            amsgrad=False,
            maximize=options["maximize"],
            grad_scale=divisor,
            found_inf=skipped,
        )

    def _sgd(self, group: KernelGroup, divisor: Tensor | None, skipped: Tensor) -> None:
        options = group.options
        torch._fused_sgd_(
            group.parameters,
            [p.grad for p in group.parameters],  # type: ignore[misc]  # every one has a gradient
            group.first_moments,
            weight_decay=options["weight_decay"],
            momentum=options["momentum"],
            lr=options["lr"],
            dampening=options["dampening"],
            nesterov=options["nesterov"],
            maximize=options["maximize"],
            is_first_step=False,  # buffers were created with the optimizer
            grad_scale=divisor,
            found_inf=skipped,
        )

    def write_counter(self) -> None:
        """Write the step counter to the optimizer's state, for a checkpoint or its own step()."""
        if self.adam:
            for group in self.groups:
                for parameter in group.parameters:
                    self.optimizer.state[parameter]["step"] = self.step_count.clone()

    def load_state(self) -> bool:
        """Continue from loaded optimizer state; False if parameters differ in their step count."""
        state = self.optimizer.state
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.adam and any(state[p] for p in parameters):
            # host sync: the counters of a loaded state
            if len({float(state[p]["step"]) if state[p] else -1.0 for p in parameters}) > 1:
                return False
        self._build_groups()
        return True

    def _build_groups(self) -> None:
        state = self.optimizer.state
        self.groups = []
        for options in self.optimizer.param_groups:
            parameters = options["params"]
            for p in parameters:
                if self.adam and not state[p]:
                    state[p]["step"] = torch.zeros_like(self.step_count)
                    state[p]["exp_avg"] = torch.zeros_like(p)
                    state[p]["exp_avg_sq"] = torch.zeros_like(p)
            moment_key = "exp_avg" if self.adam else "momentum_buffer"
            group = KernelGroup(
                options,
                parameters,
                [state[p][moment_key] for p in parameters if moment_key in state[p]],
                [state[p]["exp_avg_sq"] for p in parameters if self.adam],
                [self.step_count] * len(parameters),
            )
            if self.adam and parameters:
                self.step_count.copy_(state[parameters[0]]["step"])
            self.groups.append(group)


@final
class RevertibleStep:
    """Update that is reverted on the device if skipped, for optimizers without a fused kernel.

    Weights and state are copied during the update: three times the weights for NAdam, twice for
    momentum. Backward has freed its activations by then, which mostly took more. Selecting old or
    new values takes one small kernel per tensor.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @staticmethod
    def supports(optimizer: Optimizer, model: nn.Module, scheduled: bool) -> bool:
        """Whether a step needs no host sync; SGD, Muon and loops would read a `scheduled` rate."""
        kind, groups = type(optimizer), optimizer.param_groups
        if not uses_torch_step(optimizer):
            return False
        if sparse_embeddings(model):
            return False  # the number of rows of a sparse gradient needs a host sync
        if kind in (torch.optim.SGD, torch.optim.Muon):
            return not scheduled
        plain_loop = any(group.get("foreach") is False for group in groups)
        return all(group.get("capturable") for group in groups) and not (scheduled and plain_loop)

    def step(self, parameters: list[Tensor], skipped: Tensor) -> None:
        """Update parameters, which all have a gradient, unless `skipped` is 1."""
        state = self.optimizer.state
        weights = [parameter.detach() for parameter in parameters]
        entries = [(state[p], key) for p in parameters if p in state for key in state[p]]
        originals = weights + [values[key] for values, key in entries]
        copies = [torch.empty_like(tensor) for tensor in originals]
        torch._foreach_copy_(copies, originals)
        self.optimizer.step()  # host sync: Rprop reads a scheduled rate, at a first update only
        skip = skipped.bool()
        for current, original in zip(weights + [v[key] for v, key in entries], copies, strict=True):
            torch.where(skip, original, current, out=current)
        if len(entries) < sum(len(state[p]) for p in parameters if p in state):
            known_keys = {(id(values), key) for values, key in entries}
            self._delete_new_state(known_keys, parameters, skipped)

    def _delete_new_state(
        self, known_keys: set[tuple[int, str]], parameters: list[Tensor], skipped: Tensor
    ) -> None:
        """Delete state created by a skipped step, so that the next one creates it again."""
        if not skipped.item():  # host sync: at a parameter's first update only
            return
        for parameter in parameters:
            values = self.optimizer.state[parameter]
            for key in [key for key in values if (id(values), key) not in known_keys]:
                del values[key]
            if not values:
                del self.optimizer.state[parameter]
