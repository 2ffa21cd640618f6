"""Manifests: JSON that contains its own digest, to detect damage.

The digest does not authenticate the author: anyone can compute it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from runner.core.errors import CheckpointError
from runner.core.masking import mask_nested
from runner.core.record.storage import FileDigest, read_file
from runner.core.record.text import dataclass_from_json

T = TypeVar("T")
MANIFEST = "manifest.json"
FORMAT = 1  # of checkpoints and captures


@dataclass(frozen=True)
class ListedFiles:
    """What the manifests of checkpoints and captures have in common."""

    files: dict[str, FileDigest]  # by name


def to_checksummed_json(body: dict[str, Any]) -> bytes:
    """Return plain values as JSON bytes, masked, with their digest."""
    body = mask_nested(body)
    return _to_json({**body, "digest": hashlib.sha256(_to_json(body)).hexdigest()})


def read_manifest(folder: Path, kind: type[T]) -> T:
    """Read a folder's manifest as the dataclass `kind`. Raises CheckpointError with the reason."""
    path = folder / MANIFEST
    body = read_checksummed_json(path, FORMAT)
    try:  # values of other types are errors here, not in later text
        return dataclass_from_json(kind, body)
    except (TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{path}: not a manifest of the runner") from None


def read_checksummed_json(path: Path, expected_format: int) -> dict[str, Any]:
    """Read and verify a record of `expected_format`; CheckpointError has the reason."""
    data = read_file(path)
    try:
        body = json.loads(data)
        version = body["format"]
        digest = body.pop("digest")
        intact = digest == hashlib.sha256(_to_json(body)).hexdigest()
        intact = intact and data == _to_json({**body, "digest": digest})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path}: damaged, or not a manifest ({len(data)} bytes)") from None
    if not intact:
        raise CheckpointError(f"{path}: damaged: its contents do not match its own checksum")
    if version != expected_format:
        problem = f"has format {version!r}, but this version reads {expected_format}"
        raise CheckpointError(f"{path}: {problem}")
    fields: dict[str, Any] = body
    return fields


def _to_json(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=2, sort_keys=True) + "\n").encode()
