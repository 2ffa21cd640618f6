"""Gains of techniques that earlier runs measured on this machine, in a cache folder.

A run that is too short to measure a technique uses it only if one of them found it faster.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from runner.core.record.storage import make_folder, replace_text, user_cache

log = logging.getLogger("runner")

COMPILATION = "compilation"  # row of the last one: its seconds, and the folder that caches the code


class Gain(NamedTuple):
    """Milliseconds per step that an earlier run measured."""

    with_ms: float
    without_ms: float
    faster: bool

    def __str__(self) -> str:
        verdict = "faster" if self.faster else "slower, or no faster"
        times = f"{self.with_ms:.3g} ms against {self.without_ms:.3g} ms without it"
        return f"measured before on this machine: {verdict}, {times}"


class MeasuredGains:
    """Results of earlier runs with equal `facts`: machine, versions, model, batch, techniques."""

    def __init__(self, facts: Callable[[], Any]) -> None:
        self.facts = facts

    @cached_property
    def path(self) -> Path:
        """The file of these facts; one that cannot be made if there is no home folder."""
        key = sha256(json.dumps(self.facts(), default=str).encode()).hexdigest()[:32]
        return (user_cache(os.environ) or Path(os.devnull)) / "gains" / f"{key}.json"

    def fix_path(self) -> None:
        """Compute the path now: later a technique may have changed the model."""
        log.debug("gains of earlier runs: %s", self.path)

    def read(self) -> dict[str, Any]:
        """Return the stored rows; none from a missing or damaged file."""
        try:
            rows = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return rows if isinstance(rows, dict) else {}

    def gain(self, technique: str) -> Gain | None:
        """Return what the last run with enough steps measured, or None."""
        row = self.read().get(technique)
        try:
            gain = Gain(float(row[0]), float(row[1]), row[2] is True)  # type: ignore[index]
        except (TypeError, ValueError, KeyError, IndexError):
            return None
        return gain if gain.with_ms > 0 and gain.without_ms > 0 else None

    def compile_seconds(self) -> float | None:
        """Return how long the last compilation took, if its code is still cached."""
        row = self.read().get(COMPILATION)
        try:
            seconds, folder = float(row[0]), Path(row[1])  # type: ignore[index]
            is_warm = seconds > 0 and any(folder.iterdir())
        except (OSError, TypeError, ValueError, KeyError, IndexError):
            return None
        return seconds if is_warm else None

    def store(self, name: str, row: list[Any]) -> None:
        """Replace a row; an OSError is logged, not raised."""
        rows = {**self.read(), name: row}
        try:
            make_folder(self.path.parent)
            replace_text(self.path, json.dumps(rows))
        except OSError as error:
            log.info("%s: not written: %s", self.path, error.strerror)
