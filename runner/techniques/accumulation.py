"""Smaller backward passes that add up to exactly the large batch's gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.data.batch import count, largest_part
from runner.errors import ConfigError
from runner.techniques.base import Evidence, RunBuilder, Technique
from runner.training.run import Run

if TYPE_CHECKING:
    from runner.techniques.memory_prediction import Prediction

KEY = "training.micro_batch"


@dataclass
class Accumulation(Technique):
    """Split each batch into micro-batches: less memory, the same gradient (BatchNorm apart).

    Where no size is named, a step's memory is predicted, and the batch is cut into as few even
    parts as fit; not at all, if it fits whole.
    """

    micro_batch: int | None = None  # samples per backward; null: as many as fit the memory
    share: float = 0.8  # of the free memory that a step may take, where it is predicted

    def __post_init__(self) -> None:
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ConfigError(
                "optimization.accumulation.micro_batch",
                f"{self.micro_batch} is no count",
                "use 1 or more, or null to fit the memory",
            )
        if not 0 < self.share <= 1:
            raise ConfigError(
                "optimization.accumulation.share",
                f"{self.share} is not a share of the free memory",
                "use 0 to 1",
            )

    def apply(self, draft: RunBuilder) -> str | None:
        """Hand the size to the loop, which cuts batches by it."""
        reason = ""
        if draft.micro_batch_asked is None:
            before = len(draft.choices)
            size = int(draft.choose(KEY, lambda: self._decide(draft)))
            draft.micro_batch = largest_part(draft.batch_size, min(size, draft.batch_size))
            reason = draft.choices[before].reason
        if draft.micro_batch < draft.batch_size:
            return None
        whole = f"a batch of {draft.batch_size} already fits in one micro-batch"
        return f"{whole}: {reason}" if self.micro_batch is None and reason else whole

    def _decide(self, draft: RunBuilder) -> tuple[int, str]:
        if self.micro_batch is not None:
            most = min(self.micro_batch, draft.batch_size)
            return largest_part(draft.batch_size, most), "the accumulation technique"
        return fitting(draft, self.share)

    def engaged(self, run: Run) -> Evidence:
        """The number of backward passes that one update is made of."""
        parts = -(-count(run.train.peek()[1]) // run.micro_batch)
        reason = "" if parts > 1 else f"a batch is no larger than {run.micro_batch} samples"
        facts = {"micro_batch": run.micro_batch, "backward_per_update": parts}
        return Evidence(parts > 1, reason, facts)


def fitting(draft: RunBuilder, share: float) -> tuple[int, str]:
    """The micro-batch that cuts the batch into the fewest even parts that fit, and why."""
    from runner.device import memory
    from runner.techniques.memory_prediction import predict

    batch, free = draft.batch_size, memory.room(draft.device)
    tried: dict[int, Prediction] = {}

    def fits(parts: int) -> bool:
        size = -(-batch // parts)
        if size not in tried:
            tried[size] = predict(draft, size)
        return tried[size].fits(draft.device, free, share)

    try:
        most = 1
        while most < batch and not fits(most):
            most = min(2 * most, batch)
        least = most // 2 + 1  # half as many parts did not fit
        while least < most:
            middle = (least + most) // 2
            least, most = (least, middle) if fits(middle) else (middle + 1, most)
        size = -(-batch // most)
        found = tried.get(size) or predict(draft, size)
    except Exception as error:  # whatever a model raises when it is traced
        return batch, f"the memory of a step cannot be predicted ({type(error).__name__}: {error})"
    draft.predicted_bytes = found.peak_on(draft.device)
    beyond = "" if found.fits(draft.device, free, share) else ", and less cannot be"
    return size, f"{found.beside(free)} at {size} samples{beyond}"
