"""The row of a small batch on the CPU, by numpy: there a kernel of torch costs more than its work.

A fifth of what `Measure.row` takes on a batch of a few thousand values, and the same numbers up
to rounding.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from runner.checks.inputs.measure import (
    LARGEST,
    MARKS,
    MOST_FEATURES,
    ROUNDED,
    TINY,
    Measure,
    Plan,
)

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
                up_to = np.sort(values).searchsorted(np.arange(plan.shares + 1))
                counts = (up_to[1:] - up_to[:-1]).tolist()
            continue
        if found[name].dtype not in FLOATS:
            values = values.astype(np.float32)
        flat = values.reshape(-1)
        ends = float(flat.min()), float(flat.max())  # NaN and Inf come through
        if name in plan.brief:
            scalars += ends
            continue
        mean, deviation = _moments(flat, max(-ends[0], ends[1]))
        scalars += [*ends, mean / (deviation + TINY), deviation]
        if name == plan.main:
            marks = _marks(measure, values)
    row = np.asarray(scalars + counts + marks)
    row = np.where(np.isfinite(row), row.clip(-LARGEST, LARGEST), row)  # float32 holds no more
    single: list[float] = row.astype(np.float32).tolist()
    return single


def _moments(flat: np.ndarray, largest: float) -> tuple[float, float]:
    """Mean and deviation; in two passes over float64 where one over float32 would not do."""
    mean, square = float(flat.sum()) / flat.size, float(flat @ flat) / flat.size
    if square - mean * mean > ROUNDED * square:  # false where a sum or a square overflowed
        return mean, (square - mean * mean) ** 0.5
    unit = largest or 1.0
    shares = flat.astype(np.float64) / unit
    mean = float(shares.mean())
    shares -= mean
    return mean * unit, float(shares @ shares / flat.size) ** 0.5 * unit


def _marks(measure: Measure, values: np.ndarray) -> list[float]:
    samples = values.reshape(len(values), -1)
    samples = samples[:, :: -(-samples.shape[1] // MOST_FEATURES)]
    shadow = samples @ measure.direction(torch.from_numpy(samples[:1])).numpy()
    shadow.sort()
    last = len(shadow) - 1
    chosen = [float(shadow[round(i * last / (MARKS - 1))]) for i in range(MARKS)]
    distinct = 1 + int((shadow[1:] - shadow[:-1] > (shadow[-1] - shadow[0]) * 1e-6).sum())
    return [*chosen, distinct]
