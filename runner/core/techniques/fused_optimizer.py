"""The optimizer's update in one kernel."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, RunBuilder
from runner.core.optim.optimizer import is_torch_class, skip_compiler_import, uses_torch_step
from runner.core.schemas.optimization import FusedOptimizer

IMPLEMENTATION = "optimizer.implementation"  # key of the choice
Options = dict[str, bool]


def apply(config: FusedOptimizer, builder: RunBuilder) -> str | None:
    """Select the fastest implementation that the optimizer's class has."""
    options, reason = fastest_implementation(builder.optimizer_class, builder.model)
    builder.optimizer_options.update(options)
    return None if options else reason


def engaged(config: FusedOptimizer, run: Run) -> Evidence:
    """Return the share of weights with a fused update, and where the guard runs."""
    update, optimizer = run.update, run.update.optimizer
    weights: Counter[str] = Counter()
    for group in optimizer.param_groups:
        weights[_implementation(optimizer, group)] += len(group["params"])
    kind = weights.most_common(1)[0][0]
    guard = "host reads a flag" if update.revertible is None else "taken back on the device"
    facts = {"implementation": kind, "guard": "in the kernel" if update.in_kernel else guard}
    counted = "weights updated by a fused kernel"
    evidence = Evidence.of_share(weights["fused"], weights.total(), counted, **facts)
    if weights["fused"]:
        return evidence
    for choice in run.choices:
        if choice.key == IMPLEMENTATION:  # the fused one was compared with torch's default
            return replace(evidence, reason=choice.reason, status="skipped")
    reason = fastest_implementation(type(optimizer), run.model)[1]
    default = f"{type(optimizer).__name__} has no fused kernel for these options: {kind}"
    return replace(evidence, reason=reason or default)


def _implementation(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str:
    """Return the implementation that torch's `step` takes by the group's options."""
    if not uses_torch_step(optimizer):
        return "its own step()"
    return next((name for name in ("fused", "foreach") if group.get(name)), "loop")


def fastest_implementation(
    optimizer: type[torch.optim.Optimizer], model: nn.Module
) -> tuple[Options, str | None]:
    """Return options of the fastest implementation, and why it is not fused, if torch knows one."""
    if not is_torch_class(optimizer):
        return {}, f"the step() of {optimizer.__name__} is not torch's own: it is called unchanged"
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    if any(isinstance(m, embeddings) and m.sparse for m in model.modules()):
        return {}, "fused kernels do not support the sparse gradients of its embeddings"
    accepted, reason = inspect.signature(optimizer).parameters, None
    if "fused" in accepted and all(p.is_floating_point() for p in model.parameters()):
        if (reason := _missing_kernel(optimizer, model)) is None:
            return {"fused": True}, None
    if "foreach" in accepted:
        # counters on the device allow a bad update to be reverted without a host sync
        on_cuda = any(p.device.type == "cuda" for p in model.parameters())
        extra = {"capturable": True} if on_cuda and "capturable" in accepted else {}
        return {"foreach": True, **extra}, reason
    return {}, f"{optimizer.__name__} has neither a fused nor a foreach implementation"


def _missing_kernel(optimizer: type[torch.optim.Optimizer], model: nn.Module) -> str | None:
    """Return for which weights torch has no fused kernel, or None; tried on one number of each.

    Which there are depends on class, dtype, device and torch's version: Adagrad's for CUDA came
    with torch 2.12.
    """
    for dtype, device in dict.fromkeys((p.dtype, p.device) for p in model.parameters()):
        scratch = nn.Parameter(torch.zeros(1, dtype=dtype, device=device))
        scratch.grad = torch.zeros_like(scratch)
        try:
            with skip_compiler_import(), torch.no_grad():
                update = optimizer([scratch], fused=True)  # type: ignore[call-arg]
                inspect.unwrap(optimizer.step)(update)  # its wrapper imports the compiler
        except RuntimeError:
            kind = f"{str(dtype).removeprefix('torch.')} on {device.type}"
            return f"torch {torch.__version__} has no fused {optimizer.__name__} for {kind}"
    return None
