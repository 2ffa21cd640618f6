"""Sharded checkpoints: each process writes its rows of every weight and of its optimizer state.

Rows are along dimension 0, by rank, so the concatenated shards are the whole weight for any number
of processes. torch's writer (`torch.distributed.checkpoint.HuggingFaceStorageWriter`) plans by
collectives, which a background thread must not mix with those of training, saves only tensors, and
neither hashes nor syncs files.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runner.checkpoint.manifest import shard_name
from runner.checkpoint.snapshot import Copier, Snapshot, write_tensors
from runner.errors import CheckpointError
from runner.record.storage import write_file

if TYPE_CHECKING:
    from runner.distributed.commit import Commit

log = logging.getLogger("runner")
MISFITS = (LookupError, TypeError, ValueError, RuntimeError, AttributeError)
Rows = dict[str, Tensor]


def copy_shard(
    copier: Copier,
    model: Mapping[str, Any],
    state: dict[str, Any],
    sharded: Collection[str],
    first: bool,
) -> Snapshot:
    """Copy what this process writes: its shard, and in the `first` also the unsharded rest."""
    rows, rest, state = split_shard(model, state, sharded)
    if not first:
        return copier.take(dict(rows), {})
    return copier.take({**rows, **rest}, state, beside=rest)


def write_shard(together: Commit, folder: Path, snapshot: Snapshot) -> None:
    """Write the shard of a process other than the first, and report it to the first."""
    try:
        together.await_folder()
        path = folder / shard_name(together.rank, together.size)
        try:
            together.report(write_file(path, partial(write_tensors, snapshot)))
        except OSError as error:
            together.report(None, error.strerror or str(error))
    except OSError as error:
        log.warning("%s: this process's shard was not written: %s", folder, error.strerror)


def split_shard(
    model: Mapping[str, Any], state: dict[str, Any], sharded: Collection[str]
) -> tuple[Rows, dict[str, Any], dict[str, Any]]:
    """Split off the rows of this process by name; return rows, rest of the model, rest of state.

    Optimizer tensors with dimensions are assumed to have their weight's shape.
    """
    rows: Rows = {f"model.{name}": model[name] for name in sharded}
    update = state["update"]
    optimizer, kept = update["optimizer"], dict[int, Any]()
    for number, entries in optimizer["state"].items():
        kept[number] = {k: v for k, v in entries.items() if not has_rows(v)}
        rows |= {f"optimizer.{number}.{k}": v for k, v in entries.items() if has_rows(v)}
    rows |= {f"average.{number}": tensor for number, tensor in enumerate(update["average"])}
    update = {**update, "optimizer": {**optimizer, "state": kept}, "average": []}
    rest = {name: value for name, value in model.items() if name not in sharded}
    return rows, rest, {**state, "update": update}


def merge_shards(shards: list[Rows], state: dict[str, Any], where: str) -> dict[str, Tensor]:
    """Return the whole weights by name, and put optimizer tensors and average into `state`."""
    try:
        if any(shard.keys() != shards[0].keys() for shard in shards):
            raise ValueError("they hold different tensors")
        model: dict[str, Tensor] = {}
        update, average = state["update"], dict[int, Tensor]()
        for name in list(shards[0]):
            whole = torch.cat([shard.pop(name) for shard in shards])
            part, _, rest = name.partition(".")
            number, _, key = rest.partition(".")
            if part == "model":
                model[rest] = whole
            elif part == "optimizer":
                update["optimizer"]["state"][int(number)][key] = whole
            else:
                average[int(number)] = whole
        update["average"] = [average[number] for number in range(len(average))]
    except MISFITS as error:
        text = str(error).splitlines()[0] if str(error) else ""
        raise CheckpointError(f"{where}: its shards do not fit each other: {text}") from error
    return model


def has_rows(value: Any) -> bool:
    """Return whether a value is a tensor of at least one dimension."""
    return isinstance(value, Tensor) and value.ndim > 0
