"""The manifest of a checkpoint's folder, by which damage is detected before loading."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import CheckpointError
from runner.record.storage import FileDigest, HashedFile
from runner.record.text import dataclass_from_json
from runner.security.sealed import read_sealed, sealed

NAME = "manifest.json"
MODEL = "model.safetensors"
STATE = "state.pt"
PREPROCESSING = "preprocessing.json"
FORMAT = 1
SHARD = re.compile(r"shard_\d{5}_of_\d{5}\.safetensors", re.ASCII)


@dataclass(frozen=True)
class Manifest:
    """Contents of manifest.json, written last: a folder without it is not a checkpoint."""

    step: int
    best: bool  # the best so far when it was written
    files: dict[str, FileDigest]
    config_hash: str
    created_by: str  # the runner's version
    torch: str
    threads: int
    cpu: str  # the instruction set that torch's CPU kernels use
    tied: dict[str, str] = field(default_factory=dict)  # name of a tied weight -> stored name
    choices: dict[str, Any] = field(default_factory=dict)  # automatic, kept on resume
    format: int = FORMAT

    def write(self, file: HashedFile) -> None:
        """Write the manifest with its digest, so that any flipped bit is detected."""
        file.write(sealed(asdict(self)))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint's folder; CheckpointError if it is invalid."""
    path = folder / NAME
    body = read_sealed(path, FORMAT)
    try:
        manifest = dataclass_from_json(Manifest, body)
    except (TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{path}: not a manifest of the runner") from None
    files = manifest.files
    model = shard_names(files) or [MODEL]  # names in the manifest are never used as paths
    if set(files) - {PREPROCESSING} != {*model, STATE}:
        raise CheckpointError(f"{path}: lists {sorted(files)} and not {MODEL} and {STATE}")
    return manifest


def shard_name(rank: int, size: int) -> str:
    """Return the file name of a process's shard of the model."""
    return f"shard_{rank:05d}_of_{size:05d}.safetensors"


def shard_names(files: Collection[str]) -> list[str]:
    """Return the shard files by rank, as many as there are in `files`; [] if not sharded."""
    size = sum(SHARD.fullmatch(name) is not None for name in files)
    return [shard_name(rank, size) for rank in range(size)]
