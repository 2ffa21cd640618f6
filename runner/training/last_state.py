"""Buffers and random generators as the last update left them, to save after an exception."""

from __future__ import annotations

import ctypes
import random
import traceback
from typing import Any

import numpy as np
import torch

from runner.training.recovery import is_device_error
from runner.training.resume import restore_random_state
from runner.training.run import Run

WEIGHT_CHANGES = ("OptimizerStep.apply", "StepGraph.__call__", "load_weights")
"""Functions that an exception may leave with some of the weights changed."""
MT19937_BYTES = 2500  # of the state in memory: 624 words and the position


class LastState:
    """Restores buffers and random state after an exception between two updates.

    Before each validation both are recorded. After each update only the random state is, and only
    if the run calls the user's code: 10 µs. Buffers of an unfinished step are in its OptimizerStep.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.validates = run, False
        self.each_step = _calls_user_code(run)
        self.random: dict[str, Any] | None = None
        self.numpy_words = b""
        self.record_update()

    def record_update(self) -> None:
        """Record the state after an update."""
        if self.each_step:
            self._record_random()

    def record_validation(self) -> None:
        """Record the state before a validation, and after it before its hooks."""
        self.run.update.buffers.save()
        self._record_random()
        self.validates = True

    def end_validation(self) -> None:
        """Call after the hooks of a validation."""
        self.validates = False
        if not self.each_step:
            self.random = None  # later random numbers are not the validation's

    def restore(self, error: BaseException) -> bool:
        """Restore the state; return False if weights may differ from those of the last update."""
        if changes_weights(error):
            return False
        self.run.update.abandon()
        if self.validates:
            self.run.update.buffers.restore()
        if self.random is not None:
            restore_random_state(self.random)
        return True

    def _record_random(self) -> None:
        numpy_state = None if self.random is None else self.random["numpy"]
        words = _numpy_words()
        # 100 µs, hence only after a change; drawing a stored normal number changes no word
        if numpy_state is None or not words or words != self.numpy_words or numpy_state[3]:
            numpy_state = np.random.get_state()
        self.numpy_words = words
        self.random = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": numpy_state,
        }


def changes_weights(error: BaseException) -> bool:
    """Whether the error left an update or a rollback, or is of a device, unfinished."""
    pending, seen = [error], set[int]()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if is_device_error(item):
            return True
        for frame, _ in traceback.walk_tb(item.__traceback__):
            is_ours = str(frame.f_globals.get("__name__")).startswith("runner.")
            if is_ours and frame.f_code.co_qualname in WEIGHT_CHANGES:
                return True
        pending += [e for e in (item.__cause__, item.__context__) if e is not None]
    return False


def _numpy_words() -> bytes:
    """Return the words of NumPy's global generator, b"" if it is not the usual one."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # no stub
    if not isinstance(generator, np.random.MT19937):
        return b""
    return ctypes.string_at(generator.ctypes.state_address, MT19937_BYTES)


def _calls_user_code(run: Run) -> bool:
    """Whether model, objective, data or hooks have a class or function of the user's."""
    loss, dataset = getattr(run.objective, "loss", None), run.train.fetch.source
    parts = [*run.model.modules(), run.objective, loss, dataset, *run.hooks]
    modules = [getattr(part, "__module__", None) for part in parts if part is not None]
    return any(not str(module).startswith(("runner.", "torch.")) for module in modules)
