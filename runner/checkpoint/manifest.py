"""What a checkpoint's folder must hold, so that damage is found before anything is loaded."""

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
    """Written last, and removed first: a folder without it is not a checkpoint."""

    step: int
    best: bool  # the best so far when it was written
    files: dict[str, FileDigest]
    config_hash: str
    created_by: str  # the runner's version
    torch: str
    threads: int
    cpu: str  # the instruction set that torch's CPU kernels use
    tied: dict[str, str] = field(default_factory=dict)  # weights stored under another's name
    choices: dict[str, Any] = field(default_factory=dict)  # made automatically; win on resume
    format: int = FORMAT

    def write(self, file: HashedFile) -> None:
        """Write it with its own digest, so that no flipped bit goes unseen."""
        file.write(sealed(asdict(self)))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder; CheckpointError says in what way it is not good."""
    path = folder / NAME
    body = read_sealed(path, FORMAT)
    try:
        manifest = dataclass_from_json(Manifest, body)
    except (TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{path}: not a manifest of the runner") from None
    files = manifest.files
    model = shard_names(files) or [MODEL]  # names in it are never used as paths
    if set(files) - {PREPROCESSING} != {*model, STATE}:
        raise CheckpointError(f"{path}: lists {sorted(files)} and not {MODEL} and {STATE}")
    return manifest


def shard_name(rank: int, size: int) -> str:
    """The file of one of the processes that have each a shard of the model."""
    return f"shard_{rank:05d}_of_{size:05d}.safetensors"


def shard_names(files: Collection[str]) -> list[str]:
    """Those of all processes, by rank, where the files are of a checkpoint in shards."""
    size = sum(SHARD.fullmatch(name) is not None for name in files)
    return [shard_name(rank, size) for rank in range(size)]
