"""What a step costs: operations of a forward, time of a step, steps that pay compiling back."""

from __future__ import annotations

from contextlib import ExitStack
from math import inf
from time import perf_counter
from typing import Any

import torch

from runner.data.batch import call, count
from runner.models import modes
from runner.models.preserved_state import NotRestorable
from runner.techniques import probe
from runner.techniques.base import ForwardCost, RunBuilder
from runner.techniques.products import ProductCounter
from runner.training.recovery import is_out_of_memory, release_references

COLD_S = 30.0  # what compiling a small transformer takes the first time
TRY_SHARE = 0.1  # of a run, that it may lose by compiling in vain
PASSES = 6  # that are timed, on each machine as many; the first ones are never the fastest
ASSUMED_S = 0.01  # taken for a pass of a model that cannot be timed
SAMPLES = 8  # that are counted, and scaled up to a micro-batch


def forward_cost(draft: RunBuilder) -> ForwardCost:
    """Operations of a forward over a micro-batch, counted once.

    A rule on this number repeats, where a race would come out differently from run to run. A
    model that must not be called before training counts as large.
    """
    if draft.forward_cost is None:
        try:
            draft.forward_cost = _count(draft, SAMPLES)
        except NotRestorable as error:
            draft.forward_cost = ForwardCost(inf, 1, str(error))
        except Exception:  # such as a model that knows its batch size
            draft.forward_cost = _count(draft, draft.micro_batch)
    return draft.forward_cost


def _count(draft: RunBuilder, samples: int) -> ForwardCost:
    inputs, target = probe.sample_batch(draft, samples)
    scripted = any(isinstance(m, torch.jit.ScriptModule) for m in draft.model.modules())
    with ExitStack() as stack:
        stack.enter_context(probe.untouched(draft))
        stack.enter_context(modes.evaluation_mode(draft.model))
        stack.enter_context(torch.no_grad())
        if draft.compilation is not None:  # else the counting would be compiled, too
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        with (counter := ProductCounter()):
            call(draft.model, inputs)
        flop, products = counter.flop, counter.products
        if counter.opaque or scripted:
            flop, products = _count_dispatched(draft, inputs)
    return ForwardCost(flop / 1e6 * draft.micro_batch / count(target), products)


def _count_dispatched(draft: RunBuilder, inputs: Any) -> tuple[int, int]:
    """The same by torch's own counter, which sees each operator."""
    from torch.utils.flop_counter import FlopCounterMode, flop_registry

    products: list[object] = []
    with (
        probe.OperatorObserver(lambda operator, _: products.append(operator._overloadpacket)),
        FlopCounterMode(display=False) as counter,
    ):
        call(draft.model, inputs)
    return counter.get_total_flops(), sum(one in flop_registry for one in products)


def compile_break_even(draft: RunBuilder) -> tuple[int, str]:
    """From how many steps on compiling is tried, and what that rests on.

    What it gains is measured then. A run that is compiled in vain (half a minute, the first time)
    takes at most TRY_SHARE longer.
    """
    try:
        seconds = step_seconds(draft)
        measured = f"forward and backward take some {1e3 * seconds:.3g} ms"
    except NotRestorable as error:
        seconds = ASSUMED_S
        measured = f"the model is not timed, {error}; taken for {1e3 * seconds:.3g} ms a step"
    steps = int(float(f"{COLD_S / TRY_SHARE / seconds:.1e}"))  # the timing is no better
    return steps, f"{measured}; {COLD_S:.0f} s of compiling are to be {TRY_SHARE:.0%} of the run"


def step_seconds(draft: RunBuilder) -> float:
    """About what forward and backward over a micro-batch take: three times a forward.

    The fastest of PASSES: what is not the run's own (cold caches, neighbours on the machine) only
    ever adds. Raises NotRestorable.
    """
    inputs, _ = probe.sample_batch(draft, draft.micro_batch)
    seconds: list[float] = []
    with probe.untouched(draft), torch.no_grad():
        draft.model.train()
        for _ in range(PASSES):
            start = perf_counter()
            try:
                probe.forward(draft, inputs)
            except Exception as error:
                if not is_out_of_memory(error):
                    if seconds:
                        break  # training will meet it, and say where
                    raise
                release_references(error)
                raise NotRestorable("a forward does not fit in memory") from None
            draft.device.synchronize()
            seconds.append(perf_counter() - start)
    return 3 * min(seconds)
