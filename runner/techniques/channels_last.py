"""Convolutions over memory in NHWC order."""

from __future__ import annotations

from dataclasses import dataclass

from runner.batch import Batch
from runner.run import Run
from runner.technique import Draft, Evidence, Technique
from runner.techniques.probe import outputs


@dataclass
class ChannelsLast(Technique):
    """Helps models with convolutions, where the kernels are written for NHWC."""

    def apply(self, draft: Draft) -> str | None:
        """Lay weights and batches out in NHWC order."""
        import torch

        def place(batch: Batch) -> Batch:
            inputs = batch[0]
            if isinstance(inputs, torch.Tensor) and inputs.ndim == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            return inputs, batch[1]

        if not any(isinstance(m, torch.nn.Conv2d) for m in draft.model.modules()):
            return "the model has no 2-d convolution"
        draft.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        draft.placements.append(place)
        return None

    def engaged(self, run: Run) -> Evidence:
        """The memory order behind the first and the last convolution."""
        import torch

        layers = [m for m in run.model.modules() if isinstance(m, torch.nn.Conv2d)]
        seen = [o.is_contiguous(memory_format=torch.channels_last) for o in outputs(run, layers)]
        facts = {"nhwc_after_first": seen[:1] == [True], "nhwc_after_last": seen[-1:] == [True]}
        took = all(facts.values())
        return Evidence(took, "" if took else "some convolution puts out NCHW", facts)
