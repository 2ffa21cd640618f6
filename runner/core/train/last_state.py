"""Buffers and random generators as the last update left them, to save after an exception."""

from __future__ import annotations

import ctypes
import random
import sys
import traceback
from typing import Any

import numpy as np
import torch

from runner.core.device.device_errors import is_device_error
from runner.core.interfaces.run import Run
from runner.core.train.run_state import restore_random_state

WEIGHT_CHANGES = ("OptimizerStep.apply", "StepGraph.__call__", "load_weights")
"""Functions that an exception may leave with some of the weights changed."""
VIEW_BYTES = 16
MT19937_BYTES = 2500  # of the state in memory: 624 words and the position


class LastState:
    """Restores buffers and random state after an exception between two updates.

    Before each validation both are recorded. After each update only the random state is, and only
    if the run calls the user's code: 20 µs. Buffers of an unfinished step are in its OptimizerStep.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.validates = run, False
        self.each_step = _calls_user_code(run)
        self.random: dict[str, Any] | None = None
        self.numpy_state, self.python_state = NumpyState(), PythonState()
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
        self.random = {
            "torch": torch.default_generator.get_state(),
            "python": self.python_state.read(),
            "numpy": self.numpy_state.read(),
        }


class PythonState:
    """Reads the state of `random`: 15 µs, hence only if it changed."""

    def __init__(self) -> None:
        self.generator: Any = getattr(random, "_inst", None)
        is_usual = type(self.generator) is random.Random
        self.is_readable = is_usual and sys.implementation.name == "cpython"
        # the position and the first words: each draw changes one, and so does a seed
        self.view = _view(id(self.generator) + object.__basicsize__)
        self.seen = b""
        self.state: Any = None

    def read(self) -> Any:
        """Return what `random.getstate()` returns."""
        if not self.is_readable:
            return random.getstate()
        seen = self.view.raw
        # the stored normal number is an attribute, outside this memory
        if seen != self.seen or self.state[2] is not self.generator.gauss_next:
            self.seen, self.state = seen, random.getstate()
        return self.state


class NumpyState:
    """Reads the state of NumPy's global generator: 60 µs, hence only if it changed."""

    def __init__(self) -> None:
        self.generator: Any = None
        self.view: Any = None
        self.seen = b""
        self.state: Any = None

    def read(self) -> Any:
        """Return what `np.random.get_state()` returns."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # no stub
        if generator is not self.generator:
            if not isinstance(generator, np.random.MT19937):
                return np.random.get_state()
            self.generator, self.seen = generator, b""
            # the last words and the position
            self.view = _view(generator.ctypes.state_address + MT19937_BYTES - VIEW_BYTES)
        seen = self.view.raw
        # a stored normal number may be drawn without a change of this memory
        if seen != self.seen or self.state[3]:
            self.seen, self.state = seen, np.random.get_state()
        return self.state


def _view(address: int) -> Any:
    """Return memory whose `raw` is its bytes; `ctypes.string_at` calls each audit hook: 15 µs."""
    return (ctypes.c_char * VIEW_BYTES).from_address(address)


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


def _calls_user_code(run: Run) -> bool:
    """Whether model, objective, data or hooks have a class or function of the user's."""
    loss, dataset = getattr(run.objective, "loss", None), run.train.fetch.source
    parts = [*run.model.modules(), run.objective, loss, dataset, *run.hooks]
    modules = [getattr(part, "__module__", None) for part in parts if part is not None]
    return any(not str(module).startswith(("runner.", "torch.")) for module in modules)
