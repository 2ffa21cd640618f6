"""An optimizer from its name, with decay kept off norms and biases."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from runner.errors import ConfigError
from runner.optim.config import OptimizerConfig

Optimizer = torch.optim.Optimizer

MOMENTS = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "grad_avg",
    "acc_delta", "exp_inf", "ax", "prev", "step_size",
)  # fmt: skip
"""State of torch's own optimizers that has a value for each of the weight's."""
UNFIT = {
    "LBFGS": "runs the model several times a step",
    "SparseAdam": "takes sparse gradients alone",
}
"""Optimizers of torch that a training step here cannot use, and why."""
KEPT: dict[str, dict[str, str]] = {
    **dict.fromkeys(
        ("Adam", "AdamW"), {"exp_avg": "", "exp_avg_sq": "", "max_exp_avg_sq": "amsgrad"}
    ),
    "NAdam": {"mu_product": "", "exp_avg": "", "exp_avg_sq": ""},
    "RAdam": {"exp_avg": "", "exp_avg_sq": ""},
    "Adamax": {"exp_avg": "", "exp_inf": ""},
    "Adagrad": {"sum": ""},
    "Adadelta": {"square_avg": "", "acc_delta": ""},
    "RMSprop": {"square_avg": "", "momentum_buffer": "momentum", "grad_avg": "centered"},
    "Rprop": {"prev": "", "step_size": ""},
    "ASGD": {"eta": "", "mu": "", "ax": ""},
    "SGD": {"momentum_buffer": "momentum"},
    "Muon": {"momentum_buffer": ""},
}
"""What torch's own optimizers keep of a weight that was updated, and the option it is kept for."""


def find_optimizer(name: str) -> type[Optimizer]:
    """The class of torch.optim with that name."""
    known = {
        key: value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if name not in known:
        folded = {key.lower(): key for key in known}
        near = difflib.get_close_matches(name.lower(), folded, 1, 0.5)
        fix = f"did you mean {folded[near[0]]}?" if near else f"one of {', '.join(sorted(known))}"
        raise ConfigError("optimizer.name", f"torch.optim has no {name!r}", fix)
    if name in UNFIT:
        raise ConfigError("optimizer.name", f"{name} {UNFIT[name]}", "use AdamW")
    return known[name]


def build_optimizer(
    config: OptimizerConfig, cls: type[Optimizer], model: nn.Module, options: dict[str, Any]
) -> Optimizer:
    """The optimizer over the model's trainable parameters.

    Tensors of two or more dimensions decay; norms' scales and biases do not (as in GPT-2, and
    He et al. 2019, arXiv:1812.01187, section 3.1).
    """
    accepted = inspect.signature(cls).parameters
    if config.options.get("dampening") and options.get("fused"):
        options = {"foreach": True}  # a fused first step would dampen its gradient, unlike the rest
    for name in ("lr", "weight_decay"):
        if name in config.options:
            raise ConfigError(
                f"optimizer.options.{name}", "has a key of its own", f"optimizer.{name}"
            )
    arguments = {"lr": config.lr, **config.options, **options}
    for name in config.options:
        if name not in accepted:
            choices = ", ".join(n for n in accepted if n not in ("params", "lr", "weight_decay"))
            raise ConfigError(
                f"optimizer.options.{name}",
                f"{cls.__name__} has no such option",
                f"it has {choices}",
            )
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ConfigError("model", "has no parameter that requires a gradient", "nothing to train")
    groups: list[dict[str, Any]] = [{"params": trainable}]
    if "weight_decay" in accepted:
        arguments["weight_decay"] = config.weight_decay
        plain = [p for p in trainable if p.ndim < 2]
        if config.weight_decay and plain and len(plain) < len(trainable):
            decayed = [p for p in trainable if p.ndim >= 2]
            groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    try:
        optimizer = cls(groups, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            "optimizer", f"{cls.__name__} refuses: {error}", "check its options"
        ) from error
    fill_momentum(optimizer)
    return optimizer


def fill_momentum(optimizer: Optimizer) -> None:
    """Give fused SGD its momentum buffers before its first step.

    A first step that is skipped in the kernel leaves them uninitialised otherwise (torch 2.13).
    Zeros give the same update, since a first buffer is the gradient itself.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group.get("fused") and group["momentum"]:
            for parameter in group["params"]:
                if optimizer.state[parameter].get("momentum_buffer") is not None:
                    continue  # it was used before
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def fit_state(optimizer: Optimizer) -> None:
    """Bring state that was loaded to where an update takes it for granted to be.

    That is, moments in their weights' memory order for fused kernels, and counters on the device
    for all that never make the host wait. Raises ValueError for moments that have not the shape of
    their weights, since fused kernels read and write beyond the end of smaller ones, and for
    counters that count nothing.
    """
    torchs = type(optimizer).__module__.startswith("torch.optim.")
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if torchs and key in MOMENTS and value is not None:
                    if getattr(value, "shape", None) != parameter.shape:
                        raise ValueError(f"{key} has not its weight's shape, {parameter.shape}")
                if torchs and key == "step" and not 0 <= float(value) < math.inf:
                    raise ValueError(f"an optimizer's step is {float(value)}, and should be >= 0")
                if not isinstance(value, torch.Tensor):
                    continue
                dense = value.layout is torch.strided and value.shape == parameter.shape
                if dense and value.stride() != parameter.stride():
                    state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
                elif on_device and value.device != parameter.device:
                    state[key] = value.to(parameter.device)


def check_kept(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Raise ValueError where a saved state is of another optimizer, or of one with other options.

    `saved` is a `state_dict`; weights of which nothing was kept have had no update.
    """
    kept, own = KEPT.get(type(optimizer).__name__), optimizer.param_groups
    if kept is None or not type(optimizer).__module__.startswith("torch.optim."):
        return
    for group, theirs in zip(own, saved["param_groups"], strict=False):
        wanted = {key for key, option in kept.items() if not option or group.get(option)}
        for index in theirs["params"]:
            state = saved["state"].get(index) or {}
            there = {key for key, value in state.items() if value is not None and key != "step"}
            if there and (not wanted or not wanted <= there):
                raise ValueError(
                    f"{type(optimizer).__name__} as it is set keeps {_listed(wanted)} of a weight, "
                    f"and {_listed(there)} is there: it was another optimizer"
                )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
