"""Bad steps of a hand-written loop: captured as a run's are, and replayed."""

from __future__ import annotations

import logging
import random
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from runner.captures.manifest import CapturedWeights, CaptureManifest, captures
from runner.captures.reader import open_capture
from runner.captures.run_captures import random_state
from runner.captures.writer import write_capture
from runner.data.batch import count
from runner.errors import CheckpointError
from runner.library import batches
from runner.library.lazy_run import LazyRun, Loss, check_loss_fn, objective_of
from runner.record.provenance import versions
from runner.record.text import shorten
from runner.replay.findings import Cause
from runner.replay.trace import trace_step

if TYPE_CHECKING:
    from runner.library.guarded_optimizer import GuardedOptimizer

log = logging.getLogger("runner")

WHO = "replay_step"


class StepCaptures:
    """The first few bad steps, each in a folder of its own below debug/captures."""

    def __init__(self, folder: Path, at_most: int, guarded: GuardedOptimizer) -> None:
        self.folder, self.at_most, self.guarded = folder, at_most, guarded
        self.recent: dict[int, tuple[Any, dict[str, Any]]] = {}  # batch and random state by step
        self.random_state = random_state()

    def remember(self, step: int, batch: Any, late: int) -> None:
        """Hold on to a batch until the host knows how its step went, `late` steps later."""
        inputs, target = batches.as_batch(batch, "Stability")
        self.recent[step] = (inputs, target), self.random_state
        self.recent.pop(step - late, None)

    def take(self, run: Any, step: int, kind: str, message: str) -> str | None:
        """Write the step; None where its batch is not known, or there are enough, or no room."""
        if step not in self.recent or len(captures(self.folder)) >= self.at_most:
            return None
        batch, noise = self.recent[step]
        module, update, rows = self.guarded.module, self.guarded.update, run.reader.since(step)
        loss, norm = (rows[0][0], rows[0][1]) if rows else (None, None)
        model = module.state_dict()
        manifest = CaptureManifest(
            step=step,
            kind=kind,
            message=message,
            weights=CapturedWeights.then if run.progress.step == step else CapturedWeights.later,
            name="a hand-written loop",
            given=["model", "data", "objective", "optimizer"],
            micro_batch=count(batch[1]),
            threads=torch.get_num_threads(),
            device={"kind": update.device.type},
            versions=versions(),
            loss=str(loss),
            grad_norm=str(norm),
        )
        state = {
            "batch": batch,
            "samples": [],
            "loss": loss,
            "grad_norm": norm,
            "buffers": {n: b for n, b in module.named_buffers() if n not in model},
            "update": update.state(),
            "random": noise,
            "random_then": False,
            "progress": {"step": step},
            "remedy": 0,
            "skipped": [],
        }
        try:
            return write_capture(self.folder, manifest, model, state)
        except Exception as error:  # of the disk, or of a batch that is no plain data
            log.warning("step %d was not captured: %s: %s", step, type(error).__name__, error)
            return None

    def log_capture(self) -> None:
        """Nothing: a loop's captures are named in its summary and when it gives up."""


def replay_step(path: str | Path, model: nn.Module, loss_fn: Loss) -> Cause:
    """Make a captured step again with every operation traced: where it went bad, in which line.

    `path` is its folder, `model` one of the same shape (a copy of it gets the step's weights),
    `loss_fn(output, target)` the loss as in the loop. Random numbers are those with which the step
    before had ended. Raises CheckpointError, SecurityError or UsageError.
    """
    check_loss_fn(WHO, loss_fn)
    capture = open_capture(Path(path))
    copy, inputs = deepcopy(model), capture.batch[0]
    try:
        copy.load_state_dict(dict(capture.model or {}))
        for name, buffer in capture.buffers.items():
            copy.get_buffer(name).copy_(buffer)
    except (RuntimeError, AttributeError) as error:
        reason = shorten(str(error), 300)
        raise CheckpointError(f"{path}: does not fit this model: {reason}") from error
    inputs = tuple(inputs) if isinstance(inputs, list) else inputs
    lazy = LazyRun(
        WHO,
        copy,
        "none",
        [f"device.threads={capture.manifest.threads}"],
        None,
        {},
        optimizer=torch.optim.SGD([p for p in copy.parameters() if p.requires_grad], lr=0.0),
        objective=objective_of(loss_fn),
    )
    before = random_state()
    try:
        run = lazy.build_run(inputs, capture.batch[1])
        _set_random_state(capture.random)
        batch = batches.moved((inputs, capture.batch[1]), run.device.torch)
        return trace_step(run, batch)
    finally:
        lazy.close()
        _set_random_state(before)


def _set_random_state(state: Any) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
