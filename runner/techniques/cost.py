"""What a step costs: operations of a forward, and how many steps pay compiling back."""

from __future__ import annotations

from functools import partial
from math import inf, isfinite
from time import perf_counter
from typing import Any

from runner.data.batch import call, count
from runner.models import modes
from runner.techniques.base import RunBuilder

COLD_S = 30.0  # what compiling a small transformer takes the first time
GAIN = 0.15  # of a step, that compiling saves on a CPU when 16 bits and fused kernels are there
PASSES = 6  # that are timed, on each machine as many; the first ones are never the fastest
ASSUMED_S = 0.01  # taken for a pass of a model that cannot be timed
SAMPLES = 8  # that are counted, and scaled up to a micro-batch


def forward_mflop(draft: RunBuilder) -> float:
    """Millions of floating-point operations in a forward over a micro-batch; counted once.

    A rule on this number repeats, where a race would come out differently from run to run. A
    model that must not be called before training counts as large.
    """
    return _counted(draft)[0] * draft.micro_batch


def product_mflop(draft: RunBuilder) -> float:
    """The same for one of its products or convolutions, on average."""
    return forward_mflop(draft) / max(1, _counted(draft)[1])


def describe_forward(draft: RunBuilder) -> str:
    """What a forward takes, for a reason."""
    mflop = forward_mflop(draft)
    if isfinite(mflop):
        return f"a forward takes {mflop:,.1f} MFLOP"
    return f"a forward is not counted, {draft.flops_unknown}"


def _counted(draft: RunBuilder) -> tuple[float, int]:
    from runner.techniques import trial

    if draft.sample_mflop is None:
        try:
            draft.sample_mflop = _count(draft, SAMPLES)
        except trial.NotRestorable as error:
            draft.sample_mflop, draft.flops_unknown = (inf, 1), str(error)
        except Exception:  # such as a model that knows its batch size
            draft.sample_mflop = _count(draft, draft.micro_batch)
    return draft.sample_mflop


def _count(draft: RunBuilder, samples: int) -> tuple[float, int]:
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
    with trial.untouched(draft), modes.evaluation_mode(draft.model), torch.no_grad():
        with Products() as products, FlopCounterMode(display=False) as counter:  # type: ignore[no-untyped-call]
            call(draft.model, inputs)
    return float(counter.get_total_flops()) / count(target) / 1e6, products.seen


def compile_break_even(min_steps: int | None, draft: RunBuilder) -> str | None:
    """Why so short a run should stay eager, or None.

    With no number given, a step of a copy is timed: compiling pays back once the time that it
    saves (some 15 % of each step) is more than it takes (half a minute, the first time).
    """
    if min_steps is not None:
        short = draft.total_steps < min_steps
        return f"{draft.total_steps:,} steps, and min_steps={min_steps}" if short else None
    needed = int(draft.choose("optimization.compile.min_steps", partial(_break_even, draft)))
    if draft.total_steps >= needed:
        return None
    return f"{draft.total_steps:,} steps do not pay it back; that takes {needed:,} or more"


def _break_even(draft: RunBuilder) -> tuple[int, str]:
    """The number of steps, and what it rests on."""
    from runner.techniques import trial

    try:
        seconds = _step_seconds(draft)
        measured = f"forward and backward take {1e3 * seconds:.3g} ms"
    except trial.NotRestorable as error:
        seconds = ASSUMED_S
        measured = f"the model is not timed, {error}; taken for {1e3 * seconds:.3g} ms a step"
    reason = f"{measured}; compiling takes up to {COLD_S:.0f} s and saves some {GAIN:.0%}"
    return _rounded(COLD_S / GAIN / seconds), reason


def _rounded(steps: float) -> int:
    """To two digits: the timing is no better."""
    return int(float(f"{steps:.1e}"))


def _step_seconds(draft: RunBuilder) -> float:
    """The fastest of PASSES forward and backward passes of a copy over a micro-batch.

    What is not the run's own (cold caches, neighbours on the machine) only ever adds: the fastest
    is about the same each time.
    """
    import torch

    from runner.techniques import trial

    inputs, target = trial.batch(draft, draft.micro_batch)
    seconds: list[float] = []
    with trial.model_copy(draft) as copy:
        for _ in range(PASSES):
            start = perf_counter()
            try:
                with trial.entered(copy):
                    loss = copy.objective(call(copy.forward, inputs), target)
                torch.autograd.backward(loss)
            except Exception:
                if seconds:  # training will meet it, and say where
                    break
                raise
            draft.device.synchronize()
            seconds.append(perf_counter() - start)
    return min(seconds)
