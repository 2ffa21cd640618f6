"""The row of a small batch on the CPU, by numpy: there a kernel of torch costs more than its work.

A fifth of what `Measure.row` takes on a batch of a few thousand values, and the same numbers up
to rounding.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from runner.checks.inputs.measure import MARKS, MOST_FEATURES, TINY, Measure, Plan

FEW = 1 << 16  # values, above which torch is as fast
FLOATS = (torch.float32, torch.float64)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def numbers(measure: Measure, found: dict[str, Tensor], plan: Plan) -> list[float]:
    """The row of that batch, on the host; waits for an accelerator."""
    for entry in plan.entries:
        tensor = found[entry.leaf]
        small = tensor.device.type == "cpu" and tensor.numel() <= FEW
        if not small or tensor.dtype not in FLOATS + WHOLE:
            row: list[float] = measure.row(found, plan).tolist()
            return row
    with np.errstate(all="ignore"):  # what overflows is a finding
        return _row(measure, found, plan)


def _row(measure: Measure, found: dict[str, Tensor], plan: Plan) -> list[float]:
    scalars: list[float] = []
    counts: list[float] = []
    marks: list[float] = []
    for name in dict.fromkeys(entry.leaf for entry in plan.entries):
        values = found[name].detach().numpy()
        if name == plan.labels:
            ignored = measure.known.ignored
            told = values if ignored is None else np.where(values == ignored, 0, values)
            scalars += [float(told.min()), float(told.max())]
            if plan.shares:
                counts = (values[:, None] == np.arange(plan.shares)).sum(0).tolist()
            continue
        if found[name].dtype not in FLOATS:
            values = values.astype(np.float32)
        flat = values.reshape(-1)
        mean = float(flat.sum()) / flat.size
        deviation = max(0.0, float(flat @ flat) / flat.size - mean * mean) ** 0.5
        ends = float(flat.min()), float(flat.max())  # NaN and Inf come through
        scalars += [*ends, mean / (deviation + TINY), deviation]
        if name == plan.main:
            marks = _marks(measure, values)
    single: list[float] = np.asarray(scalars + counts + marks).astype(np.float32).tolist()
    return single


def _marks(measure: Measure, values: np.ndarray) -> list[float]:
    samples = values.reshape(len(values), -1)
    samples = samples[:, :: -(-samples.shape[1] // MOST_FEATURES)]
    shadow = samples @ measure.direction(torch.from_numpy(samples[:1])).numpy()
    shadow.sort()
    last = len(shadow) - 1
    chosen = [float(shadow[round(i * last / (MARKS - 1))]) for i in range(MARKS)]
    distinct = 1 + int((shadow[1:] - shadow[:-1] > (shadow[-1] - shadow[0]) * 1e-6).sum())
    return [*chosen, distinct]
