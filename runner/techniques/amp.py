"""Automatic mixed precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from runner.device.device import Device
from runner.techniques.base import Choice, Evidence, RunBuilder
from runner.techniques.config import Amp, Precision
from runner.techniques.cost import forward_cost
from runner.training.run import Run

KEY = "optimization.amp.dtype"
ENABLED = "optimization.amp.enabled"


def unavailable(knobs: Amp, device: Device) -> str | None:
    """Return a reason if `auto` finds no fast 16-bit dtype, or a named dtype does not work."""
    able = device.capabilities
    if knobs.dtype is Precision.auto:
        fast = able.bf16_fast or able.fp16_fast
        return None if fast else f"{device.name} has no fast 16-bit matrix product"
    works = able.bf16 if knobs.dtype is Precision.bf16 else able.fp16
    return None if works else f"{device.name} has no {knobs.dtype.value}"


def apply(knobs: Amp, draft: RunBuilder) -> str | None:
    """Enter autocast around forward and loss; fp16 also gets a loss scale."""
    complex_weights = [n for n, p in draft.model.named_parameters() if p.is_complex()]
    if complex_weights:
        return f"{complex_weights[0]} is complex, which has no 16-bit type"
    if knobs.min_mflop:
        cost = forward_cost(draft)
        mflop = cost.mflop / max(1, cost.products)
        if mflop < knobs.min_mflop:
            return f"a product takes {mflop:,.1f} MFLOP: casting costs more than it saves"
    autocast: list[partial[Any]] = []

    def turn(run: Run, on: bool) -> None:
        (run.contexts.append if on else run.contexts.remove)(autocast[0])

    measured = draft.measure("amp", turn)
    if not measured and (reason := _by_rule(knobs, draft)):
        return reason
    dtype = _choose_dtype(knobs, draft)
    if dtype is torch.float16:
        draft.loss_scale = knobs.initial_scale
    # FSDP frees gathered weights after each block: autocast must not cache 16-bit copies
    cached = draft.world is None or draft.world.kind != "fsdp"
    autocast.append(partial(torch.autocast, draft.device.kind, dtype=dtype, cache_enabled=cached))
    draft.contexts.append(autocast[0])
    return None


def _by_rule(knobs: Amp, draft: RunBuilder) -> str | None:
    """Return why an optimization level skips it in a run too short to measure, or None."""
    able = draft.device.capabilities
    fast = able.fp16_fast if knobs.dtype is Precision.fp16 else able.bf16_fast or able.fp16_fast
    if fast or not (draft.measures or ENABLED in draft.recorded):
        return None
    reason = f"{draft.device.name} has no fast {knobs.dtype.value} product, and "
    reason += f"{draft.total_steps:,} steps are too few to measure the gain"
    draft.choose(ENABLED, lambda: (False, reason))
    return reason


def _choose_dtype(knobs: Amp, draft: RunBuilder) -> torch.dtype:
    automatic = knobs.dtype is Precision.auto
    slow_bf16 = automatic and not draft.device.capabilities.bf16_fast
    fp16 = knobs.dtype is Precision.fp16 or slow_bf16
    if automatic:
        reason = "no fast bf16 here" if fp16 else "bf16 is fast and needs no loss scale"
        draft.choices.append(Choice(KEY, "fp16" if fp16 else "bf16", reason))
    elif fp16 and draft.device.kind == "cpu":
        draft.choices.append(Choice(KEY, "fp16", "requested; 20 to 30 times slower on a CPU"))
    return torch.float16 if fp16 else torch.bfloat16


def engaged(knobs: Amp, run: Run) -> Evidence:
    """Return the share of layers with all products in 16 bits, and dtypes of products and weights.

    A layer is the innermost module around a matrix product, a convolution or attention.
    """
    from runner.techniques.layer_evidence import product_dtypes

    products = product_dtypes(run)
    low = sum(types <= {torch.float16, torch.bfloat16} for types in products.values())
    facts: dict[str, Any] = {
        "products": _count(dtype for types in products.values() for dtype in types),
        "weights": _count(p.dtype for p in run.model.parameters()),
    }
    if run.update.scale is not None:
        facts["loss_scale"] = float(run.update.scale.value)
    return Evidence.of_share(low, len(products), "layers with all products in 16 bits", **facts)


def _count(dtypes: Iterable[torch.dtype]) -> dict[str, int]:
    return dict(Counter(str(dtype).removeprefix("torch.") for dtype in dtypes))
