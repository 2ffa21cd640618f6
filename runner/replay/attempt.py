"""Repetition of a captured step, and whether it is bad again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from runner.captures.reader import Capture
from runner.data.batch import Batch
from runner.record.text import shorten
from runner.replay.findings import Attempt, bad_state
from runner.training.run import Run
from runner.training.step import make_step

OF_STATE = ("weights", "buffers")  # kinds of fault whose loss may be finite
STILL = 0.5  # share of the recorded value from which a spike is reproduced
SAME = 1e-3  # relative tolerance, for another order of summation


def make_attempt(run: Run, batch: Batch, capture: Capture) -> Attempt:
    """Make the step as the run does, compiled if the run is, including its update.

    An exception of the step is recorded in the result. Syncs the host.
    """
    attempt = Attempt()
    run.model.train()
    undone = False
    try:
        step, _ = make_step(run, batch)
    except Exception as error:
        attempt.error = error_line(error)
    else:
        attempt.loss, attempt.grad_norm = float(step.loss), float(step.grad_norm)
        undone = bool(step.skipped)  # buffers are then restored, too
    if attempt.error and not _is_exception(capture):
        attempt.failed, attempt.error = f"the step raised {attempt.error}", ""
    attempt.bad = not attempt.failed and _is_bad(attempt, capture)
    if capture.manifest.kind in OF_STATE:
        attempt.bad = attempt.bad or undone or bool(bad_state(run.model))
    attempt.techniques = [name for name, _ in run.techniques if name not in run.fallen]
    attempt.notes = _technique_choices(run)
    return attempt


def is_spike(capture: Capture) -> bool:
    """Whether it was captured for a finite loss and gradient norm that are too large."""
    numbers = (capture.loss, capture.grad_norm)
    other = _is_exception(capture) or capture.manifest.kind in OF_STATE
    return not other and None not in numbers and _are_finite(*numbers)


def is_same(attempt: Attempt, capture: Capture) -> bool:
    """Whether loss and gradient norm, or the type of the error, equal the recorded ones."""
    if _is_exception(capture):
        kind = attempt.error.partition(":")[0]
        return bool(kind) and kind in capture.manifest.message
    pairs = ((attempt.loss, capture.loss), (attempt.grad_norm, capture.grad_norm))
    return all(_is_close(now, then) for now, then in pairs)


def error_line(error: BaseException) -> str:
    """Return an error's type, and the first line of its message."""
    first = next(iter(str(error).strip().splitlines()), "")
    return shorten(f"{type(error).__name__}: {first}".rstrip(": "), 300)


def _is_bad(attempt: Attempt, capture: Capture) -> bool:
    """Whether it is bad in the same way as the captured step."""
    if _is_exception(capture):
        return bool(attempt.error)
    if not is_spike(capture):
        return not _are_finite(attempt.loss, attempt.grad_norm)
    pairs = ((attempt.loss, capture.loss), (attempt.grad_norm, capture.grad_norm))
    return all(
        now is None or then is None or not math.isfinite(now) or now >= STILL * then
        for now, then in pairs
    )


def _is_exception(capture: Capture) -> bool:
    return capture.manifest.kind == "exception"


def _are_finite(*numbers: float | None) -> bool:
    """Whether all numbers except None are finite."""
    return all(number is None or math.isfinite(number) for number in numbers)


def _is_close(now: float | None, then: float | None) -> bool:
    if now is None or then is None:
        return now is then
    if not _are_finite(now, then):
        return str(now) == str(then)
    return math.isclose(now, then, rel_tol=SAME, abs_tol=1e-12)


def _technique_choices(run: Run) -> dict[str, str]:
    """Return the dtype, kernel or mode of each technique, for the verdict."""
    choices: Mapping[str, Any] = {choice.key: choice.value for choice in run.choices}
    notes: dict[str, str] = {}
    for name, technique in run.techniques:
        for field in ("mode", "kernel", "dtype"):
            value = choices.get(f"optimization.{name}.{field}", vars(technique).get(field))
            if value is not None:
                notes[name] = str(getattr(value, "value", value))
    return notes
