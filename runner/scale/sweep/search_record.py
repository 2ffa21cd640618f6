"""The record of a hyper-parameter search: `search.json`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.core.config.groups import without_arguments
from runner.core.record.json_records import read_json
from runner.core.record.text import dataclass_from_json

SEARCH_FILE = "search.json"
STATUSES = ("done", "pruned", "failed", "running")


def short_key(key: str) -> str:
    """Return a parameter's key without arguments and `+`, for display."""
    return without_arguments(key).lstrip("+")


@dataclass(frozen=True)
class SearchTrial:
    """One trial of the study, from any process."""

    number: int
    status: str  # one of STATUSES
    value: float | None = None  # of the metric; if pruned, the last one
    values: dict[str, Any] = field(default_factory=dict)  # by parameter
    reason: str = ""
    command: str = ""
    seconds: float | None = None
    folder: str = ""  # of a trial of this sweep, within it

    @property
    def title(self) -> str:
        """Its parameter values as overrides."""
        return " ".join(f"{short_key(key)}={value}" for key, value in self.values.items())


@dataclass(frozen=True)
class SearchParameter:
    """A varied key and its range as text."""

    key: str
    text: str


@dataclass(frozen=True)
class SearchRecord:
    """All trials of the study, including those of other processes."""

    metric: str
    direction: str  # maximize | minimize
    sampler: str
    pruner: str
    wanted: int
    storage: str
    parameters: list[SearchParameter]
    trials: list[SearchTrial]

    @property
    def best(self) -> SearchTrial | None:
        """The trial with the best value; the first of equal ones."""
        done = [t for t in self.trials if t.status == "done" and t.value is not None]
        sign = 1 if self.direction == "maximize" else -1
        return max(done, key=lambda t: sign * (t.value or 0.0), default=None)

    @property
    def status_counts(self) -> str:
        """The number of trials by status, as text."""
        counts = Counter(trial.status for trial in self.trials)
        return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])


def read_search(folder: Path) -> SearchRecord | None:
    """Read the search record of a sweep's folder; None if missing or damaged."""
    path = folder / SEARCH_FILE
    try:
        return dataclass_from_json(SearchRecord, read_json(path)) if path.is_file() else None
    except (TypeError, ValueError, AttributeError):
        return None
