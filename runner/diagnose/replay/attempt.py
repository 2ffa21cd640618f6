"""Repeat the captured step once, and judge whether it is bad again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from runner.core.interfaces.batch import Batch
from runner.core.interfaces.run import Run
from runner.core.models.modes import enter_training
from runner.core.record.text import shorten
from runner.core.train.step import make_step
from runner.diagnose.replay.capture_reader import Capture
from runner.diagnose.replay.results import Attempt, non_finite_state

STATE_KINDS = ("weights", "buffers")  # kinds of faults whose loss may be finite
SPIKE_SHARE = 0.5  # share of the recorded value above which it still counts as a spike
TOLERANCE = 1e-3  # relative tolerance for another order of summation


def make_attempt(run: Run, batch: Batch, capture: Capture) -> Attempt:
    """Make the step as the run does, compiled if that was compiled, with its update.

    An exception of the step becomes part of the result. The host waits for the device.
    """
    attempt = Attempt()
    enter_training(run.model)
    skipped = False
    try:
        step, _ = make_step(run, batch)
    except Exception as error:
        attempt.error = one_line_error(error)
    else:
        attempt.loss, attempt.grad_norm = float(step.loss), float(step.grad_norm)
        skipped = bool(step.skipped)  # buffers were then restored too
    if attempt.error and not _is_exception(capture):
        attempt.failed, attempt.error = f"the step raised {attempt.error}", ""
    attempt.bad = not attempt.failed and _is_bad(attempt, capture)
    if capture.manifest.kind in STATE_KINDS:
        attempt.bad = attempt.bad or skipped or bool(non_finite_state(run.model))
    attempt.techniques = [name for name, _ in run.techniques if name not in run.fallback_reasons]
    attempt.notes = _technique_choices(run)
    return attempt


def is_spike(capture: Capture) -> bool:
    """Whether the step was captured as a spike: finite but too large."""
    numbers = (capture.loss, capture.grad_norm)
    other = _is_exception(capture) or capture.manifest.kind in STATE_KINDS
    return not other and None not in numbers and _are_finite(*numbers)


def has_same_numbers(attempt: Attempt, capture: Capture) -> bool:
    """Whether the numbers equal the recorded ones, within `TOLERANCE`."""
    if _is_exception(capture):
        kind = attempt.error.partition(":")[0]
        return bool(kind) and kind in capture.manifest.message
    pairs = ((attempt.loss, capture.loss), (attempt.grad_norm, capture.grad_norm))
    return all(_is_close(now, then) for now, then in pairs)


def one_line_error(error: BaseException) -> str:
    """Return the error's type and the first line of its message."""
    first = next(iter(str(error).strip().splitlines()), "")
    return shorten(f"{type(error).__name__}: {first}".rstrip(": "), 300)


def _is_bad(attempt: Attempt, capture: Capture) -> bool:
    """Whether the attempt failed in the same way as the captured step."""
    if _is_exception(capture):
        return bool(attempt.error)
    if not is_spike(capture):
        return not _are_finite(attempt.loss, attempt.grad_norm)
    pairs = ((attempt.loss, capture.loss), (attempt.grad_norm, capture.grad_norm))
    return all(
        now is None or then is None or not math.isfinite(now) or now >= SPIKE_SHARE * then
        for now, then in pairs
    )


def _is_exception(capture: Capture) -> bool:
    return capture.manifest.kind == "exception"


def _are_finite(*numbers: float | None) -> bool:
    return all(number is None or math.isfinite(number) for number in numbers)


def _is_close(now: float | None, then: float | None) -> bool:
    if now is None or then is None:
        return now is then
    if not _are_finite(now, then):
        return str(now) == str(then)
    return math.isclose(now, then, rel_tol=TOLERANCE, abs_tol=1e-12)


def _technique_choices(run: Run) -> dict[str, str]:
    """Return each technique's dtype, kernel or mode, for the verdict."""
    choices: Mapping[str, Any] = {choice.key: choice.value for choice in run.choices}
    by_technique: dict[str, str] = {}
    for name, technique in run.techniques:
        for field in ("mode", "kernel", "dtype"):
            value = choices.get(f"optimization.{name}.{field}", vars(technique).get(field))
            if value is not None:
                by_technique[name] = str(getattr(value, "value", value))
    return by_technique
