"""From how many steps on compiling pays back."""

from __future__ import annotations

from functools import partial
from time import perf_counter

from runner.batch import call
from runner.technique import Draft

COLD_S = 30.0  # what compiling a small transformer takes the first time
GAIN = 0.15  # of a step, that compiling saves on a CPU when 16 bits and fused kernels are there
PASSES = 6  # that are timed, on each machine as many; the first ones are never the fastest
ASSUMED_S = 0.01  # taken for a pass of a model that cannot be timed


def not_worth_it(min_steps: int | None, draft: Draft) -> str | None:
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


def _break_even(draft: Draft) -> tuple[int, str]:
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


def _step_seconds(draft: Draft) -> float:
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
