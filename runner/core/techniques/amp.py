"""Automatic mixed precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from runner.core.device.device import Device
from runner.core.findings import Choice
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, RunBuilder
from runner.core.schemas.optimization import Amp, Precision
from runner.core.techniques.cost import forward_cost

KEY = "optimization.amp.dtype"


def unavailable(config: Amp, device: Device) -> str | None:
    """Return a reason if `auto` finds no fast 16-bit dtype, or a named dtype does not work."""
    capabilities = device.capabilities
    if config.dtype is Precision.auto:
        fast = capabilities.bf16_fast or capabilities.fp16_fast
        return None if fast else f"{device.name} has no fast 16-bit matrix product"
    supported = capabilities.bf16 if config.dtype is Precision.bf16 else capabilities.fp16
    return None if supported else f"{device.name} has no {config.dtype.value}"


def apply(config: Amp, builder: RunBuilder) -> str | None:
    """Enter autocast around forward and loss; fp16 also gets a loss scale."""
    complex_weights = [n for n, p in builder.model.named_parameters() if p.is_complex()]
    if complex_weights:
        return f"{complex_weights[0]} is complex, which has no 16-bit type"
    if config.min_mflop:
        cost = forward_cost(builder)
        mflop = cost.mflop / max(1, cost.products)
        if mflop < config.min_mflop:
            return f"a product takes {mflop:,.1f} MFLOP: casting costs more than it saves"
    autocast: list[partial[Any]] = []

    def set_enabled(run: Run, on: bool) -> None:
        (run.contexts.append if on else run.contexts.remove)(autocast[0])

    if reason := builder.skip_reason("amp"):
        return reason
    builder.add_switch("amp", set_enabled)
    dtype = _choose_dtype(config, builder)
    if dtype is torch.float16:
        builder.loss_scale = config.initial_scale
    # of weights that a forward gathers and frees no 16-bit copies are kept
    caches, kind = not builder.has_temporary_weights, builder.device.kind
    autocast.append(partial(torch.autocast, kind, dtype=dtype, cache_enabled=caches))
    builder.contexts.append(autocast[0])
    return None


def _choose_dtype(config: Amp, builder: RunBuilder) -> torch.dtype:
    automatic = config.dtype is Precision.auto
    slow_bf16 = automatic and not builder.device.capabilities.bf16_fast
    fp16 = config.dtype is Precision.fp16 or slow_bf16
    if automatic:
        reason = "no fast bf16 here" if fp16 else "bf16 is fast and needs no loss scale"
        builder.choices.append(Choice(KEY, "fp16" if fp16 else "bf16", reason))
    elif fp16 and builder.device.kind == "cpu":
        builder.choices.append(Choice(KEY, "fp16", "requested; 20 to 30 times slower on a CPU"))
    return torch.float16 if fp16 else torch.bfloat16


def engaged(config: Amp, run: Run) -> Evidence:
    """Return the share of layers (innermost modules around a product) with products in 16 bits."""
    from runner.core.techniques.probe import product_dtypes

    products = product_dtypes(run)
    lowered = sum(types <= {torch.float16, torch.bfloat16} for types in products.values())
    facts: dict[str, Any] = {
        "products": _count_dtypes(dtype for types in products.values() for dtype in types),
        "weights": _count_dtypes(p.dtype for p in run.model.parameters()),
    }
    if run.update.scale is not None:
        facts["loss_scale"] = float(run.update.scale.value)
    return Evidence.of_share(lowered, len(products), "layers with all products in 16 bits", **facts)


def _count_dtypes(dtypes: Iterable[torch.dtype]) -> dict[str, int]:
    return dict(Counter(str(dtype).removeprefix("torch.") for dtype in dtypes))
