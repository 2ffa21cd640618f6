"""The `checks` group: checks of data, model and outputs, and the action for each finding."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from runner.core.bounds import Bounded, bounded
from runner.core.errors import ConfigError


class CheckPolicy(Enum):
    """The action for a finding; a later one includes the earlier ones."""

    off = "off"
    warn = "warn"
    drop = "drop"  # of a table: the column or row is left out
    skip = "skip"  # of a batch: its update is not made
    stop = "stop"  # the run ends, after a checkpoint


@dataclass
class SchemaConfig(Bounded, key="checks.inputs.schema"):
    """The valid range of inputs; dtype and shape are those of the first batch."""

    low: float | None = bounded(None)  # smallest valid input value; null: no limit
    high: float | None = bounded(None)  # largest valid input value; null: no limit
    classes: int | None = bounded(None, min=1)  # labels must be below it; null: from the data

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_order(self, "checks.inputs.schema")


@dataclass
class InputsConfig:
    """Checks of every training batch, before its step."""

    enabled: bool = True  # check every training batch before its step
    schema: SchemaConfig = field(default_factory=SchemaConfig)
    form: CheckPolicy = CheckPolicy.stop  # dtype, dimensions or features unlike the first batch
    not_finite: CheckPolicy = CheckPolicy.skip  # NaN or infinite values
    range: CheckPolicy = CheckPolicy.warn  # inputs outside schema.low and schema.high
    labels: CheckPolicy = CheckPolicy.stop  # a class or token id out of range
    constant: CheckPolicy = CheckPolicy.warn  # all values of a batch are equal

    def __post_init__(self) -> None:
        for name in ("form", "not_finite", "range", "labels", "constant"):
            if getattr(self, name) is CheckPolicy.drop:
                problem = "cannot be drop: batches are skipped whole"
                fix = "use skip; data.bad_samples=drop leaves out samples that cannot be read"
                raise ConfigError(f"checks.inputs.{name}", problem, fix)


@dataclass
class TableConfig:
    """Checks of a table, once, before training."""

    enabled: bool = True  # check a table once, before training
    constant: CheckPolicy = CheckPolicy.warn  # a column of one value; drop: it is not an input
    leak: CheckPolicy = CheckPolicy.warn  # column that gives the label away; drop: not an input
    shared: CheckPolicy = CheckPolicy.warn  # validation rows also in training; drop: leave them out

    def __post_init__(self) -> None:
        for name in ("constant", "leak", "shared"):
            if getattr(self, name) is CheckPolicy.skip:
                problem = "cannot be skip: a table has no batches"
                raise ConfigError(f"checks.table.{name}", problem, "use drop or stop")


@dataclass
class OutputsConfig(Bounded, key="checks.outputs"):
    """Limits of outputs; job=evaluate counts violations, and changes no output or metric."""

    enabled: bool = True  # job=evaluate: report invalid outputs as a fault
    nan: float = bounded(0.0)  # regression: replacement of NaN in that check; outputs are unchanged
    low: float | None = bounded(None)  # regression: least output, in the target's unit; null: none
    high: float | None = bounded(None)  # regression: largest output, same unit; null: none

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_order(self, "checks.outputs")


@dataclass
class ModelCheckConfig:
    """The check of weights and buffers, before training and after it."""

    enabled: bool = True  # check weights and buffers for NaN and Inf, before and after training


@dataclass
class ChecksConfig:
    """Checks and their policies: off, warn, drop (column or row), skip (the update), stop."""

    inputs: InputsConfig = field(default_factory=InputsConfig)
    table: TableConfig = field(default_factory=TableConfig)
    outputs: OutputsConfig = field(default_factory=OutputsConfig)
    model: ModelCheckConfig = field(default_factory=ModelCheckConfig)


def _check_order(config: SchemaConfig | OutputsConfig, key: str) -> None:
    if config.low is not None and config.high is not None and not config.low < config.high:
        raise ConfigError(f"{key}.low", f"must be < high={config.high:g}, got {config.low:g}")
