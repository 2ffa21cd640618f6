"""What can be asked of the objective: the `objective` group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from runner.errors import ConfigError

KINDS = ("auto", "classification", "language_modelling", "regression")


@dataclass
class ObjectiveConfig:
    """What is minimised and which metrics say how well it went."""

    kind: str = "auto"  # auto: the one that fits the data's task
    _target_: str | None = None  # a callable of the user's own: (output, target) -> mean loss
    arguments: dict[str, Any] = field(default_factory=dict)
    label_smoothing: float = 0.0  # classification
    top_k: int = 5  # classification: a second accuracy
    # Targets of this value carry no loss. None: there are none, which saves counting them on the
    # device for each micro-batch.
    ignore_index: int | None = -100

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError("objective.kind", f"no objective {self.kind!r}", f"one of {KINDS}")
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError("objective.label_smoothing", "is not a share", "use 0 to 1")
        if self.top_k < 1:
            raise ConfigError("objective.top_k", f"{self.top_k} is not a count", "use 1 or more")
