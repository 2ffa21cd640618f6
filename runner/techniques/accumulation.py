"""Smaller backward passes that add up to exactly the large batch's gradient."""

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
SHARE = 0.8  # of the free memory that a step may take
HOLES = 2.0  # times its tensors that a process was seen to hold at worst: the heap's holes
FEW = 4  # samples of the smaller step that is counted
MOMENTS = 2  # of each weight, as Adam keeps them


def apply(knobs: Accumulation, draft: RunBuilder) -> str | None:
    """Hand the size to the loop, which cuts batches by it."""
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
    """The micro-batch that cuts the batch into the fewest even parts that fit, and why."""
    batch, free, cpu = draft.batch_size, memory.room(draft.device), draft.device.kind == "cpu"
    if knobs.micro_batch is not None:
        return largest_part(batch, min(knobs.micro_batch, batch)), "the accumulation technique"
    try:
        fixed, per_sample = _step_bytes(draft)
    except NotRestorable:
        raise
    except Exception as error:  # such as of a model that takes no few samples
        return batch, f"the memory of a step cannot be estimated ({type(error).__name__}: {error})"
    most = SHARE * free / (HOLES if cpu else 1)
    sizes = (-(-batch // parts) for parts in range(1, batch + 1))
    size = next((size for size in sizes if fixed + size * per_sample <= most), 1)
    needed = fixed + size * per_sample
    beyond = "" if needed <= most else ", and less cannot be"
    sides = f"{needed / MIB:,.0f} MiB estimated, {free / MIB:,.0f} MiB free"
    return size, f"{sides} at {size} samples{beyond}"


def _step_bytes(draft: RunBuilder) -> tuple[int, int]:
    """What a step allocates at any size, and for each sample.

    A sample's share is counted, not timed, by two small steps: what the larger one saves more for
    its backward.
    """
    from runner.techniques.probe import saved_bytes, trial_step

    model, few = draft.model, min(FEW, max(1, draft.batch_size // 2))
    small, large = (saved_bytes(model, partial(trial_step, draft, n)) for n in (few, 2 * few))
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    state = trained * (MOMENTS + draft.ema)
    copies = 0
    if draft.device.kind == "cpu":  # elsewhere checkpoints are copied off the device
        copies = state + sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    return trained + state + copies, (large - small) // few


def engaged(knobs: Accumulation, run: Run) -> Evidence:
    """The number of backward passes that one update is made of."""
    parts = -(-count(run.train.peek()[1]) // run.micro_batch)
    reason = "" if parts > 1 else f"a batch is no larger than {run.micro_batch} samples"
    facts = {"micro_batch": run.micro_batch, "backward_per_update": parts}
    return Evidence(parts > 1, reason, facts)
