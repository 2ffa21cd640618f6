"""Gradient accumulation: smaller backward passes that add up to the batch's gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from runner.core.device import memory
from runner.core.errors import error_text
from runner.core.interfaces.batch import batch_size_of, largest_slice
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, NotNeeded, RunBuilder
from runner.core.preserved_state import NotRestorable
from runner.core.schemas.optimization import Accumulation

KEY = "training.micro_batch"
MIB = 2**20
MEMORY_SHARE = 0.8  # share of the free memory that a step may take
FRAGMENTATION = 2.0  # largest observed ratio of process memory to tensors: heap fragmentation
NO_ESTIMATE = "the memory of a step cannot be estimated"
FEW_SAMPLES = 4  # samples in the smaller of two counted steps
MOMENTS_PER_WEIGHT = 2  # per weight, as in Adam


def apply(config: Accumulation, builder: RunBuilder) -> str | None:
    """Set the builder's micro-batch, by which the loop splits batches."""
    reason = ""
    if builder.requested_micro_batch is None:
        size = int(builder.choose(KEY, lambda: _choose_micro_batch(config, builder)))
        builder.micro_batch = largest_slice(builder.batch_size, min(size, builder.batch_size))
        reason = next(choice.reason for choice in builder.choices if choice.key == KEY)
    if builder.micro_batch < builder.batch_size:
        return None
    fits = f"a batch of {builder.batch_size} already fits in one micro-batch"
    if config.micro_batch is not None or not reason or reason.startswith(NO_ESTIMATE):
        return f"{fits}: {reason}" if config.micro_batch is None and reason else fits
    return NotNeeded(f"{fits}: {reason}")


def _choose_micro_batch(config: Accumulation, builder: RunBuilder) -> tuple[int, str]:
    """Return the micro-batch for the fewest even parts that fit in memory, and the reason."""
    batch, free = builder.batch_size, memory.allocatable_bytes(builder.device)
    if config.micro_batch is not None:
        return largest_slice(batch, min(config.micro_batch, batch)), "the accumulation technique"
    try:
        fixed, per_sample = step_bytes(builder)
    except NotRestorable:
        raise
    except Exception as error:  # such as a model with a fixed batch size
        return batch, f"{NO_ESTIMATE} ({error_text(error)})"
    budget = usable_bytes(builder, MEMORY_SHARE)
    sizes = (-(-batch // parts) for parts in range(1, batch + 1))
    size = next((size for size in sizes if fixed + size * per_sample <= budget), 1)
    needed = fixed + size * per_sample
    suffix = "" if needed <= budget else ", the smallest possible"
    memory_text = f"{needed / MIB:,.0f} MiB estimated, {free / MIB:,.0f} MiB free"
    return size, f"{memory_text} at {size} samples{suffix}"


def usable_bytes(builder: RunBuilder, share: float) -> float:
    """Return the bytes of tensors that fit in a share of the free memory."""
    fragmentation = FRAGMENTATION if builder.device.kind == "cpu" else 1.0
    return share * memory.allocatable_bytes(builder.device) / fragmentation


def step_bytes(
    builder: RunBuilder, outputs: Callable[[Any], bool] | None = None
) -> tuple[int, int]:
    """Return the bytes of a step that do not depend on the batch size, and those per sample.

    Bytes per sample are the difference in tensors saved for backward between two small steps;
    `outputs` is that of `saved_bytes`.
    """
    from runner.core.techniques.model_calls import probe_step
    from runner.core.techniques.probe import saved_bytes

    model, samples = builder.model, min(FEW_SAMPLES, max(1, builder.batch_size // 2))
    steps = [partial(probe_step, builder, n) for n in (samples, 2 * samples)]
    small, large = (saved_bytes(model, step, outputs=outputs) for step in steps)
    gradient_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    optimizer_bytes = gradient_bytes * (MOMENTS_PER_WEIGHT + builder.ema)
    copied = 0
    if builder.device.kind == "cpu":  # on other devices checkpoints are copied to the host
        copied = optimizer_bytes + sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    return gradient_bytes + optimizer_bytes + copied, (large - small) // samples


def engaged(config: Accumulation, run: Run) -> Evidence:
    """Return the number of backward passes per update."""
    parts = -(-batch_size_of(run.train.peek()[1]) // run.micro_batch)
    reason = "" if parts > 1 else f"a batch is no larger than {run.micro_batch} samples"
    facts = {"micro_batch": run.micro_batch, "backward_per_update": parts}
    return Evidence(parts > 1, reason, facts)
