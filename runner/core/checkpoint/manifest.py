"""The manifest of a checkpoint, by which damage is detected before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.core.errors import CheckpointError
from runner.core.record.storage import FileDigest, HashedFile
from runner.core.security import checksummed_json
from runner.core.security.checksummed_json import FORMAT, to_checksummed_json

NAME = checksummed_json.MANIFEST
MODEL = "model.safetensors"
STATE = "state.pt"
PREPROCESSING = "preprocessing.json"
SHARD = re.compile(r"shard_\d{5}_of_\d{5}\.safetensors", re.ASCII)


@dataclass(frozen=True)
class Manifest:
    """Manifest, written last and removed first: a folder without it is not a checkpoint."""

    step: int
    best: bool  # whether it was the best when it was written
    files: dict[str, FileDigest]
    config_hash: str
    created_by: str  # the runner's version
    torch: str
    threads: int
    cpu: str  # the instruction set that torch's CPU kernels use
    tied: dict[str, str] = field(default_factory=dict)  # weights stored under another's name
    choices: dict[str, Any] = field(default_factory=dict)  # automatic ones; they win on resume
    format: int = FORMAT

    def write(self, file: HashedFile) -> None:
        """Write the manifest with its own digest, so that any flipped bit is detected."""
        file.write(to_checksummed_json(asdict(self)))


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest; CheckpointError names the problem."""
    manifest = checksummed_json.read_manifest(folder, Manifest)
    files = manifest.files
    model = shard_names(files) or [MODEL]  # names in the manifest are never used as paths
    if set(files) - {PREPROCESSING} != {*model, STATE}:
        path = folder / NAME
        raise CheckpointError(f"{path}: lists {sorted(files)}, expected {MODEL} and {STATE}")
    return manifest


def shard_name(rank: int, size: int) -> str:
    """Return the name of the shard of process `rank` of `size`."""
    return f"shard_{rank:05d}_of_{size:05d}.safetensors"


def shard_names(files: Collection[str]) -> list[str]:
    """Return the names of all shards by rank; [] unless the checkpoint is sharded."""
    size = sum(SHARD.fullmatch(name) is not None for name in files)
    return [shard_name(rank, size) for rank in range(size)]
