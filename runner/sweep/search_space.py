"""What a search varies, read from overrides, and the metric that it goes by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, RangeSweep

from runner.config import RunConfig
from runner.errors import ConfigError
from runner.objectives.base import ERRORS
from runner.overrides.spelling import CliOverride, parse_override
from runner.sweep.config import Direction, Sampler, SearchConfig

EXAMPLE = "'optimizer.lr=tag(log,interval(1e-4,1e-1))' 'model.width=choice(32,64)'"
REPLICATES = ("seed", "data.fold", "data.split_seed")
CLASSES = ("digits", "cancer", "stdlib_parts", "images", "text")
TOKENS = ("stdlib_text", "tokens")
MOST_POINTS = 10_000  # of a grid


@dataclass(frozen=True)
class Parameter:
    """A key that is varied: over an interval, or over the values in `choices`, as overrides spell
    them.
    """

    key: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    step: int = 0  # of whole numbers; 0: real numbers
    log: bool = False

    @property
    def values(self) -> Sequence[str | int]:
        """Every value; none of an interval of real numbers."""
        if self.step:
            return range(int(self.low), int(self.high) + 1, self.step)
        return self.choices

    @property
    def text(self) -> str:
        """What it is varied over, for people."""
        if self.choices:
            return ", ".join(self.choices)
        return f"{self.low:g} to {self.high:g}{', by its logarithm' if self.log else ''}"


@dataclass(frozen=True)
class Space:
    """The parameters of a search, and the overrides that all of its trials share."""

    parameters: tuple[Parameter, ...]
    shared: tuple[str, ...]

    @property
    def points(self) -> int | None:
        """How many combinations there are; None with an interval of real numbers."""
        return math.prod(len(p.values) for p in self.parameters) or None

    def all_points(self) -> list[dict[str, str | int]]:
        """Every combination. Only where `points` is a number, which may be large."""
        keys = [p.key for p in self.parameters]
        points = product(*(p.values for p in self.parameters))
        return [dict(zip(keys, point, strict=True)) for point in points]

    def overrides(self, values: Mapping[str, object]) -> list[str]:
        """Those of one trial, which can be typed."""
        return [*self.shared, *(f"{p.key}={values[p.key]}" for p in self.parameters)]


@dataclass(frozen=True)
class SearchPlan:
    """What is searched, by which metric."""

    space: Space
    settings: SearchConfig
    metric: str  # `val/…`
    rises: bool  # more of it is better
    name: str  # of the study: searches of other spaces may share the file


def read_space(overrides: Sequence[str], search: SearchConfig) -> Space:
    """The space that overrides describe in Hydra's sweep syntax. Raises ConfigError.

    The keys of the search itself, and the recipe of its name, are of no trial.
    """
    last = {o.key: o for o in map(parse_override, overrides)}
    varied = {key: o for key, o in last.items() if o.parsed.is_sweep_override()}
    parameters = tuple(_parameter(o, search.sampler) for o in varied.values())
    if not parameters:
        raise ConfigError(
            "search", "there is nothing to vary", f"give a range of values: {EXAMPLE}"
        )
    shared = [str(o) for key, o in last.items() if key not in varied and not _is_of_search(o)]
    if search.metric is not None:
        shared.append(f"training.monitor={search.metric}")
    space = Space(parameters, tuple(shared))
    if search.sampler is Sampler.grid and (space.points or 0) > MOST_POINTS:
        problem = f"a grid of {space.points:,} combinations, more than {MOST_POINTS:,}"
        raise ConfigError("search.sampler", problem, "name fewer values, or use search=tpe")
    return space


def _is_of_search(override: CliOverride) -> bool:
    typed = f"{override.key}={override.value}"
    own = ("search", "search.", "sweep.", "hydra")
    return typed in ("experiment=search", "checkpoint.resume=auto") or (
        override.key == own[0] or override.key.startswith(own[1:])
    )


def _parameter(override: CliOverride, sampler: Sampler) -> Parameter:
    key = override.key
    value: Any = override.parsed.value()
    if key in REPLICATES:
        problem = "is no hyper-parameter: the best of several would be chance"
        fix = f"name one; then compare the best command over {key}=0,1,2"
        raise ConfigError(key, problem, fix)
    name = f"{override.sign}{key}"
    if isinstance(value, IntervalSweep):
        return _interval(name, value, sampler)
    if "log" in value.tags:
        raise ConfigError(key, "only an interval has a logarithm", "use tag(log,interval(…))")
    texts = tuple(dict.fromkeys(override.values()))
    if len(texts) < 2:
        raise ConfigError(key, "has fewer than two values to choose from", "name two or more")
    numbers = value.range() if isinstance(value, RangeSweep) else None
    if isinstance(numbers, range) and not value.shuffle and numbers.step > 0:
        return Parameter(name, low=numbers[0], high=numbers[-1], step=numbers.step)
    return Parameter(name, texts)


def _interval(key: str, value: IntervalSweep, sampler: Sampler) -> Parameter:
    low, high, log = value.start, value.end, "log" in value.tags
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(key, "an interval needs two ends", f"{key}=interval(1,10)")
    if not low < high or (log and low <= 0):
        above = " and above 0, for its logarithm" if log else ""
        problem = f"an interval from {low:g} to {high:g}"
        raise ConfigError(key, problem, f"give the lower end first{above}")
    if sampler is Sampler.grid:
        fix = f"name its values, {key}=choice({low:g},{high:g}), or use search=tpe"
        raise ConfigError(key, "search=grid has no intervals", fix)
    whole = isinstance(low, int) and isinstance(high, int)
    return Parameter(key, low=low, high=high, step=1 if whole else 0, log=log)


def resolve_metric(config: RunConfig) -> tuple[str, bool]:
    """The metric of a search over such runs, and whether more of it is better.

    Raises ConfigError where that depends on the data or on somebody else's metric.
    """
    search, given = config.search, config.search.metric or config.training.monitor
    metric = given or _own_metric(config)
    if search.direction is not Direction.auto:
        return metric, search.direction is Direction.maximize
    name = metric.rpartition("/")[2]
    if name in config.objective.metrics or (given and config.objective._target_):
        problem = f"whether more of {metric} is better is not known"
        raise ConfigError("search.direction", problem, "use maximize or minimize")
    return metric, name not in ERRORS


def _own_metric(config: RunConfig) -> str:
    objective, data = config.objective, config.data
    kind = objective.kind
    if objective._target_ is not None:
        return "val/loss"
    if kind == "auto":
        task = getattr(data, "task", "auto")
        kind = task if isinstance(task, str) and task != "auto" else kind
    if kind == "auto" and data._target_ is None:
        kind = "classification" if data.kind in CLASSES else kind
        kind = "language_modelling" if data.kind in TOKENS else kind
    if kind == "auto":
        problem = f"is not known before the data are read: with data={data.kind} it depends on them"
        fix = "name it: search.metric=val/accuracy for classes, search.metric=val/loss for numbers"
        raise ConfigError("search.metric", problem, fix)
    return "val/accuracy" if kind == "classification" else "val/loss"
