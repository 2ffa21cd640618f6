"""What anomaly mode adds to a step, where it cannot be told from the steps of the run."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack

import torch

from runner.batch import call, count, rows
from runner.debug.anomaly.trail import Trail
from runner.run import Run
from runner.untouched import untouched

log = logging.getLogger("runner")


def added(run: Run, trail: Trail) -> tuple[float, float] | None:
    """Seconds of a step's forward and backward, and what the mode adds to them, found by rehearsing
    six; None where that fails.

    Once training is over; no update is made, and whatever forwards change in the model goes back.
    Nothing else that watches steps is in it.
    """
    device = run.device.torch
    with untouched(run.model, run.forward, run.objective, device=device):
        return _rehearsed(run, trail)


def _rehearsed(run: Run, trail: Trail) -> tuple[float, float] | None:
    batch = rows(run.train.peek(), slice(run.micro_batch))
    spent: dict[bool, list[float]] = {True: [], False: []}
    try:
        for watched in (True, False) * 3:
            with ExitStack() as stack:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                if watched:
                    stack.enter_context(trail.followed())
                    stack.enter_context(torch.autograd.set_detect_anomaly(True))
                for context in run.contexts:
                    stack.enter_context(context())
                run.update.begin()
                run.device.synchronize()
                start = time.perf_counter()
                run.objective(call(run.forward, batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
                run.device.synchronize()
                spent[watched].append(time.perf_counter() - start)
            run.update.abandon()
    except Exception as error:  # a model that makes NaN of this batch too, or tires of it
        log.debug("anomaly mode is not timed: %s", error)
        return None
    finally:
        run.update.abandon()
    parts = -(-count(run.train.peek()[1]) // run.micro_batch)
    plain = min(spent[False])
    return plain * parts, max(0.0, min(spent[True]) - plain) * parts
