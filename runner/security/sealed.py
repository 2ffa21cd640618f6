"""Small records with a digest of their own, so that no flipped bit in them goes unseen.

The digest shows damage and not who wrote it: anybody can make one that fits.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from runner.errors import CheckpointError
from runner.masking import masked_all
from runner.record.storage import read_file


def sealed(body: dict[str, Any]) -> bytes:
    """Plain values as JSON, with the digest of it all."""
    body = masked_all(body)
    return _text({**body, "digest": hashlib.sha256(_text(body)).hexdigest()})


def read_sealed(path: Path, newest: int) -> dict[str, Any]:
    """What was `sealed` in that file, of the format `newest`.

    CheckpointError says in what way it is not good.
    """
    data = read_file(path)
    try:
        body = json.loads(data)
        version = body["format"]
        digest = body.pop("digest")
        whole = digest == hashlib.sha256(_text(body)).hexdigest()
        whole = whole and data == _text({**body, "digest": digest})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path}: damaged, or not a manifest ({len(data)} bytes)") from None
    if not whole:
        raise CheckpointError(f"{path}: damaged: its contents do not match its own checksum")
    if version != newest:
        raise CheckpointError(
            f"{path}: has format {version!r}, and this version of the runner reads {newest}"
        )
    fields: dict[str, Any] = body
    return fields


def _text(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=2, sort_keys=True) + "\n").encode()
