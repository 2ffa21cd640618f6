"""The `monitoring` config group: what is recorded and displayed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from runner.core.bounds import Bounded, bounded
from runner.core.errors import ConfigError

SINKS = ("mlflow", "wandb")


@dataclass
class MonitoringConfig(Bounded, key="monitoring"):
    """What is recorded and displayed during a run."""

    every: int = bounded(10, min=1)  # steps per row of metrics.jsonl
    system_every_s: float = bounded(5.0, above=0)  # seconds between CPU, memory, disk, GPU readings
    tensorboard: bool = True  # write TensorBoard event files
    # generated texts at each validation, in TensorBoard; null: 3 with data=text_lm, else 0
    samples: int | None = bounded(None, min=0, max=20)
    # copies of the record: mlflow, wandb, or {_target_: package.Class, …}
    sinks: list[Any] = field(default_factory=list)
    sink_timeout_s: float = bounded(60.0, above=0)  # seconds to deliver the last rows, and to close
    progress: bool = True  # live display on a terminal, and progress lines in the log
    line_every_s: float = bounded(5.0, above=0)  # seconds between progress lines
    log_level: str = "info"  # debug, info; warning, error: no end table, no comparison of a sweep
    verbose: bool = False  # at the end, print every reason and choice, as in report.md

    def __post_init__(self) -> None:
        super().__post_init__()
        for item in self.sinks:
            if not (item in SINKS if isinstance(item, str) else "_target_" in item):
                fix = f"{'|'.join(SINKS)}, or {{_target_: package.Class}}"
                raise ConfigError("monitoring.sinks", f"unknown sink {item!r}", fix)
        if self.log_level not in ("debug", "info", "warning", "error"):
            problem = f"unknown level {self.log_level!r}"
            raise ConfigError("monitoring.log_level", problem, "debug|info|warning|error")
