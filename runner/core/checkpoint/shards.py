"""Sharded checkpoints: each process writes its rows of every weight and of its optimizer state.

Rows are along dimension 0, in rank order, so concatenation gives the weight for any number of
processes. torch's own writer (`torch.distributed.checkpoint.HuggingFaceStorageWriter`) plans with
collectives, which a background thread must not mix with those of training, saves only tensors, and
neither computes digests nor syncs files.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.core.checkpoint.manifest import shard_name
from runner.core.checkpoint.snapshot import Copier, Snapshot, write_tensors
from runner.core.errors import CheckpointError
from runner.core.record.storage import write_file

if TYPE_CHECKING:
    from runner.core.interfaces.shards import CheckpointCommitProtocol

log = logging.getLogger("runner")
INCONSISTENT = (LookupError, TypeError, ValueError, RuntimeError, AttributeError)
Rows = dict[str, Tensor]


def copy_shard(
    copier: Copier,
    model: Mapping[str, Any],
    state: dict[str, Any],
    sharded: Collection[str],
    first: bool,
) -> Snapshot:
    """Copy what this process writes: its shard, and for the `first` also the replicated state."""
    rows, replicated, state = split_shard(model, state, sharded)
    if not first:
        return copier.take(dict(rows), {})
    return copier.take({**rows, **replicated}, state, with_state=replicated)


def write_shard(commit: CheckpointCommitProtocol, folder: Path, snapshot: Snapshot) -> None:
    """Write the shard of a process other than the first, in a background thread, and report it."""
    try:
        commit.await_folder()
        path = folder / shard_name(commit.rank, commit.size)
        try:
            commit.report(write_file(path, partial(write_tensors, snapshot)))
        except OSError as error:
            commit.report(None, error.strerror or str(error))
    except OSError as error:
        log.warning("%s: this process's shard was not written: %s", folder, error.strerror)


def split_shard(
    model: Mapping[str, Any], state: dict[str, Any], sharded: Collection[str]
) -> tuple[Rows, dict[str, Any], dict[str, Any]]:
    """Split into this process's rows (by name in its file), the rest of the model, and the state.

    Optimizer tensors of one dimension or more are assumed to have their weight's shape.
    """
    rows: Rows = {f"model.{name}": model[name] for name in sharded}
    update = state["update"]
    optimizer, replicated = update["optimizer"], dict[int, Any]()
    for number, entries in optimizer["state"].items():
        replicated[number] = {k: v for k, v in entries.items() if not has_rows(v)}
        rows |= {f"optimizer.{number}.{k}": v for k, v in entries.items() if has_rows(v)}
    rows |= {f"average.{number}": tensor for number, tensor in enumerate(update["average"])}
    update = {**update, "optimizer": {**optimizer, "state": replicated}, "average": []}
    rest = {name: value for name, value in model.items() if name not in sharded}
    return rows, rest, {**state, "update": update}


def merge_shards(shards: list[Rows], state: dict[str, Any], where: str) -> dict[str, Tensor]:
    """Concatenate sharded weights by name; restore optimizer and average in `state`."""
    try:
        if any(shard.keys() != shards[0].keys() for shard in shards):
            raise ValueError("they hold different tensors")
        model: dict[str, Tensor] = {}
        update, average = state["update"], dict[int, Tensor]()
        for name in list(shards[0]):
            tensor = torch.cat([shard.pop(name) for shard in shards])
            part, _, rest = name.partition(".")
            number, _, key = rest.partition(".")
            if part == "model":
                model[rest] = tensor
            elif part == "optimizer":
                update["optimizer"]["state"][int(number)][key] = tensor
            else:
                average[int(number)] = tensor
        update["average"] = [average[number] for number in range(len(average))]
    except INCONSISTENT as error:
        text = str(error).splitlines()[0] if str(error) else ""
        raise CheckpointError(f"{where}: its shards are inconsistent: {text}") from error
    return model


def has_rows(value: Any) -> bool:
    """Whether `value` is a tensor of one dimension or more."""
    return isinstance(value, Tensor) and value.ndim > 0
