"""Gradient accumulation: smaller backward passes that add up to the batch's gradient."""

from __future__ import annotations

from functools import partial

from runner.data.batch import count, largest_part
from runner.device import memory
from runner.models.preserved_state import NotRestorable
from runner.techniques.base import Evidence, RunBuilder
from runner.techniques.config import Accumulation
from runner.training.run import Run

KEY = "training.micro_batch"
MIB = 2**20
SHARE = 0.8  # share of the free memory that a step may take
HOLES = 2.0  # largest observed ratio of process memory to tensors: heap fragmentation
FEW = 4  # samples in the smaller of two counted steps
MOMENTS = 2  # per weight, as in Adam


def apply(knobs: Accumulation, draft: RunBuilder) -> str | None:
    """Set the draft's micro-batch, by which the loop splits batches."""
    reason = ""
    if draft.micro_batch_asked is None:
        size = int(draft.choose(KEY, lambda: _decide(knobs, draft)))
        draft.micro_batch = largest_part(draft.batch_size, min(size, draft.batch_size))
        reason = next(choice.reason for choice in draft.choices if choice.key == KEY)
    if draft.micro_batch < draft.batch_size:
        return None
    whole = f"a batch of {draft.batch_size} already fits in one micro-batch"
    return f"{whole}: {reason}" if knobs.micro_batch is None and reason else whole


def _decide(knobs: Accumulation, draft: RunBuilder) -> tuple[int, str]:
    """Return the micro-batch for the fewest even parts that fit in memory, and the reason."""
    batch, free, cpu = draft.batch_size, memory.room(draft.device), draft.device.kind == "cpu"
    if knobs.micro_batch is not None:
        return largest_part(batch, min(knobs.micro_batch, batch)), "the accumulation technique"
    try:
        fixed, per_sample = _step_bytes(draft)
    except NotRestorable:
        raise
    except Exception as error:  # such as a model with a fixed batch size
        return batch, f"the memory of a step cannot be estimated ({type(error).__name__}: {error})"
    most = SHARE * free / (HOLES if cpu else 1)
    sizes = (-(-batch // parts) for parts in range(1, batch + 1))
    size = next((size for size in sizes if fixed + size * per_sample <= most), 1)
    needed = fixed + size * per_sample
    beyond = "" if needed <= most else ", the smallest possible"
    sides = f"{needed / MIB:,.0f} MiB estimated, {free / MIB:,.0f} MiB free"
    return size, f"{sides} at {size} samples{beyond}"


def _step_bytes(draft: RunBuilder) -> tuple[int, int]:
    """Return the bytes of a step that do not depend on the batch size, and those per sample.

    Bytes per sample are the difference in tensors saved for backward between two small steps.
    """
    from runner.techniques.probe import saved_bytes, trial_step

    model, few = draft.model, min(FEW, max(1, draft.batch_size // 2))
    small, large = (saved_bytes(model, partial(trial_step, draft, n)) for n in (few, 2 * few))
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    state = trained * (MOMENTS + draft.ema)
    copies = 0
    if draft.device.kind == "cpu":  # on other devices checkpoints are copied to the host
        copies = state + sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    return trained + state + copies, (large - small) // few


def engaged(knobs: Accumulation, run: Run) -> Evidence:
    """Return the number of backward passes per update."""
    parts = -(-count(run.train.peek()[1]) // run.micro_batch)
    reason = "" if parts > 1 else f"a batch is no larger than {run.micro_batch} samples"
    facts = {"micro_batch": run.micro_batch, "backward_per_update": parts}
    return Evidence(parts > 1, reason, facts)
