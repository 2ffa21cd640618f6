"""What can be asked of the record: the `monitoring` group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from runner.bounds import bounded, check_bounds
from runner.errors import ConfigError


@dataclass
class MonitoringConfig:
    """What is written down and shown while the run goes on."""

    every: int = bounded(10, min=1)  # steps per row of metrics.jsonl
    system_every_s: float = bounded(
        5.0, above=0
    )  # seconds between readings of CPU, memory and disk
    tensorboard: bool = True
    progress: bool = True  # a live display on a terminal, a plain line now and then elsewhere
    line_every_s: float = bounded(5.0, above=0)  # seconds between plain lines
    log_level: str = "info"
    # every value that a key has in the jobs of a sweep, for check boxes; the launcher fills it in
    domains: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_bounds(self, "monitoring")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(
                "monitoring.log_level", f"no level {self.log_level!r}", "debug|info|warning|error"
            )
