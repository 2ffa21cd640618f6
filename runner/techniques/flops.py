"""How much a model computes: what decides whether a technique is worth its overhead."""

from __future__ import annotations

from runner import modes
from runner.run import Draft, call, count

SAMPLES = 8  # that are counted, and scaled up to a micro-batch


def forward_mflop(draft: Draft) -> float:
    """Millions of floating-point operations in a forward over a micro-batch; counted once.

    A rule on this number repeats, where a race would come out differently from run to run.
    """
    if draft.sample_mflop is None:
        try:
            draft.sample_mflop = _count(draft, SAMPLES)
        except Exception:  # such as a model that knows its batch size
            draft.sample_mflop = _count(draft, draft.micro_batch)
    return draft.sample_mflop * draft.micro_batch


def _count(draft: Draft, samples: int) -> float:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from runner.techniques import trial

    inputs, target = trial.batch(draft, samples)
    with modes.evaluating(draft.model), torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            call(draft.model, inputs)
    return float(counter.get_total_flops()) / count(target) / 1e6
