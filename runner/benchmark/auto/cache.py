"""What `optimization=auto` found, kept for runs of the same model, shapes, device and versions."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runner.benchmark.auto.tried import Found, Tried
from runner.masking import masked_all
from runner.record.text import dataclass_from_dict, escape_control_chars, json_safe

log = logging.getLogger("runner")

SCHEMA = 1


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/runner/auto`, by default under `~/.cache`."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "runner" / "auto"


def remembered(key: str) -> Found | None:
    """What was found for that key, if anything; what cannot be read is said and left alone."""
    path = cache_folder() / f"{key}.json"
    try:
        return found_of(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = escape_control_chars(f"{type(error).__name__}: {error}")
        log.warning("%s is damaged and not used (%s); measuring anew", path, reason)
        return None


def remember(key: str, found: Found) -> None:
    """Keep it; a disk that does not take it is said, and no reason to fail."""
    folder = cache_folder()
    temporary = folder / f".{key}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        text = json.dumps(as_dict(masked_all(found)), indent=1)
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, folder / f"{key}.json")
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        log.warning("%s: the choice is not kept for later runs: %s", folder, error.strerror)


def as_dict(found: Found) -> dict[str, Any]:
    """As JSON holds it; an end of an interval that is open is null."""
    return {"schema": SCHEMA, **json_safe(asdict(found))}


def found_of(read: Any) -> Found:
    """The reverse of `as_dict`. Raises ValueError, TypeError or KeyError for anything else."""
    if not isinstance(read, dict) or read.get("schema") != SCHEMA:
        raise ValueError("it is of another version")
    rows = [dataclass_from_dict(Tried, row) for row in read["tried"]]
    for row in rows:
        if row.final_interval is not None:
            low, high = row.final_interval
            row.final_interval = float(low), float("inf") if high is None else float(high)
        float(row.extra_seconds)
        float(row.final_ratio or 0.0)
    found = dataclass_from_dict(Found, {**read, "tried": rows})
    float(found.none_ms), int(found.steps), float(found.noise_floor)
    return found
