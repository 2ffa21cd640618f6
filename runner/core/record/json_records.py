"""Reading of JSON records that may be damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runner.core.record.storage import read_record

MAX_DEPTH = 50  # nesting accepted in a record; ours have five levels


def read_json(path: Path) -> Any:
    """Read a JSON record; None if it is damaged or nested deeper than `MAX_DEPTH`."""
    try:
        tree = json.loads(read_record(path))
    except (OSError, ValueError, RecursionError):
        return None
    return tree if _is_shallow(tree, MAX_DEPTH) else None


def _is_shallow(value: Any, levels: int) -> bool:
    value = [*value.values()] if isinstance(value, dict) else value
    children = value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(item, levels - 1) for item in children)
