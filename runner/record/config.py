"""The `monitoring` config group: what is recorded and displayed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from runner.bounds import bounded, check_bounds
from runner.errors import ConfigError

SINKS = ("mlflow", "wandb")


@dataclass
class MonitoringConfig:
    """What is recorded and displayed during a run."""

    every: int = bounded(10, min=1)  # steps per row of metrics.jsonl
    # seconds between readings of CPU, memory and disk
    system_every_s: float = bounded(5.0, above=0)
    tensorboard: bool = True
    # copies of the record: mlflow, wandb, or {_target_: package.Class, …}
    sinks: list[Any] = field(default_factory=list)
    sink_timeout_s: float = bounded(60.0, above=0)  # for the last rows of a sink, and for its end
    progress: bool = True  # a live display on a terminal, a plain line now and then elsewhere
    line_every_s: float = bounded(5.0, above=0)  # seconds between plain lines
    log_level: str = "info"
    verbose: bool = False  # the end of a run has all that report.md has

    def __post_init__(self) -> None:
        check_bounds(self, "monitoring")
        for item in self.sinks:
            if not (item in SINKS if isinstance(item, str) else "_target_" in item):
                fix = f"{'|'.join(SINKS)}, or {{_target_: package.Class}}"
                raise ConfigError("monitoring.sinks", f"unknown sink {item!r}", fix)
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(
                "monitoring.log_level",
                f"unknown level {self.log_level!r}",
                "debug|info|warning|error",
            )
