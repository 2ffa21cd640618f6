"""Bad steps of a hand-written loop: written down as a run's are, and looked into again."""

from __future__ import annotations

import logging
import random
import shutil
from collections import deque
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from runner.captures.manifest import FOLDER, Manifest, Weights, captures
from runner.captures.reader import open_capture
from runner.captures.writer import fill, noise
from runner.checkpoint.folder import step_name
from runner.data.batch import count
from runner.errors import CheckpointError
from runner.library import batches
from runner.library.lazy_run import LazyRun, Loss, check_loss_fn, check_module, objective_of
from runner.record import storage
from runner.record.provenance import versions
from runner.record.text import shorten
from runner.replay.findings import Cause
from runner.replay.trace import trace_step

if TYPE_CHECKING:
    from runner.library.guarded_optimizer import GuardedOptimizer
    from runner.library.stability import Stability

log = logging.getLogger("runner")

WHO = "replay_step"


class StepCaptures:
    """The first few bad steps, each in a folder of its own below debug/captures."""

    def __init__(self, of: Stability, folder: Path, at_most: int, late: int) -> None:
        self.of, self.folder, self.at_most = of, folder, at_most
        self.recent: deque[tuple[int, Any, dict[str, Any]]] = deque(maxlen=late)
        self.noise = noise()

    def remember(self, step: int, batch: Any) -> None:
        """Hold on to a batch until the host knows how its step went."""
        inputs, target = batches.as_batch(batch, "Stability")
        self.recent.append((step, (inputs, target), self.noise))

    def take(self, run: object, step: int, kind: str, message: str) -> str | None:
        """Write it down; None where its batch is not known, or there are enough."""
        held = next((row for row in self.recent if row[0] == step), None)
        if held is None or len(captures(self.folder)) >= self.at_most:
            return None
        relative = f"{FOLDER}/{step_name(step)}"
        temporary = self.folder / FOLDER / f".tmp-{step_name(step)}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            storage.make_folder(temporary)
            self._fill(temporary, step, kind, message, held[1], held[2])
            storage.put_folder(temporary, self.folder / relative)
        except Exception as error:  # of the disk, or of what is no plain data: the loop goes on
            log.warning("step %d could not be kept: %s: %s", step, type(error).__name__, error)
            shutil.rmtree(temporary, ignore_errors=True)
            return None
        return relative

    def tell(self) -> None:
        """Nothing: what a loop says of a capture is in its last words and its summary."""

    def _fill(
        self, folder: Path, step: int, kind: str, message: str, batch: Any, noise: dict[str, Any]
    ) -> None:
        """The host waits for the device."""
        guarded = cast("GuardedOptimizer", self.of.guarded)
        module, update, rows = guarded.module, guarded.update, self.of.reader.since(step)
        loss, norm = (rows[0][0], rows[0][1]) if rows else (None, None)
        model = module.state_dict()
        manifest = Manifest(
            step=step,
            kind=kind,
            message=message,
            checkpoint=None,
            weights=Weights.then if self.of.progress.step == step else Weights.later,
            seed=0,
            name="a hand-written loop",
            config_hash="",
            config={},
            given=["model", "data", "objective", "optimizer"],
            choices={},
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
        fill(folder, manifest, model, state)


def replay_step(path: str | Path, model: nn.Module, loss_fn: Loss) -> Cause:
    """Make a captured step again, every operation watched: where it went bad, and in which line.

    `path` is its folder, `model` one of the same shape (a copy of it gets the step's weights),
    `loss_fn(output, target)` the loss as in the loop. Random numbers are those with which the step
    before had ended. Raises CheckpointError, SecurityError or UsageError.
    """
    check_module(WHO, model)
    check_loss_fn(WHO, loss_fn)
    capture = open_capture(Path(path))
    copy, inputs = deepcopy(model), capture.batch[0]
    try:
        copy.load_state_dict(dict(capture.model or {}))
        for name, buffer in capture.buffers.items():
            copy.get_buffer(name).copy_(buffer)
    except (RuntimeError, AttributeError) as error:
        gist = shorten(str(error), 300)
        raise CheckpointError(f"{path}: does not fit this model: {gist}") from error
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
    before = noise()
    try:
        run = lazy.build_run(inputs, capture.batch[1])
        _set_noise(capture.random)
        return trace_step(run, _moved((inputs, capture.batch[1]), run.device.torch))
    finally:
        lazy.close()
        _set_noise(before)


def _moved(batch: tuple[Any, Any], device: torch.device) -> tuple[Any, Any]:
    return batches.moved(batch[0], device), batches.moved(batch[1], device)


def _set_noise(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
