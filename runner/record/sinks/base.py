"""What a receiver of the record is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class MetricsRow:
    """A row of metrics.jsonl, with the time in seconds at which it was handed on."""

    step: int
    split: str
    values: Mapping[str, float]
    time: float

    @property
    def tagged(self) -> dict[str, float]:
        """The values by `<split>/<name>`; NaN and Inf are among them."""
        return {f"{self.split}/{name}": float(value) for name, value in self.values.items()}


@dataclass(frozen=True)
class RunDescription:
    """What a sink is told of the run when it opens; secrets are masked."""

    name: str
    label: str  # sets it apart within its experiment: the folder's name
    folder: Path
    params: Mapping[str, Any] = field(default_factory=dict)  # the config, with dotted keys
    tags: Mapping[str, str] = field(default_factory=dict)  # name, config_hash, git_commit


class Sink(ABC):
    """Receives a run's rows on a thread of its own; whatever it raises only ends the sink."""

    name = "sink"

    @abstractmethod
    def open(self, run: RunDescription) -> Mapping[str, int]:
        """Begin, or continue what an earlier process began for this folder.

        Returns the last step that it holds already, by split; rows up to there are not sent again.
        """

    @abstractmethod
    def write(self, rows: Sequence[MetricsRow]) -> None:
        """Take rows, in order."""

    @abstractmethod
    def close(self, status: str, files: Sequence[Path]) -> None:
        """End with the run's status (`done`, `failed`, …) and its report and summary."""


def row_from_json(entry: Mapping[str, Any], time: float) -> MetricsRow | None:
    """A line of metrics.jsonl; None for what is none."""
    step, split = entry.get("step"), entry.get("split")
    if not isinstance(step, int) or not isinstance(split, str):
        return None
    values = {k: v for k, v in entry.items() if k not in ("step", "split", "nonfinite")}
    values |= {name: float(text) for name, text in entry.get("nonfinite", {}).items()}
    return MetricsRow(
        step, split, {k: math.nan if v is None else v for k, v in values.items()}, time
    )
