"""The interface of a sink."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class MetricsRow:
    """A row of metrics.jsonl, with the time at which it was sent, in seconds."""

    step: int
    split: str
    values: Mapping[str, float]
    time: float

    @property
    def tagged(self) -> dict[str, float]:
        """The values by `<split>/<name>`, NaN and Inf included."""
        return {f"{self.split}/{name}": float(value) for name, value in self.values.items()}


@dataclass(frozen=True)
class RunDescription:
    """Facts about the run for `Sink.open`; secrets are masked."""

    name: str
    label: str  # name within the experiment: that of the folder
    folder: Path
    params: Mapping[str, Any] = field(default_factory=dict)  # the config, with dotted keys
    tags: Mapping[str, str] = field(default_factory=dict)  # name, config_hash, git_commit


class Sink(ABC):
    """Receives a run's rows on its own thread; an exception ends only the sink."""

    name = "sink"

    @abstractmethod
    def open(self, run: RunDescription) -> Mapping[str, int]:
        """Begin a run, or continue the one an earlier process began for this folder.

        Returns the last step already stored, by split; rows up to it are not sent again.
        """

    @abstractmethod
    def write(self, rows: Sequence[MetricsRow]) -> None:
        """Store rows, in order."""

    @abstractmethod
    def close(self, status: str, files: Sequence[Path]) -> None:
        """End the run with its status (`done`, `failed`, …); upload its report and summary."""


def row_from_json(entry: Mapping[str, Any], time: float) -> MetricsRow | None:
    """Return a line of metrics.jsonl as a row; None if it is not one."""
    step, split = entry.get("step"), entry.get("split")
    if not isinstance(step, int) or not isinstance(split, str):
        return None
    values = {k: v for k, v in entry.items() if k not in ("step", "split", "nonfinite")}
    values |= {name: float(text) for name, text in entry.get("nonfinite", {}).items()}
    return MetricsRow(
        step, split, {k: math.nan if v is None else v for k, v in values.items()}, time
    )
