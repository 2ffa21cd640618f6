"""Writing of captures of bad steps, for job=replay."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from runner.core.captures.manifest import (
    CHECKPOINT,
    FOLDER,
    CapturedWeights,
    CaptureManifest,
    list_captures,
)
from runner.core.checkpoint import manifest as checkpoints
from runner.core.checkpoint.folder import step_name
from runner.core.checkpoint.snapshot import Copier, write_state, write_tensors
from runner.core.interfaces.batch import Batch
from runner.core.interfaces.nested import tensors, tree_map
from runner.core.interfaces.run import Run
from runner.core.preserved_state import random_state
from runner.core.record import storage
from runner.core.record.provenance import versions

if TYPE_CHECKING:
    from runner.core.captures.run_captures import CaptureRecorder

MIB = 2**20


def take_capture(
    recorder: CaptureRecorder, run: Run, step: int, kind: str, message: str, batch: Batch | None
) -> str | None:
    """Write a capture; return its relative path, or None beyond a limit. Raises OSError."""
    existing = list_captures(recorder.folder)
    target = recorder.folder / FOLDER / step_name(step)
    if target in existing:  # written before the run was resumed
        return f"{FOLDER}/{target.name}"
    recorder.limit_reached = len(existing) >= recorder.config.at_most
    if recorder.limit_reached:
        return None
    reports = [] if step > run.progress.step else run.reader.since(step)  # host sync
    # a later remedy (roll-back, learning rate, loss scale) changed the state the step began with
    unchanged = reports is not None and all(row[2] > 0 for row in reports)
    unchanged = unchanged and run.stability.last_remedy_step < step
    loss, grad_norm = (reports[0][0], reports[0][1]) if reports else (None, None)
    batch = _contiguous(run.train.at(step - 1) if batch is None else batch)
    previous = run.checkpointer.newest_before(step)
    free_bytes = recorder.config.mb * MIB - _used_bytes(recorder.folder / FOLDER)
    free_bytes -= _tensor_bytes(batch)
    if free_bytes < 0:
        limit = f"is left of debug.capture.mb={recorder.config.mb:g}"
        recorder.warn(f"step {step} not captured for job=replay: it needs more than {limit}")
        return None
    model, generators, update = run.model.state_dict(), random_state(), run.update.state()
    if unchanged and _tensor_bytes([model, update]) <= free_bytes:
        weights = CapturedWeights.then
    else:
        weights = CapturedWeights.later if previous is None else CapturedWeights.again
    checkpoint = None if previous is None else checkpoints.read_manifest(previous).step
    state: dict[str, Any] = {
        "batch": batch,
        "samples": run.train.indices(step - 1),
        "loss": loss,
        "grad_norm": grad_norm,
        "medians": {n: usual.median for n, usual in run.stability.spikes.baselines.items()},
        "buffers": {n: b for n, b in run.model.named_buffers() if n not in model},
        "update": None,
        "random": generators,
        "random_then": _same_generators(recorder.random_state, generators),
        "progress": asdict(run.progress),
        "remedy": run.stability.last_remedy_step,
        "skipped": [n for n in run.reader.skipped if (checkpoint or 0) < n < step],
    }
    if weights is CapturedWeights.then:
        overflows = sum(not np.isfinite(row[1]) for row in reports or ())
        state["update"] = _restore_scale(update, overflows)
    manifest = CaptureManifest(
        step=step,
        kind=kind,
        message=message,
        weights=weights,
        checkpoint=checkpoint,
        seed=run.seed,
        name=run.name,
        config_hash=run.config_hash,
        config=dict(recorder.settings),
        given=recorder.user_parts,
        choices=_json_safe({c.key: c.value for c in run.choices} | run.measured_choices()),
        micro_batch=run.micro_batch,
        threads=run.device.threads,
        device=_json_safe(run.device.describe()),
        versions=versions(),
        loss=str(loss),
        grad_norm=str(grad_norm),
    )
    relative = write_capture(recorder.folder, manifest, model, state, previous)
    recorder.unlogged = step, recorder.folder / relative
    return relative


def write_capture(
    folder: Path,
    manifest: CaptureManifest,
    model: Mapping[str, Any],
    state: Mapping[str, Any],
    checkpoint: Path | None = None,
) -> str:
    """Write a capture atomically into a run's folder; return its relative path.

    The files of `checkpoint` are hard-linked: they survive pruning, and need no space while the
    checkpoint exists. Raises OSError.
    """
    name = step_name(manifest.step)
    has_weights = manifest.weights is CapturedWeights.then
    snapshot = Copier(reuse=False).take(dict(model) if has_weights else {}, dict(state))
    writers = {checkpoints.STATE: write_state}
    if has_weights:
        writers[checkpoints.MODEL] = write_tensors
    temporary = folder / FOLDER / f".tmp-{name}"
    storage.remove_folder(temporary, ignore_errors=True)
    try:
        storage.make_folder(temporary)
        if checkpoint is not None:
            storage.make_folder(temporary / CHECKPOINT)
            for linked in (*checkpoints.read_manifest(checkpoint).files, checkpoints.NAME):
                storage.hard_link(checkpoint / linked, temporary / CHECKPOINT / linked)
        for file, write in writers.items():
            manifest.files[file] = storage.write_file(temporary / file, partial(write, snapshot))
        storage.write_file(temporary / checkpoints.NAME, manifest.write)  # last
        storage.sync_folder(temporary)
        storage.replace_folder(temporary, folder / FOLDER / name)
    finally:
        storage.remove_folder(temporary, ignore_errors=True)
    return f"{FOLDER}/{name}"


def _used_bytes(root: Path) -> int:
    """Return the bytes of captures, without files that are hard-linked elsewhere."""
    files = [path.stat() for path in root.rglob("*") if path.is_file()]
    return sum(file.st_size for file in files if file.st_nlink == 1)


def _tensor_bytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors(value))


def _contiguous(batch: Batch) -> Batch:
    """Return the batch in contiguous format, for a replay without channels_last."""
    inputs, target = tree_map(batch, lambda t: t.contiguous() if t.layout is torch.strided else t)
    return inputs, target


def _restore_scale(update: dict[str, Any], overflows: int) -> dict[str, Any]:
    """Undo the halvings of the loss scale by later overflows; it was not doubled since."""
    if not update["scale"]:
        return update
    value, grown = update["scale"]
    return {**update, "scale": [value * 2.0**overflows, grown]}


def _same_generators(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether python's and numpy's generators were not used; steps seed torch's."""
    arrays = zip(before["numpy"], now["numpy"], strict=True)
    return all(np.array_equal(a, b) for a, b in arrays) and before["python"] == now["python"]


def _json_safe(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
