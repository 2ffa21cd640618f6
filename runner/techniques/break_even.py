"""From how many steps on compiling pays back."""

from __future__ import annotations

import logging
from functools import partial
from time import perf_counter

from runner.batch import call
from runner.technique import Draft

log = logging.getLogger("runner")

COLD_S = 30.0  # what compiling a small transformer takes the first time
GAIN = 0.15  # of a step, that compiling saves on a CPU when 16 bits and fused kernels are there
WARM_UP = 2  # passes: the first ones wait for threads, memory and caches
LEAST, MOST = 3, 200  # passes that are timed
TIMED_S = 0.2  # after which there are enough
CLEARLY = 10  # times too few steps: no closer look would change that


def not_worth_it(min_steps: int | None, draft: Draft) -> str | None:
    """Why so short a run should stay eager, or None.

    With no number given, a step is timed: compiling pays back once the time that it saves
    (some 15 % of each step) is more than it takes (half a minute, the first time).
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
    worth = COLD_S / GAIN  # seconds of steps
    seconds = _step_seconds(draft, enough=worth / draft.total_steps / CLEARLY)
    reason = (
        f"forward and backward take {1e3 * seconds:.3g} ms; compiling takes up to {COLD_S:.0f} s "
        f"and saves some {GAIN:.0%}"
    )
    return _rounded(worth / seconds), reason


def _rounded(steps: float) -> int:
    """To two digits: the timing is no better."""
    return int(float(f"{steps:.1e}"))


def _step_seconds(draft: Draft, enough: float) -> float:
    """The fastest of many forward and backward passes over a micro-batch; nothing changes.

    What is not the run's own (cold caches, neighbours on the machine) only ever adds: the fastest
    is about the same each time. Once one takes less than `enough`, a few are.
    """
    import torch

    from runner.techniques import trial

    inputs, target = trial.batch(draft, draft.micro_batch)

    def lap() -> float:
        start = perf_counter()
        with trial.entered(draft):
            loss = draft.objective(call(draft.forward, inputs), target)
        torch.autograd.backward(loss)
        draft.device.synchronize()
        return perf_counter() - start

    with trial.untouched(draft):
        fastest, timed, began = lap(), 0, perf_counter()
        try:
            for _ in range(WARM_UP - 1):
                lap()
            while timed < MOST and (timed < LEAST or perf_counter() - began < TIMED_S):
                fastest, timed = min(fastest, lap()), timed + 1
                if timed >= LEAST and fastest < enough:
                    break
        except Exception:  # the first went well: training will meet it, and say where
            log.debug("a pass that was timed failed", exc_info=True)
    for parameter in draft.model.parameters():
        parameter.grad = None
    return fastest
