"""The bad step made once more, and whether it came out bad again."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from runner.batch import Batch
from runner.captures.opening import Capture
from runner.record.text import shorten
from runner.replay.findings import Attempt
from runner.replay.statistics import bad_state
from runner.run import Run
from runner.step import make_step

OF_STATE = ("weights", "buffers")  # kinds whose loss may well be finite
STILL = 0.5  # of what was recorded: a spike that is larger is one still
SAME = 1e-3  # relative: another order of summation


def attempt(run: Run, batch: Batch, capture: Capture) -> Attempt:
    """Make the step as the run does, compiled where that is; its update is made too.

    What the step raises becomes part of the answer. The host waits for the device.
    """
    found = Attempt()
    run.model.train()
    start, undone = time.perf_counter(), False
    try:
        step, _ = make_step(run, batch)
    except Exception as error:
        found.error = said(error)
    else:
        found.loss, found.grad_norm = float(step.loss), float(step.grad_norm)
        undone = bool(step.skipped)  # buffers too are then what they were before
    found.seconds = time.perf_counter() - start
    if found.error and not is_exception(capture):
        found.failed, found.error = f"the step raised {found.error}", ""
    found.bad = not found.failed and is_bad(found, capture)
    if capture.manifest.kind in OF_STATE:
        found.bad = found.bad or undone or bool(bad_state(run.model))
    found.techniques = [name for name, _ in run.techniques if name not in run.fallen]
    found.fallen = dict(run.fallen)
    found.notes = _notes(run)
    return found


def is_bad(found: Attempt, capture: Capture) -> bool:
    """Whether it went wrong in the way that the captured step did."""
    if is_exception(capture):
        return bool(found.error)
    if not is_spike(capture):
        return not finite(found.loss, found.grad_norm)
    pairs = ((found.loss, capture.loss), (found.grad_norm, capture.grad_norm))
    return all(now is None or then is None or _large(now, then) for now, then in pairs)


def is_exception(capture: Capture) -> bool:
    """Whether the step was captured for what it raised."""
    return capture.manifest.kind == "exception"


def is_spike(capture: Capture) -> bool:
    """Whether it was captured for being large."""
    numbers = (capture.loss, capture.grad_norm)
    other = is_exception(capture) or capture.manifest.kind in OF_STATE
    return not other and None not in numbers and finite(*numbers)


def same(found: Attempt, capture: Capture) -> bool:
    """Whether the numbers are those that the run recorded, to the last digits but three."""
    if is_exception(capture):
        kind = found.error.partition(":")[0]
        return bool(kind) and kind in capture.manifest.message
    return _close(found.loss, capture.loss) and _close(found.grad_norm, capture.grad_norm)


def said(error: BaseException) -> str:
    """An exception in one line."""
    first = next(iter(str(error).strip().splitlines()), "")
    return shorten(f"{type(error).__name__}: {first}".rstrip(": "), 300)


def finite(*numbers: float | None) -> bool:
    """Whether all that are known are."""
    return all(number is None or math.isfinite(number) for number in numbers)


def _large(now: float, then: float) -> bool:
    return not math.isfinite(now) or now >= STILL * then


def _close(now: float | None, then: float | None) -> bool:
    if now is None or then is None:
        return now is then
    if not (math.isfinite(now) and math.isfinite(then)):
        return str(now) == str(then)
    return math.isclose(now, then, rel_tol=SAME, abs_tol=1e-12)


def _notes(run: Run) -> dict[str, str]:
    """What the techniques decided that a verdict should name."""
    choices: Mapping[str, Any] = {choice.key: choice.value for choice in run.choices}
    found: dict[str, str] = {}
    for name, technique in run.techniques:
        fields = vars(technique)
        for field in ("dtype", "kernel", "mode"):
            value = choices.get(f"optimization.{name}.{field}", fields.get(field))
            if value is not None:
                found[name] = str(getattr(value, "value", value))
                break
    return found
