"""A bad step written down while the run goes on, so that job=replay can look into it."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.captures.manifest import CHECKPOINT, FOLDER, Manifest, Weights, captures
from runner.checkpoint import manifest as checkpoints
from runner.checkpoint.folder import step_name
from runner.checkpoint.snapshot import Copier, write_state, write_tensors
from runner.data.batch import Batch
from runner.debug.config import CaptureConfig
from runner.record import storage
from runner.record.provenance import versions
from runner.training.run import Run

log = logging.getLogger("runner")

TEMPORARY = ".tmp-"
MIB = 2**20


class Captures:
    """The captures of one run: the first few bad steps, within a bound on disk.

    Healthy steps cost nothing, and nothing of them is copied: the batch of a step and its dropout
    are functions of the seed and its number, a step that was skipped left weights, buffers and
    optimizer as they were, and from any checkpoint the steps after it can be made again. So all
    that a step began with can still be had when the host learns, some steps late, that it was bad.
    """

    def __init__(
        self,
        config: CaptureConfig,
        folder: Path,
        settings: Mapping[str, Any],  # the whole config, as `runner.config.plain` makes it
        given: Sequence[str] = (),  # what the caller of `build` had made already
    ) -> None:
        self.config, self.settings, self.given = config, settings, list(given)
        self.root = folder / FOLDER
        self.run_folder = folder
        self.noise = noise()  # to tell whether anything draws from python's or numpy's generator
        self.full = False
        self.warned = False
        self.told = False
        self.untold: tuple[int, Path] | None = None  # the newest, until `tell`

    def take(
        self, run: Run, step: int, kind: str, message: str, batch: Batch | None = None
    ) -> str | None:
        """Keep that step, before anything is done about it; its folder, relative to the run's.

        `batch` is its batch where that is at hand; else it is fetched again. None where as many as
        debug.capture allows are there already, or where it could not be written, which is said
        once and ends no run. The host waits for the device.
        """
        if self.full:
            return None
        relative = f"{FOLDER}/{step_name(step)}"
        temporary = self.root / (TEMPORARY + step_name(step))
        try:
            there = captures(self.run_folder)
            if self.root / step_name(step) in there:  # by the run that this one continues
                return relative
            self.full = len(there) >= self.config.at_most
            if self.full:
                return None
            shutil.rmtree(temporary, ignore_errors=True)
            if not self._write(run, step, kind, message, batch, temporary):
                return None
            storage.put_folder(temporary, self.root / step_name(step))
        except Exception as error:  # of the disk, the data or a broken device: the run goes on
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self._warn(f"step {step} could not be kept for job=replay: {reason}")
            return None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self.untold = step, self.root / step_name(step)
        return relative

    def tell(self) -> None:
        """Say what `take` has kept, once; after the line about the step itself."""
        if self.untold is not None:
            log.info(
                "step %d is kept; to look into it: job=replay replay.path=%s",
                *self.untold,
                extra={"live": self.told},  # on the screen the first is enough
            )
            self.told = True
        self.untold = None

    def _write(
        self, run: Run, step: int, kind: str, message: str, batch: Batch | None, folder: Path
    ) -> bool:
        """All of it into `folder`; False where there is no room."""
        rows = [] if step > run.progress.step else run.reader.since(step)  # waits for the device
        # nor may a remedy have come in between: a roll-back, another learning rate or loss scale
        remedy = run.guardian.settled
        untouched = rows is not None and all(row[2] > 0 for row in rows) and remedy < step
        loss, norm = (rows[0][0], rows[0][1]) if rows else (None, None)
        batch = _contiguous(run.train.at(step - 1) if batch is None else batch)
        model, update = run.model.state_dict(), run.update.state()
        room = self.config.mb * MIB - _on_disk(self.root)
        own = _size(model) + _size(update)
        fits = _size(batch) + own <= room
        left = room - _size(batch) - (own if untouched and fits else 0)
        storage.make_folder(folder)
        earlier = run.checkpointer.before(step)
        if earlier is not None and not _link(earlier, folder / CHECKPOINT, left):
            earlier = None
        if left < 0 or (earlier is None and not fits):
            self._warn(
                f"step {step} takes {(_size(batch) + own) / MIB:,.1f} MB to keep for job=replay; "
                f"of debug.capture.mb={self.config.mb:g} there are {max(room, 0) / MIB:,.1f} left"
            )
            return False
        weights = Weights.then if untouched and fits else Weights.again
        if earlier is None and not untouched:
            weights = Weights.later
        checkpoint = None if earlier is None else _step(earlier)
        state: dict[str, Any] = {
            "batch": batch,
            "samples": run.train.indices(step - 1),
            "loss": loss,
            "grad_norm": norm,
            "buffers": {n: b for n, b in run.model.named_buffers() if n not in model},
            "update": None,
            "random": noise(),
            "random_then": _same(self.noise, noise()),
            "progress": asdict(run.progress),
            "remedy": remedy,
            "skipped": [n for n in run.reader.skipped if (checkpoint or 0) < n < step],
        }
        if weights is not Weights.again:
            overflows = sum(not np.isfinite(row[1]) for row in rows or ()) if untouched else 0
            state["update"] = _scale_before(update, overflows)
        manifest = Manifest(
            step=step,
            kind=kind,
            message=message,
            weights=weights,
            checkpoint=checkpoint,
            seed=run.seed,
            name=run.name,
            config_hash=run.config_hash,
            config=dict(self.settings),
            given=self.given,
            choices=_plain({choice.key: choice.value for choice in run.choices}),
            micro_batch=run.micro_batch,
            threads=run.device.threads,
            device=_plain(run.device.describe()),
            versions=versions(),
            loss=str(loss),
            grad_norm=str(norm),
        )
        fill(folder, manifest, {} if weights is Weights.again else model, state)
        return True

    def _warn(self, message: str) -> None:
        log.log(logging.DEBUG if self.warned else logging.WARNING, message)
        self.warned = True


def fill(
    folder: Path, manifest: Manifest, model: Mapping[str, Any], state: Mapping[str, Any]
) -> None:
    """Write a capture's files, the manifest last. Raises OSError."""
    snapshot = Copier(reuse=False).take(dict(model), dict(state))
    fills = {checkpoints.STATE: write_state}
    if manifest.weights is not Weights.again:
        fills[checkpoints.MODEL] = write_tensors
    for name, write in fills.items():
        manifest.files[name] = storage.write_file(folder / name, partial(write, snapshot))
    storage.write_file(folder / checkpoints.NAME, manifest.write)
    storage.sync_folder(folder)


def _link(checkpoint: Path, to: Path, room: float) -> bool:
    """Hold on to a checkpoint's files, which pruning then cannot take; copy where need be.

    A link takes no room for as long as the checkpoint is there; afterwards it counts.
    """
    names = (checkpoints.MODEL, checkpoints.STATE, checkpoints.NAME)
    to.mkdir()
    try:
        for name in names:
            os.link(checkpoint / name, to / name)
    except OSError:  # another file system, or one without links
        shutil.rmtree(to)
        if sum((checkpoint / name).stat().st_size for name in names) > room:
            return False
        to.mkdir()
        for name in names:
            shutil.copyfile(checkpoint / name, to / name)
    return True


def _step(checkpoint: Path) -> int:
    return checkpoints.read_manifest(checkpoint).step


def _on_disk(root: Path) -> int:
    """Bytes that would be free without the captures: links to what is there anyway are not."""
    links: dict[tuple[int, int], int] = {}
    bytes_ = 0
    for path in root.rglob("*"):
        if not path.is_file():
            continue
        about = path.stat()
        file = (about.st_dev, about.st_ino)
        links[file] = links.get(file, 0) + 1
        if links[file] == about.st_nlink:
            bytes_ += about.st_size
    return bytes_


def _size(value: Any) -> int:
    """Bytes of the tensors in a nest."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        value = list(value.values())
    return sum(_size(item) for item in value) if isinstance(value, list | tuple) else 0


def _contiguous(value: Any) -> Any:
    """As it was fetched: a replay without channels_last wants the plain order of memory."""
    if isinstance(value, Tensor):
        return value.contiguous() if value.layout is torch.strided else value
    if isinstance(value, dict):
        return {key: _contiguous(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_contiguous(item) for item in value)
    return value


def _scale_before(update: dict[str, Any], overflows: int) -> dict[str, Any]:
    """The loss scale as it was: each overflow since has halved it, and no step has doubled it."""
    if not update["scale"]:
        return update
    value, grown = update["scale"]
    return {**update, "scale": [value * 2.0**overflows, grown]}


def noise() -> dict[str, Any]:
    """The state of the global generators."""
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }


def _same(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether python's and numpy's generators stand where they stood; steps seed torch's."""
    numbers = (before["numpy"], now["numpy"])
    same = all(np.array_equal(a, b) for a, b in zip(*numbers, strict=True))
    return same and bool(before["python"] == now["python"])


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
