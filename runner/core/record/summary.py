"""The summary of a run, which other tools read: `summary.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.core.errors import StorageError
from runner.core.findings import Choice
from runner.core.interfaces.batch import ColumnUse
from runner.core.interfaces.hook import Cost
from runner.core.interfaces.run import FINISHED_ENDS
from runner.core.interfaces.technique import TechniqueStatus
from runner.core.record.storage import read_record, safe_opener, write_json
from runner.core.record.text import dataclass_from_json

SUMMARY_FILE = "summary.json"
FINISHED_STATUSES = ("done", "stopped")
"""Statuses of a run that ended normally and is not run again; others are failures with a reason."""
ENDS = {
    **dict.fromkeys(("interrupted", "killed"), "signal"),
    "done": "done",
    "stopped": "hook",
    "timeout": "limit",
    "oom": "memory",
}
"""What ended a run, by its status, unless more is known; `error` for others."""
STATUS_HEAD_BYTES = 64  # bytes at the start of the file that contain status and end


HIGHER_IS_BETTER = ("accuracy", "Accuracy", "r2", "R2Score")
"""Metrics of a baseline for which higher is better."""


def unbeaten(
    baseline: Mapping[str, float], metrics: Mapping[str, float], monitor: str, best: float | None
) -> list[str]:
    """Return the metrics that are not better than the baseline; of the monitored one the best."""
    names = []
    for name, limit in baseline.items():
        value = best if name == monitor and best is not None else metrics.get(name, math.nan)
        higher = name.rpartition("/")[2] in HIGHER_IS_BETTER
        if not (value > limit if higher else value < limit):  # NaN beats nothing
            names.append(name)
    return names


@dataclass
class StepTime:
    """Milliseconds per step, percentiles over the steps after the first few.

    On an accelerator over a sample of them, timed by the device.
    """

    p50: float = 0.0
    p95: float = 0.0
    steps: int = 0  # behind the percentiles


@dataclass
class Throughput:
    """Speed of the training steps, without validation, checkpoints and debug tools."""

    samples_per_second: float = 0.0
    tokens_per_second: float | None = None
    step_ms: StepTime = field(default_factory=StepTime)
    split: dict[str, float] = field(default_factory=dict)  # share of data, forward, backward, …
    seconds: float = 0.0  # of the steps after the first few, until the device has finished them
    samples: int = 0  # of these steps
    other_cpu_share: float | None = None  # of the CPUs, used by other processes meanwhile


@dataclass
class MemoryPeaks:
    """Largest memory held, bytes."""

    peak_process_bytes: int = 0
    peak_device_bytes: int = 0


@dataclass
class CheckpointPaths:
    """Folders of the last and the best checkpoint, relative to the run's folder."""

    last: str | None = None
    best: str | None = None


@dataclass
class Summary:
    """Result of a run. The field names are a contract with the tools that read them."""

    status: str = "running"  # running | done | stopped | interrupted | failed
    reason: str = ""
    # done | patience | pruned | hook | limit | stop_file | memory | signal | policy | error; null
    # while it runs, and in records of earlier versions
    ended_by: str | None = None
    steps: int = 0
    resumed_step: int = 0  # steps of earlier processes, which are not in wall_seconds
    epochs: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    throughput: Throughput = field(default_factory=Throughput)
    memory: MemoryPeaks = field(default_factory=MemoryPeaks)
    techniques: list[TechniqueStatus] = field(default_factory=list)
    tools: list[Cost] = field(default_factory=list)  # cost and finding of each debug tool
    skipped_steps: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    checkpoint: CheckpointPaths = field(default_factory=CheckpointPaths)
    device: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    config_hash: str = ""
    command: str = ""
    name: str = ""
    wall_seconds: float = 0.0
    choices: list[Choice] = field(default_factory=list)
    git: dict[str, Any] = field(default_factory=dict)
    export: dict[str, Any] = field(default_factory=dict)  # file, bytes, largest_difference
    model_check: dict[str, Any] = field(default_factory=dict)  # ok, counts, the worst reasons
    distributed: dict[str, Any] = field(default_factory=dict)  # kind, world_size, backend, ranks
    columns: list[ColumnUse] = field(default_factory=list)  # column, taken_for, missing

    job: str = "train"  # train | evaluate
    monitor: str = ""  # the metric that decides which checkpoint is best
    best: float | None = None
    best_step: int = 0
    tested: dict[str, int] = field(default_factory=dict)  # the test set: step of weights, samples
    # of constant predictions: the most frequent class, mean and median of the training targets
    baseline: dict[str, float] = field(default_factory=dict)

    @property
    def monitored(self) -> float | None:
        """The best value of the monitored metric, else the last one, which a sweeper optimises."""
        return self.best if self.best is not None else self.metrics.get(self.monitor)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to continue: False if a limit or a request ended the run."""
        ended = self.ended_by is None or self.ended_by in FINISHED_ENDS
        return self.status in FINISHED_STATUSES and ended

    def set_end(self, status: str, reason: str) -> None:
        """Set how the run ended, as known from outside of it."""
        self.status, self.reason = status, reason
        self.ended_by = ENDS.get(status, "error")

    def _repr_html_(self) -> str:
        """Return the end table, as a notebook shows it."""
        from runner import rooms

        html: str = rooms.find("notebook", "summary")(self)
        return html

    def write(self, folder: Path) -> None:
        """Replace `summary.json` atomically; NaN becomes null. Raises StorageError."""
        write_json(folder / SUMMARY_FILE, asdict(self))

    def write_status(self, folder: Path) -> None:
        """Overwrite the status `running` in place, which works on a full disk."""
        running = b'"status": "running",\n  "reason": "",\n  "ended_by": null,'
        with (
            suppress(OSError),
            open(folder / SUMMARY_FILE, "r+b", buffering=0, opener=safe_opener) as file,
        ):
            position = file.read(STATUS_HEAD_BYTES).find(running)
            if position >= 0:
                file.seek(position)
                head = f'"status":"{self.status}","reason":"","ended_by":"{self.ended_by}",'
                file.write(head.ljust(len(running)).encode())

    @classmethod
    def read(cls, folder: Path) -> Summary:
        """Read the summary in a run's folder; a non-finite metric is read as NaN.

        Unknown keys, such as those of a newer version, are ignored.
        Raises StorageError if it is missing or not readable.
        """
        try:
            return dataclass_from_json(cls, json.loads(read_record(folder / SUMMARY_FILE)))
        except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
            raise StorageError(f"{folder / SUMMARY_FILE}: no readable summary ({error})") from error
