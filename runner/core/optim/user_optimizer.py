"""Adoption of the caller's optimizer, which the caller continues to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from runner.core.optim.optimizer import fill_momentum, uses_torch_step
from runner.core.optim.optimizer_state import align_state, check_optimizer_state
from runner.core.optim.optimizer_step import OptimizerStep


def adopt_optimizer(
    optimizer: Optimizer, options: Mapping[str, Any], scope: ExitStack
) -> Optimizer:
    """Set `options`, from `applicable`, on the optimizer until `scope` closes; return it."""
    untyped: Any = optimizer
    # else schedulers warn that step() was not called: the kernel replaces it
    untyped._opt_called = True
    for parameter, state in optimizer.state.items():  # the model may have been moved since
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim and value.device != parameter.device:
                state[name] = value.to(parameter.device)
    fill_momentum(optimizer)  # if its owner chose the fused kernel
    groups = optimizer.param_groups
    if not options:
        return optimizer
    scope.callback(_set_options, optimizer, [{k: group[k] for k in options} for group in groups])
    _set_options(optimizer, [options] * len(groups))
    check_optimizer_state(optimizer)
    align_state(optimizer)  # counters may be on the host
    return optimizer


def applicable(optimizer: Optimizer, options: dict[str, Any]) -> dict[str, Any]:
    """Return `options`; {} if its owner has chosen others, or its step() is not torch's."""
    undecided = all(_is_undecided(group, options) for group in optimizer.param_groups)
    if not undecided or not uses_torch_step(optimizer):
        return {}
    return {} if options.get("fused") and not _supports_fused(optimizer) else options


def sync_state(update: OptimizerStep, options: Mapping[str, Any], scope: ExitStack) -> None:
    """Keep optimizer state in sync if the caller reads, loads or steps it, until `scope` closes."""
    optimizer: Any = update.optimizer

    def write_counter(*_: object) -> None:
        if update.kernel is not None:
            update.kernel.write_counter()

    def reload_state(*_: object) -> None:
        if update.kernel is not None and not update.kernel.load_state():
            update.kernel = None

    def after_load(*_: object) -> None:
        if update.in_kernel or update.revertible is not None:  # loading replaced the options
            _set_options(optimizer, [options] * len(optimizer.param_groups))
        check_optimizer_state(optimizer)
        align_state(optimizer)
        reload_state()

    for handle in (
        optimizer.register_state_dict_pre_hook(write_counter),
        optimizer.register_load_state_dict_post_hook(after_load),
        optimizer.register_step_pre_hook(write_counter),
        optimizer.register_step_post_hook(reload_state),
    ):
        scope.callback(handle.remove)
    scope.callback(write_counter)


def _set_options(optimizer: Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, options, strict=False):
        group.update(values)  # groups may have been added since


def _is_undecided(group: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether no implementation was chosen, and a fused one would give the same results."""
    if options.get("fused") and (group.get("dampening") or group.get("differentiable")):
        return False
    return group.get("fused") is None and group.get("foreach") is None


def _supports_fused(optimizer: Optimizer) -> bool:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in parameters)
