"""The state of a run in a checkpoint: when it is saved, and what is restored after an exception."""

from __future__ import annotations

import ctypes
import logging
import math
import random
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from runner.core.device.device_errors import is_device_error
from runner.core.interfaces.hook import Hook
from runner.core.interfaces.run import Progress, Run
from runner.core.optim.buffers import named_modules
from runner.core.preserved_state import random_state
from runner.core.schemas.data import LIMIT_KEYS

log = logging.getLogger("runner")

UNCOMPARED_KEYS = (
    *("name", "checkpoint.resume", "job.kind", "evaluate.export", "predict.format"),
    *(f"data.{key}" for key in ("changed", *LIMIT_KEYS)),
)
WEIGHT_CHANGES = ("OptimizerStep.apply", "StepGraph.__call__", "load_weights")
"""Functions that an exception may leave with some of the weights changed."""
VIEW_BYTES = 16
MT19937_BYTES = 2500  # of the state in memory: 624 words and the position


def save(run: Run, best: bool = False, final: bool = False, failed: bool = False) -> None:
    """Write a checkpoint of the run between two steps, unless its weights are not finite.

    `final` writes it in any case, waits until it is on disk, and raises StorageError on failure.
    Rollbacks restore scheduled ones only; after `failed`, an exception, it is none. Host sync while
    weights are copied; files are written in the background.
    """
    if run.saved_step < run.progress.step or best:
        if run.shards is not None and run.shards.is_lost:
            log.warning("step %d: not saved: some of its shards are lost", run.progress.step)
            return
        guarded = run.stability.config.guard and not final
        if guarded and not run.stability.are_weights_finite():
            log.warning("step %d: not saved: the weights are not finite", run.progress.step)
            return
        bad = first_bad_step(run)
        if bad and run.checkpointer.in_memory and run.saved_step >= 0 and not final:
            return  # it would replace the one to roll back to
        run.checkpointer.suspect_steps = steps_to_replay(run, bad, run.captures is not None)
        # a new dict: a checkpoint of the old one may be in the making
        run.checkpointer.choices = run.checkpointer.choices | run.measured_choices()
        is_due = run.progress.step % run.checkpoint_every == 0 or run.saved_step < 0
        planned = not failed and (best or is_due)  # else of an early end
        note_unplanned(run, planned)
        sharded = () if run.shards is None else run.shards.names
        with run.update.evaluation_mode():
            state = {**_run_state(run), "planned": planned, "clean": not bad}
            run.checkpointer.save(run.progress.step, weights(run), state, best, sharded)
        run.saved_step = run.progress.step
    if final:
        run.checkpointer.close()


def named_hooks(run: Run) -> Iterator[tuple[str, Hook]]:
    """Yield each hook with its name in a state: its class, numbered if several have the same."""
    counts = Counter[str]()
    for hook in run.hooks:
        counts[name := type(hook).__qualname__] += 1
        yield f"{name} {counts[name]}" if counts[name] > 1 else name, hook


def note_unplanned(run: Run, planned: bool) -> None:
    """Have the next checkpoint replace one of an early end, as if the run had not ended there."""
    step, unplanned = run.progress.step, run.checkpointer.unplanned
    (unplanned.discard if planned or step >= run.total_steps else unplanned.add)(step)


def weights(run: Run) -> dict[str, Any]:
    """Return the model's state dict, or this process's shard of it."""
    return run.model.state_dict() if run.shards is None else run.shards.state_dict()


def steps_to_replay(run: Run, bad: int, captures: bool) -> set[int]:
    """Return the steps from whose checkpoints a capture may still be rerun."""
    first_unread = run.reader.first_unread if captures else None
    return {step for step in (first_unread, bad) if step}


def first_bad_step(run: Run) -> int:
    """Return the first of the current consecutive bad steps, unreported too, or 0. Host sync."""
    controller, open_window = run.stability, run.reader.state()
    if controller.bad_since:
        return controller.bad_since
    for step, row in enumerate(open_window["rows"], open_window["first"]):
        bad = row[2] > 0 or not all(map(math.isfinite, row))
        if bad and step > controller.reset_step and step not in controller.vetoed:
            return step
    return 0


def _run_state(run: Run) -> dict[str, Any]:
    inputs = None
    if run.batch_validator is not None:  # first, as it adds to the history and the controller
        inputs = run.batch_validator.state()
        run.stability.vetoed += run.batch_validator.take_vetoed()
    own = {name: generator.get_state() for name, generator in own_generators(run).items()}
    return {
        "progress": asdict(run.progress),
        "criterion": asdict(run.criterion),
        "update": run.update.state(),
        "reader": run.reader.state(),
        "user": None if run.reader.user is None else run.reader.user.state(run.progress.step),
        "history": run.history.state(),
        "stability": run.stability.state(),
        "inputs": inputs,
        "bad_samples": {} if run.bad_samples is None else run.bad_samples.state(),
        "random": random_state() | ({"own": own} if own else {}),
        "record": run.recorder.position(),
        "events": run.recorder.event_position(),
        "hooks": {n: text for n, hook in named_hooks(run) if (text := hook.resume_state())},
        "choices": [[c.key, c.value, c.reason] for c in run.choices],
        "next_lr": run.update.lr_at(int(run.update.updates)),
        "config_hash": run.config_hash,
        "settings": comparable_settings(run.settings),
        "seed": run.seed,
        "threads": run.device.threads,
        "steps_per_epoch": run.train.steps_per_epoch,
        "stream": run.train.state(run),
        "seeds_own_generators": True,  # those of a user's data set; older runs did not
    }


def comparable_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the values, as text, of the keys in which a resumed run may not differ silently."""
    return {k: str(v) for k, v in settings.items() if k not in UNCOMPARED_KEYS}


def own_generators(run: Run) -> dict[str, torch.Generator]:
    """Return the generators in attributes of the modules of model and objective, by name."""
    return {
        f"{path}.{name}": value
        for path, module in named_modules(run.model, run.objective)
        for name, value in vars(module).items()
        if isinstance(value, torch.Generator)
    }


def restore_random_state(state: Mapping[str, Any], run: Run) -> None:
    """Restore the states of the global random generators, and of the model's and objective's."""
    for name, generator in own_generators(run).items():
        if name in state.get("own", {}):
            generator.set_state(state["own"][name])
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(state["numpy"])


def restart_best(progress: Progress, problem: str) -> None:
    """Forget the best value so far, which has a `problem`; patience starts over, too."""
    if progress.best is not None:
        message = "the best so far, %.5g at step %d, %s: it starts over"
        log.warning(message, progress.best, progress.best_step, problem)
    progress.best = progress.best_loss = None
    progress.best_step = progress.stale_validations = 0


class LastState:
    """Restores buffers and random state after an exception between two updates.

    Before each validation both are recorded. After each update only the random state is, and only
    if the run calls the user's code: 20 µs. Buffers of an unfinished step are in its OptimizerStep.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.validates, self.own = run, False, own_generators(run)
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
            restore_random_state(self.random, self.run)
        return True

    def _record_random(self) -> None:
        self.random = {
            "torch": torch.default_generator.get_state(),
            "python": self.python_state.read(),
            "numpy": self.numpy_state.read(),
            "own": {name: generator.get_state() for name, generator in self.own.items()},
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
