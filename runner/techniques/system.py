"""The process around the model: how many threads an operator is cut into."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.errors import ConfigError
from runner.run import Choice, Draft, Evidence, Run, Technique, call, count

if TYPE_CHECKING:
    from runner.device.device import Device

log = logging.getLogger("runner")


@dataclass
class System(Technique):
    """One thread for a model too small to share out; torch's own number for any other.

    Threads wait for each other by spinning. Where operators are tiny they only wait, and beside a
    busy neighbour a step of half a millisecond takes a hundred.
    """

    small_mflop: float = 30.0  # a forward below this is not worth sharing out

    def __post_init__(self) -> None:
        if self.small_mflop < 0:
            raise ConfigError("optimization.system.small_mflop", "is negative", "use 0 or more")

    def unavailable(self, device: Device) -> str | None:
        """An accelerator's kernels do not run in these threads."""
        return None if device.kind == "cpu" else f"threads matter little on {device.kind}"

    def apply(self, draft: Draft) -> str | None:
        """Count a forward's operations and set the threads; a rule and no race, so it repeats."""
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        if draft.threads_asked is not None:
            return None  # somebody knows better
        inputs, target = draft.sample(8)
        training = draft.model.training
        draft.model.eval()
        try:
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                call(draft.model, inputs)
        finally:
            draft.model.train(training)
        mflop = counter.get_total_flops() / count(target) * draft.micro_batch / 1e6
        before = torch.get_num_threads()
        threads = 1 if mflop < self.small_mflop else before
        draft.scope.callback(torch.set_num_threads, before)
        torch.set_num_threads(threads)
        reason = f"a forward takes {mflop:,.1f} MFLOP, "
        reason += "too little to share out" if threads == 1 else "enough to share out"
        draft.choices.append(Choice("device.threads", threads, reason))
        load = os.getloadavg()[0]
        if threads > 1 and load > 1:
            log.warning(
                "the machine is busy (load %.1f on %d cores): threads that wait for a core slow "
                "each other down; fewer may be faster (device.threads=%d)",
                load, draft.device.cores, max(1, draft.device.cores - round(load)),
            )  # fmt: skip
        return None

    def engaged(self, run: Run) -> Evidence:
        """The number of threads, read back."""
        return Evidence(True, "", {"threads": run.device.threads})
