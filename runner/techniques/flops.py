"""How much a model computes: what decides whether a technique is worth its overhead."""

from __future__ import annotations

from math import inf, isfinite
from typing import Any

from runner import modes
from runner.batch import call, count
from runner.technique import Draft

SAMPLES = 8  # that are counted, and scaled up to a micro-batch


def forward_mflop(draft: Draft) -> float:
    """Millions of floating-point operations in a forward over a micro-batch; counted once.

    A rule on this number repeats, where a race would come out differently from run to run. A
    model that must not be called before training counts as large.
    """
    return _counted(draft)[0] * draft.micro_batch


def product_mflop(draft: Draft) -> float:
    """The same for one of its products or convolutions, on average."""
    return forward_mflop(draft) / max(1, _counted(draft)[1])


def describe_forward(draft: Draft) -> str:
    """What a forward takes, for a reason."""
    mflop = forward_mflop(draft)
    if isfinite(mflop):
        return f"a forward takes {mflop:,.1f} MFLOP"
    return f"a forward is not counted, {draft.flops_unknown}"


def _counted(draft: Draft) -> tuple[float, int]:
    from runner.techniques import trial

    if draft.sample_mflop is None:
        try:
            draft.sample_mflop = _count(draft, SAMPLES)
        except trial.NotRestorable as error:
            draft.sample_mflop, draft.flops_unknown = (inf, 1), str(error)
        except Exception:  # such as a model that knows its batch size
            draft.sample_mflop = _count(draft, draft.micro_batch)
    return draft.sample_mflop


def _count(draft: Draft, samples: int) -> tuple[float, int]:
    """For a sample, and how many products and convolutions there are."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode, flop_registry

    from runner.techniques import trial

    class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
        seen = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen += func._overloadpacket in flop_registry
            return func(*args, **(kwargs or {}))

    inputs, target = trial.batch(draft, samples)
    with trial.untouched(draft), modes.evaluating(draft.model), torch.no_grad():
        with Products() as products, FlopCounterMode(display=False) as counter:  # type: ignore[no-untyped-call]
            call(draft.model, inputs)
    return float(counter.get_total_flops()) / count(target) / 1e6, products.seen
