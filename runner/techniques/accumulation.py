"""Smaller backward passes that add up to exactly the large batch's gradient."""

from __future__ import annotations

from dataclasses import dataclass

from runner.errors import ConfigError
from runner.run import Choice, Draft, Evidence, Run, Technique


@dataclass
class Accumulation(Technique):
    """Split each batch into micro-batches: less memory, the same gradient (BatchNorm apart)."""

    micro_batch: int = 8  # samples per backward, where training.micro_batch names none

    def __post_init__(self) -> None:
        if self.micro_batch < 1:
            raise ConfigError(
                "optimization.accumulation.micro_batch",
                f"{self.micro_batch} is no count",
                "use 1 or more",
            )

    def apply(self, draft: Draft) -> str | None:
        """Hand the size to the loop, which cuts batches by it."""
        if draft.micro_batch_asked is None:
            draft.micro_batch = min(self.micro_batch, draft.batch_size)
            draft.choices.append(
                Choice("training.micro_batch", draft.micro_batch, "the accumulation technique")
            )
        if draft.micro_batch >= draft.batch_size:
            return f"a batch of {draft.batch_size} already fits in one micro-batch"
        return None

    def engaged(self, run: Run) -> Evidence:
        """The number of backward passes that one update is made of."""
        parts = -(-run.train.samples(0) // run.micro_batch)
        return Evidence(
            parts > 1, "", {"micro_batch": run.micro_batch, "backward_per_update": parts}
        )
