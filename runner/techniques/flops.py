"""How much a model computes: what decides whether a technique is worth its overhead."""

from __future__ import annotations

from runner.run import Draft, call, count

SAMPLES = 8  # that are counted, and scaled up to a micro-batch


def forward_mflop(draft: Draft) -> float:
    """Millions of floating-point operations in a forward over a micro-batch; counted once.

    A rule on this number repeats, where a race would come out differently from run to run.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    if draft.sample_mflop is None:
        inputs, target = draft.sample(SAMPLES)
        training = draft.model.training
        draft.model.eval()
        try:
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                call(draft.model, inputs)
        finally:
            draft.model.train(training)
        draft.sample_mflop = counter.get_total_flops() / count(target) / 1e6
    return draft.sample_mflop * draft.micro_batch
