"""The numbers of the steps that went wrong: `debug/anomalies.json`."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runner.record.storage import replace_text

log = logging.getLogger("runner")

FILE = "debug/anomalies.json"
FIRST, LAST = 500, 500  # rows that are kept, of the first and of the latest


@dataclass
class Anomaly:
    """A step with something wrong about it."""

    step: int
    kind: str
    loss: float
    grad_norm: float
    loss_limit: float  # from where on it would have been a spike
    grad_norm_limit: float
    skipped: bool
    action: str = ""
    capture: str = ""  # folder for job=replay, relative to the run's


class Anomalies:
    """All of them, or of very many the first and the latest."""

    def __init__(self) -> None:
        self.rows: list[Anomaly] = []
        self.count = 0
        self.unwritten = False

    def __iter__(self) -> Iterator[Anomaly]:
        return iter(self.rows)

    def add(self, row: Anomaly) -> None:
        """Keep a row; nothing is written before `write`."""
        self.count += 1
        self.rows.append(row)
        if len(self.rows) > FIRST + LAST:
            del self.rows[FIRST]
        self.unwritten = True

    def write(self, folder: Path | None) -> None:
        """Replace the file in a run's folder, if there is anything new.

        JSON has no NaN or Inf: such a value is null, and `nonfinite` says which one it was.
        """
        if not self.unwritten or folder is None:
            return
        path = folder / FILE
        text = json.dumps({"count": self.count, "anomalies": [_plain(row) for row in self.rows]})
        try:
            path.parent.mkdir(exist_ok=True)
            replace_text(path, text + "\n")
        except OSError as error:
            log.debug("no anomalies.json: %s", error)
        self.unwritten = False

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"count": self.count, "rows": [asdict(row) for row in self.rows]}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.count, self.rows = state["count"], [Anomaly(**row) for row in state["rows"]]
        self.unwritten = bool(self.rows)


def _plain(row: Anomaly) -> dict[str, Any]:
    found = asdict(row)
    for limit in ("loss_limit", "grad_norm_limit"):  # Inf: there was none
        found[limit] = found[limit] if math.isfinite(found[limit]) else None
    odd = {k: str(found[k]) for k in ("loss", "grad_norm") if not math.isfinite(found[k])}
    if odd:
        found.update(dict.fromkeys(odd), nonfinite=odd)
    return found
