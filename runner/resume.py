"""What a checkpoint holds of a run, and how a run continues from one."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runner.errors import CheckpointError
from runner.run import Progress, Run
from runner.technique import Choice

log = logging.getLogger("runner")


OF_NO_CONSEQUENCE = ("name", "checkpoint.resume", "job.kind", "evaluate.export")


def save(run: Run, best: bool = False, final: bool = False) -> None:
    """Write a checkpoint of the run as it stands between two steps.

    `final` waits until it is safe on disk, and raises StorageError if it cannot be.

    The host waits for the device while weights are copied; files are written in the background.
    """
    if run.saved_step < run.progress.step or best:
        run.checkpointer.save(run.progress.step, run.model.state_dict(), _state(run), best)
        run.saved_step = run.progress.step
    if final:
        run.checkpointer.close()


def _state(run: Run) -> dict[str, Any]:
    return {
        "progress": asdict(run.progress),
        "update": run.update.state(),
        "reader": run.reader.state(),
        "history": run.history.state(),
        "random": {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        },
        "record": run.recorder.position(),
        "choices": [[c.key, c.value, c.reason] for c in run.choices],
        "config_hash": run.config_hash,
        "settings": _plain(run.settings),
        "seed": run.seed,
        "threads": run.device.threads,
        "steps_per_epoch": run.train.steps_per_epoch,
    }


def restore(run: Run, where: Path | None) -> bool:
    """Put the run where its newest usable checkpoint left it; False if there is none to continue.

    `where` is a run's folder or one of its step folders; None is the run's own folder.
    """
    restored = run.checkpointer.restore(where)
    if restored is None:
        return False
    state = restored.state
    _load_weights(run, restored.path, restored.model, state["update"])
    run.progress = Progress(**state["progress"])
    run.reader.load(state["reader"])
    run.history.load(state["history"])
    if state["config_hash"] != run.config_hash:
        before, after = state["settings"], _plain(run.settings)
        changed = [k for k in after if before.get(k) != after[k]]
        log.warning(
            "the config is not the one of %s: %s", restored.path,
            ", ".join(f"{k}={after[k]} (was {before.get(k)})" for k in changed[:8]),
        )  # fmt: skip
    if state["steps_per_epoch"] != run.train.steps_per_epoch:
        log.warning(
            "the data or the batch size changed: an epoch had %d steps", state["steps_per_epoch"]
        )
    if (then := state["threads"]) != (now := run.device.threads):
        log.warning("threads: %d then, %d now: last bits may differ; see device.threads", then, now)
    run.choices.append(
        Choice("checkpoint.resume", str(restored.path), f"continues at step {restored.step}")
    )
    here = run.folder and run.folder.resolve()
    own = here is not None and restored.path.resolve().is_relative_to(here)
    if own and run.folder is not None:
        run.record_offset = state["record"]
        run.saved_step = run.progress.step
        adopt_config(run.folder)
    # last, since anything before it may draw
    noise = state["random"]
    torch.set_rng_state(noise["torch"])
    version, numbers, gauss = noise["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(noise["numpy"])
    return True


def adopt_config(folder: Path) -> None:
    """Let the config of a resumed run take the place of the one it was started with."""
    new, old = folder / ".hydra-resumed", folder / ".hydra"
    if new.is_dir():
        shutil.rmtree(old, ignore_errors=True)
        new.rename(old)


def roll_back(run: Run) -> None:
    """Weights, buffers and optimizer back to the last checkpoint, with a lower learning rate.

    The data goes on from where it is, so the batches that broke the run are not met again.
    """
    progress, update = run.progress, run.update
    backoff, updates = update.backoff, update.updates.clone()
    run.checkpointer.wait()
    restored = run.checkpointer.restore()
    if restored is not None:
        _load_weights(run, restored.path, restored.model, restored.state["update"])
    update.updates.copy_(updates)  # the schedule goes on
    update.backoff = backoff
    update.back_off(run.backoff)
    progress.rollbacks += 1
    progress.consecutive_skips = 0
    run.history.add(
        "rollback",
        f"rolled back to {f'step {restored.step}' if restored else 'the start'}, "
        f"learning rate times {update.backoff:g}",
        step=progress.step,
        category="numerics",
    )


def _plain(settings: Mapping[str, Any]) -> dict[str, str]:
    return {k: str(v) for k, v in settings.items() if k not in OF_NO_CONSEQUENCE}


def _load_weights(run: Run, path: Path, model: dict[str, Any], update: dict[str, Any]) -> None:
    try:
        run.model.load_state_dict(model)
        run.update.load(update)
    except (RuntimeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]  # torch lists every tensor
        raise CheckpointError(
            f"{path}: does not fit this run's model or optimizer ({reason}); resume with the "
            "config it was written under"
        ) from error
