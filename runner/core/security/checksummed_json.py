"""Small JSON records that contain their own digest, to detect damage.

The digest does not authenticate the author: anyone can compute it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from runner.core.errors import CheckpointError
from runner.core.masking import mask_nested
from runner.core.record.storage import read_file


def to_checksummed_json(body: dict[str, Any]) -> bytes:
    """Return plain values as JSON bytes, masked, with their digest."""
    body = mask_nested(body)
    return _to_json({**body, "digest": hashlib.sha256(_to_json(body)).hexdigest()})


def read_checksummed_json(path: Path, expected_format: int) -> dict[str, Any]:
    """Read and verify a record of format `expected_format`.

    Raises CheckpointError with the reason.
    """
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
        raise CheckpointError(
            f"{path}: has format {version!r}, but this version of the runner reads "
            f"{expected_format}"
        )
    fields: dict[str, Any] = body
    return fields


def _to_json(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=2, sort_keys=True) + "\n").encode()
