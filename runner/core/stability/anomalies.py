"""Records of bad steps, written to `debug/anomalies.json`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from runner.core.record.storage import write_or_log

ANOMALIES_FILE = "debug/anomalies.json"
MAX_FIRST, MAX_LATEST = 500, 500  # most rows kept, of the earliest and of the latest


class BadStepKind(Enum):
    """Kinds of bad steps."""

    non_finite = "non_finite"  # the loss, or a gradient without a loss scale
    overflow = "overflow"  # of a gradient times the loss scale of fp16
    spike = "spike"  # finite, but far above the usual
    weights = "weights"  # weights are not finite
    buffers = "buffers"  # e.g. BatchNorm statistics are not finite; loss and gradients are


@dataclass
class Anomaly:
    """A bad step."""

    step: int
    kind: str
    loss: float
    grad_norm: float
    loss_limit: float  # spike threshold of the loss
    grad_norm_limit: float
    skipped: bool
    action: str = ""
    capture: str = ""  # folder for job=replay, relative to the run's

    def as_json(self) -> dict[str, Any]:
        """Return a row for JSON: NaN and Inf are null; `nonfinite` names them, except in limits."""
        row = asdict(self)
        numbers = ("loss", "grad_norm", "loss_limit", "grad_norm_limit")
        nonfinite = {name: str(row[name]) for name in numbers if not math.isfinite(row[name])}
        row |= dict.fromkeys(nonfinite)
        values = {k: v for k, v in nonfinite.items() if not k.endswith("_limit")}
        return row | {"nonfinite": values} if values else row


class Anomalies:
    """The bad steps of a run; beyond MAX_FIRST + MAX_LATEST rows, the earliest and the latest."""

    def __init__(self) -> None:
        self.rows: list[Anomaly] = []
        self.count = 0
        self.unwritten = False

    def __iter__(self) -> Iterator[Anomaly]:
        return iter(self.rows)

    def add(self, row: Anomaly) -> None:
        """Add a row, to be written by `write`."""
        self.count += 1
        self.rows.append(row)
        if len(self.rows) > MAX_FIRST + MAX_LATEST:
            del self.rows[MAX_FIRST]
        self.unwritten = True

    def write(self, folder: Path | None, **facts: Any) -> None:
        """Replace the file in a run's folder if there are new rows since the last write."""
        if not (self.unwritten or facts) or folder is None:
            return
        rows = [row.as_json() for row in self.rows]
        text = json.dumps({"count": self.count, "anomalies": rows} | facts)
        write_or_log(folder / ANOMALIES_FILE, text + "\n", logging.DEBUG)
        self.unwritten = False

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"count": self.count, "rows": [asdict(row) for row in self.rows]}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.count, self.rows = state["count"], [Anomaly(**row) for row in state["rows"]]
        self.unwritten = len(self.rows) > 0
