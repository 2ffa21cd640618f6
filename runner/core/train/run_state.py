"""The state of a run in a checkpoint, and when it is saved."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from runner.core.interfaces.hook import Hook
from runner.core.interfaces.run import Progress, Run
from runner.core.schemas.data import LIMIT_KEYS

log = logging.getLogger("runner")

UNCOMPARED_KEYS = (
    "name",
    *(f"data.{key}" for key in ("changed", *LIMIT_KEYS)),
    "checkpoint.resume",
    "job.kind",
    "evaluate.export",
    "predict.format",
)


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
        if not final and not run.stability.has_finite_weights():
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
    """Return the first of the current consecutive bad steps, unreported ones included; 0 if none.

    Host sync.
    """
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
        "random": {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        },
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


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore the states of the global random generators."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(state["numpy"])


def restart_best(progress: Progress, problem: str) -> None:
    """Forget the best value so far, which has a `problem`; patience starts over, too."""
    if progress.best is not None:
        log.warning(
            "the best so far, %.5g at step %d, %s: it starts over",
            progress.best, progress.best_step, problem,
        )  # fmt: skip
    progress.best = progress.best_loss = None
    progress.best_step = progress.stale_validations = 0
