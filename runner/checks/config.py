"""The `checks` group: checks of data, model and outputs, and the action for each finding."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from runner.bounds import bounded, check_bounds
from runner.errors import ConfigError


class CheckPolicy(Enum):
    """The action for a finding; a later one includes the earlier ones."""

    off = "off"
    warn = "warn"
    drop = "drop"  # of a table: the column or row is left out
    skip = "skip"  # of a batch: its update is not made
    stop = "stop"  # the run ends, after a checkpoint


@dataclass
class SchemaConfig:
    """The valid range of inputs; dtype and shape are those of the first batch."""

    low: float | None = bounded(None)  # of any input value
    high: float | None = bounded(None)
    classes: int | None = bounded(None, min=1)  # labels are below it; None: what the data say

    def __post_init__(self) -> None:
        check_bounds(self, "checks.inputs.schema")
        _check_order(self, "checks.inputs.schema")


@dataclass
class InputsConfig:
    """Checks of every training batch, before its step."""

    enabled: bool = True
    schema: SchemaConfig = field(default_factory=SchemaConfig)
    form: CheckPolicy = CheckPolicy.stop  # dtype, dimensions or features unlike the first batch
    not_finite: CheckPolicy = CheckPolicy.skip
    range: CheckPolicy = CheckPolicy.warn  # outside schema.low and schema.high, where given
    labels: CheckPolicy = CheckPolicy.stop  # a class or token id that does not exist
    constant: CheckPolicy = CheckPolicy.warn  # every value of a batch is the same

    def __post_init__(self) -> None:
        for name in ("form", "not_finite", "range", "labels", "constant"):
            if getattr(self, name) is CheckPolicy.drop:
                fix = "use skip; data.bad_samples=drop leaves out samples that cannot be read"
                raise ConfigError(
                    f"checks.inputs.{name}", "cannot be drop: batches are skipped whole", fix
                )


@dataclass
class TableConfig:
    """Checks of a table, once, before training."""

    enabled: bool = True
    constant: CheckPolicy = CheckPolicy.warn  # a column of one value; drop: not among the inputs
    leak: CheckPolicy = CheckPolicy.warn  # a column that gives the label away; drop: likewise
    shared: CheckPolicy = CheckPolicy.warn  # rows of train in validation; drop: not validated with

    def __post_init__(self) -> None:
        for name in ("constant", "leak", "shared"):
            if getattr(self, name) is CheckPolicy.skip:
                raise ConfigError(
                    f"checks.table.{name}",
                    "cannot be skip: a table has no batches",
                    "use drop or stop",
                )


@dataclass
class OutputsConfig:
    """Limits of outputs that a person or a program gets to see; training uses them as they are."""

    enabled: bool = True
    nan: float = bounded(0.0)  # stands for NaN
    low: float | None = bounded(None)  # of a predicted quantity, in the target's own unit
    high: float | None = bounded(None)

    def __post_init__(self) -> None:
        check_bounds(self, "checks.outputs")
        _check_order(self, "checks.outputs")


@dataclass
class ModelCheckConfig:
    """The check of weights and buffers, before training and after it."""

    enabled: bool = True


@dataclass
class ChecksConfig:
    """All checks."""

    inputs: InputsConfig = field(default_factory=InputsConfig)
    table: TableConfig = field(default_factory=TableConfig)
    outputs: OutputsConfig = field(default_factory=OutputsConfig)
    model: ModelCheckConfig = field(default_factory=ModelCheckConfig)


def _check_order(config: SchemaConfig | OutputsConfig, key: str) -> None:
    if config.low is not None and config.high is not None and not config.low < config.high:
        raise ConfigError(f"{key}.low", f"must be < high={config.high:g}, got {config.low:g}")
