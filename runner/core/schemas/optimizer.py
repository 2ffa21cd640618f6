"""The `optimizer` and `schedule` config groups."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from runner.core.bounds import Bounded, bounded
from runner.core.errors import ConfigError

GROUP_KEYS = ("match", "lr", "weight_decay", "name", "options")
OWN_OPTIMIZER = {"name", "options"}
"""With one of these keys a group has an optimizer of its own."""


@dataclass
class OptimizerConfig(Bounded, key="optimizer"):
    """Any optimizer of torch.optim; norms and biases are not decayed."""

    name: str = "AdamW"  # class name in torch.optim
    lr: float = bounded(1e-3, min=0)  # peak learning rate
    weight_decay: float = bounded(0.01, min=0)  # for weights of two or more dimensions
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of its constructor
    ema: float | None = bounded(None, above=0, below=1)  # decay of averaged weights; null: none
    # the decay rises from 0.18: min(ema, (1 + n) / (10 + n)) after n updates; null: on, except for
    # a run resumed without it
    ema_warmup: bool | None = None
    _target_: str | None = None  # your optimizer class, instead of `name`
    # parameters not to train, by name; a pattern may begin at any dot: [embeddings.*]
    freeze: list[str] = field(default_factory=list)
    # other rates, the first match wins: '[{match: classifier.*, lr: 1e-3, weight_decay: 0}]'; or
    # another optimizer: '[{match: blocks.*.weight, name: Muon, lr: 0.02, options: {ns_steps: 6}}]'
    groups: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(self.freeze):
            raise ConfigError("optimizer.freeze", "has an empty name", "e.g. [embeddings.*]")
        for number, group in enumerate(self.groups):
            self._check_group(f"optimizer.groups.{number}", group)

    @property
    def combines(self) -> bool:
        """Whether a group has an optimizer of its own."""
        return any(group.keys() & OWN_OPTIMIZER for group in self.groups)

    def _check_group(self, key: str, group: dict[str, Any]) -> None:
        unknown = [name for name in group if name not in GROUP_KEYS]
        if unknown:
            fix = f"use {', '.join(GROUP_KEYS)}"
            raise ConfigError(f"{key}.{unknown[0]}", "no such key", fix)
        match = group.get("match")
        if match is not None and not isinstance(match, str):
            problem = f"must be a text, got {match!r}"
            raise ConfigError(f"{key}.match", problem, "e.g. classifier.*")
        if not match or len(group) < 2:
            problem = f"needs match and an option, got {group}"
            raise ConfigError(key, problem, "e.g. {match: classifier.*, lr: 1e-3}")
        if not isinstance(group.get("name", ""), str):
            problem = f"must be the name of a class, got {group['name']!r}"
            raise ConfigError(f"{key}.name", problem, "e.g. Muon, of torch.optim")
        if not isinstance(group.get("options", {}), dict):
            problem = f"must be arguments by name, got {group['options']!r}"
            raise ConfigError(f"{key}.options", problem, "e.g. {momentum: 0.95}")
        for name in ("lr", "weight_decay"):
            value = group.get(name, 0.0)
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise ConfigError(f"{key}.{name}", f"must be a number ≥ 0, got {value!r}")
        if "lr" in group and not self.lr:
            fix = "set it, or freeze the others with optimizer.freeze"
            raise ConfigError("optimizer.lr", f"is 0, but {key}.lr is a multiple of it", fix)


class ScheduleKind(Enum):
    """The shape of the learning rate over the run."""

    constant = "constant"
    cosine = "cosine"
    linear = "linear"
    step = "step"
    onecycle = "onecycle"


@dataclass
class ScheduleConfig(Bounded, key="schedule"):
    """The learning rate over the updates of a run; its peak is `optimizer.lr`."""

    kind: ScheduleKind = ScheduleKind.constant  # shape of the learning rate after the warm-up
    # linear warm-up in updates, below 1 as a share of the run; onecycle: its rise, 0 means 0.3
    warmup: float = bounded(0.0, min=0)
    floor: float = bounded(0.0, min=0, max=1)  # cosine, linear: last rate as a share of the peak
    every: float = bounded(0.33, above=0)  # step: updates between drops; below 1: share of the run
    gamma: float = bounded(0.1, above=0)  # step: factor of each drop
