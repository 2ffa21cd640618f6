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


DTYPES = (
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("uint8", "int8", "int16", "int32", "int64", "bool"),
)


@dataclass
class SchemaConfig:
    """What inputs look like; shape and dtype default to those of the first batch."""

    low: float | None = None  # of any input value
    high: float | None = None
    shape: list[int] | None = None  # of one sample; -1: any length
    dtype: str | None = None  # float32, int64, …
    classes: int | None = None  # labels are 0 to classes - 1; None: what the data say

    def __post_init__(self) -> None:
        key = "checks.inputs.schema"
        for name in ("low", "high"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"{key}.{name}", f"{value} is no bound", "use a number or null")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ConfigError(f"{key}.low", f"{self.low} is not below high={self.high}", "swap")
        if self.shape is not None and any(n < -1 for n in self.shape):
            raise ConfigError(f"{key}.shape", f"{self.shape} is none", "use -1 for any length")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(
                f"{key}.dtype", f"{self.dtype!r} is no type", f"one of {', '.join(DTYPES)}"
            )
        if self.classes is not None and self.classes < 1:
            raise ConfigError(f"{key}.classes", f"{self.classes} is too few", "use 1 or more")


@dataclass
class InputsConfig:
    """Checks of every training batch, before its step."""

    enabled: bool = True
    schema: SchemaConfig = field(default_factory=SchemaConfig)
    form: Policy = Policy.stop  # dtype, dimensions or features differ from the schema's
    not_finite: Policy = Policy.skip
    range: Policy = Policy.warn  # outside schema.low and schema.high, where they are given
    labels: Policy = Policy.stop  # a class or token id that does not exist
    constant: Policy = Policy.warn  # every value of a batch is the same


@dataclass
class TableConfig:
    """Checks of a table, once, before training."""

    enabled: bool = True
    constant: Policy = Policy.warn  # a column of one value; drop: not among the inputs
    leak: Policy = Policy.warn  # a column that gives the label away; drop: not among the inputs
    shared: Policy = Policy.warn  # rows of train in validation; drop: not validated with

    def __post_init__(self) -> None:
        for name in ("constant", "leak", "shared"):
            if getattr(self, name) is Policy.skip:
                raise ConfigError(
                    f"checks.table.{name}", "a table has no batch to skip", "use drop or stop"
                )


@dataclass
class OutputsConfig:
    """What is made of outputs that a person or a program gets to see; training sees its own."""

    enabled: bool = True
    nan: float = 0.0  # stands for NaN
    low: float | None = None  # of a predicted quantity, in the target's own unit
    high: float | None = None

    def __post_init__(self) -> None:
        for name in ("nan", "low", "high"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"checks.outputs.{name}", f"{value} is no number", "use a number")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ConfigError(
                "checks.outputs.low", f"{self.low} is not below high={self.high}", "swap them"
            )


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
    outputs: OutputsConfig = field(default_factory=OutputsConfig)
    model: ModelCheckConfig = field(default_factory=ModelCheckConfig)
