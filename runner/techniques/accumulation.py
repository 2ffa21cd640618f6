"""Smaller backward passes that add up to exactly the large batch's gradient."""

from __future__ import annotations

from bisect import bisect_left

from runner.data.batch import count, largest_part
from runner.device import memory
from runner.techniques.base import Evidence, RunBuilder
from runner.techniques.config import Accumulation
from runner.training.run import Run

KEY = "training.micro_batch"


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
    if knobs.micro_batch is not None:
        most = min(knobs.micro_batch, draft.batch_size)
        return largest_part(draft.batch_size, most), "the accumulation technique"
    return fitting(draft, knobs.share)


def engaged(knobs: Accumulation, run: Run) -> Evidence:
    """The number of backward passes that one update is made of."""
    parts = -(-count(run.train.peek()[1]) // run.micro_batch)
    reason = "" if parts > 1 else f"a batch is no larger than {run.micro_batch} samples"
    facts = {"micro_batch": run.micro_batch, "backward_per_update": parts}
    return Evidence(parts > 1, reason, facts)


def fitting(draft: RunBuilder, share: float) -> tuple[int, str]:
    """The micro-batch that cuts the batch into the fewest even parts that fit, and why."""
    from runner.techniques.memory_prediction import predict

    batch, free = draft.batch_size, memory.room(draft.device)

    def fits(parts: int) -> bool:
        return predict(draft, -(-batch // parts)).fits(draft.device, free, share)

    try:
        parts = 1 if fits(1) else 2 + bisect_left(range(2, batch), True, key=fits)
        size = -(-batch // parts)
        prediction = predict(draft, size)
    except Exception as error:  # whatever a model raises when it is traced
        return batch, f"the memory of a step cannot be predicted ({type(error).__name__}: {error})"
    draft.predicted_bytes = prediction.peak_on(draft.device)
    beyond = "" if prediction.fits(draft.device, free, share) else ", and less cannot be"
    return size, f"{prediction.beside(free)} at {size} samples{beyond}"
