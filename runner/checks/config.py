"""What is checked of data, model and outputs, and what is done about it: the `checks` group."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from runner.errors import ConfigError


class Policy(Enum):
    """What is done about a finding; a later one includes the earlier ones."""

    off = "off"
    warn = "warn"
    drop = "drop"  # the sample is left out of the batch
    skip = "skip"  # the batch's update is not made
    stop = "stop"  # the run ends, after a checkpoint


@dataclass
class SchemaConfig:
    """What inputs look like; None: learned from the first epoch."""

    low: float | None = None  # of any input value
    high: float | None = None
    shape: list[int] | None = None  # of one sample
    dtype: str | None = None  # float32, int64, …
    classes: int | None = None  # labels are 0 to classes - 1; None: what the data say


@dataclass
class InputsConfig:
    """Checks of every batch, as it comes by."""

    enabled: bool = True
    schema: SchemaConfig = field(default_factory=SchemaConfig)
    form: Policy = Policy.stop  # dtype or shape is another than the schema's
    not_finite: Policy = Policy.skip
    range: Policy = Policy.warn  # outside the schema's
    labels: Policy = Policy.stop  # a class that there is not
    constant: Policy = Policy.warn  # all samples of a batch are one and the same value
    duplicates: Policy = Policy.warn  # a batch that was seen before in the epoch, or nearly
    drift: Policy = Policy.warn  # unlike the first batches
    baseline: int = 50  # batches that drift is held against
    threshold: float = 8.0  # robust standard deviations that count as drift

    def __post_init__(self) -> None:
        if self.baseline < 8:
            raise ConfigError("checks.inputs.baseline", f"{self.baseline} is too few", "use >= 8")
        if not 0 < self.threshold < math.inf:
            raise ConfigError(
                "checks.inputs.threshold", f"{self.threshold} is no threshold", "use more than 0"
            )


@dataclass
class TableConfig:
    """Checks of a table, once, before training."""

    enabled: bool = True
    constant: Policy = Policy.warn  # a column of one value
    leak: Policy = Policy.warn  # a column that gives the label away
    shared: Policy = Policy.warn  # rows that train and validation have in common


@dataclass
class ModelCheckConfig:
    """Checks of weights and behaviour, before training and after it."""

    enabled: bool = True
    probes: int = 64  # samples of real data that behaviour is looked at with

    def __post_init__(self) -> None:
        if self.probes < 2:
            raise ConfigError("checks.model.probes", f"{self.probes} is too few", "use >= 2")


@dataclass
class ChecksConfig:
    """What is looked at."""

    inputs: InputsConfig = field(default_factory=InputsConfig)
    table: TableConfig = field(default_factory=TableConfig)
    model: ModelCheckConfig = field(default_factory=ModelCheckConfig)
