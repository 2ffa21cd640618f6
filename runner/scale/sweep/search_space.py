"""Read a search's space from overrides, and determine its metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, RangeSweep
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from runner.core.config.groups import REPLICATE_KEYS
from runner.core.config.run_config import RunConfig
from runner.core.config.spelling import CliOverride, parse_override
from runner.core.errors import ConfigError
from runner.core.interfaces.objective import MODE, rises_by_name
from runner.core.schemas.data import DataConfig
from runner.core.schemas.sweep import Direction, Sampler, SearchConfig
from runner.core.schemas.training import MonitorMode

EXAMPLE = "'optimizer.lr=tag(log,interval(1e-4,1e-1))' 'model.width=choice(32,64)'"
CLASSIFICATION_DATA = ("digits", "cancer", "stdlib_parts", "images", "text")
LANGUAGE_MODELLING_DATA = ("stdlib_text", "text_lm", "tokens")
MAX_GRID_POINTS = 10_000  # of a grid


@dataclass(frozen=True)
class SearchSpace:
    """The keys that a search varies, and the overrides shared by all trials.

    Choices are written as in overrides.
    """

    parameters: dict[str, BaseDistribution]
    shared: tuple[str, ...]

    @property
    def points(self) -> int | None:
        """The number of combinations; None with an interval of real numbers."""
        return math.prod(map(len, map(_discrete_values, self.parameters.values()))) or None

    def all_points(self) -> list[dict[str, Any]]:
        """Return every combination, which may be many. Only if `points` is not None."""
        points = product(*map(_discrete_values, self.parameters.values()))
        return [dict(zip(self.parameters, point, strict=True)) for point in points]

    def overrides(self, values: Mapping[str, object]) -> list[str]:
        """Return the overrides of one trial, ready to type."""
        return [*self.shared, *(f"{key}={values[key]}" for key in self.parameters)]


def _discrete_values(parameter: BaseDistribution) -> Sequence[Any]:
    """Return all values of a parameter; empty for an interval of real numbers."""
    if isinstance(parameter, IntDistribution):
        return range(parameter.low, parameter.high + 1, parameter.step)
    return parameter.choices if isinstance(parameter, CategoricalDistribution) else ()


def parameter_text(parameter: Any) -> str:
    """Describe the values of a parameter."""
    if isinstance(parameter, CategoricalDistribution):
        return ", ".join(map(str, parameter.choices))
    return f"{parameter.low:g} to {parameter.high:g}{', by its logarithm' * parameter.log}"


@dataclass(frozen=True)
class SearchPlan:
    """What to search, and by which metric."""

    space: SearchSpace
    settings: SearchConfig
    metric: str  # `val/…`
    maximize: bool  # larger is better
    name: str  # of the study; a file may hold several
    data: DataConfig | None = None  # what the trials are trained on


def read_space(overrides: Sequence[str], search: SearchConfig) -> SearchSpace:
    """Read the space from overrides in Hydra's sweep syntax. Raises ConfigError.

    Keys of the search itself, and its recipe, are not passed to trials.
    """
    by_key = {o.key: o for o in map(parse_override, overrides)}
    varied = {key: o for key, o in by_key.items() if o.parsed.is_sweep_override()}
    if not varied:
        raise ConfigError("search", "there is nothing to vary", f"give a range: {EXAMPLE}")
    shared = [str(o) for k, o in by_key.items() if k not in varied and not _is_search_setting(o)]
    if search.metric is not None:
        shared.append(f"training.monitor={search.metric}")
    parameters = {f"{o.sign}{k}": _parse_parameter(o, search.sampler) for k, o in varied.items()}
    space = SearchSpace(parameters, tuple(shared))
    if search.sampler is Sampler.grid and (space.points or 0) > MAX_GRID_POINTS:
        problem = f"a grid of {space.points:,} combinations, more than {MAX_GRID_POINTS:,}"
        raise ConfigError("search.sampler", problem, "name fewer values, or use search=tpe")
    return space


def _is_search_setting(override: CliOverride) -> bool:
    assignment = f"{override.key}={override.value}"
    is_own_key = override.key == "search" or override.key.startswith(("search.", "sweep.", "hydra"))
    return is_own_key or assignment in ("experiment=search", "checkpoint.resume=auto")


def _parse_parameter(override: CliOverride, sampler: Sampler) -> BaseDistribution:
    key = override.key
    value: Any = override.parsed.value()
    if key in REPLICATE_KEYS:
        fix = f"set one value; then compare the best command over {key}=0,1,2"
        raise ConfigError(key, "is not a hyperparameter: the best value would be chance", fix)
    if isinstance(value, IntervalSweep):
        return _parse_interval(f"{override.sign}{key}", value, sampler)
    if "log" in value.tags:
        raise ConfigError(key, "only an interval has a logarithm", "use tag(log,interval(…))")
    texts = tuple(dict.fromkeys(override.values()))
    if len(texts) < 2:
        raise ConfigError(key, "has fewer than two values to choose from", "name two or more")
    numbers = value.range() if isinstance(value, RangeSweep) else None
    if isinstance(numbers, range) and not value.shuffle and numbers.step > 0:
        return IntDistribution(numbers[0], numbers[-1], step=numbers.step)
    return CategoricalDistribution(texts)


def _parse_interval(key: str, value: IntervalSweep, sampler: Sampler) -> BaseDistribution:
    low, high, log = value.start, value.end, "log" in value.tags
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(key, "an interval needs two ends", f"{key}=interval(1,10)")
    if not low < high or (log and low <= 0):
        fix = "give the lower end first, with log above 0"
        raise ConfigError(key, f"an interval from {low:g} to {high:g}", fix)
    if sampler is Sampler.grid:
        fix = f"name its values, {key}=choice({low:g},{high:g}), or use search=tpe"
        raise ConfigError(key, "search=grid has no intervals", fix)
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log)
    return FloatDistribution(low, high, log)


def resolve_metric(config: RunConfig) -> tuple[str, bool]:
    """Return the metric of a search, and whether larger values are better.

    Raises ConfigError if that depends on data or a user's metric, or contradicts `direction`.
    """
    direction, requested = config.search.direction, config.search.metric or config.training.monitor
    metric = requested or _default_metric(config)
    rises, maximize = _known_direction(config, metric), direction is Direction.maximize
    if direction is not Direction.auto:
        if rises in (None, maximize):
            return metric, maximize
        better = "higher" if rises else "lower"
        problem = f"{direction.name} contradicts {metric}, of which {better} is better"
        fix = f"leave it out, or change it with {MODE}={'max' if maximize else 'min'}"
        raise ConfigError("search.direction", problem, fix)
    own_metric = bool(requested and config.objective._target_) and _typed_mode(config) is None
    if rises is None or own_metric:
        problem = f"cannot be inferred for {metric}"
        raise ConfigError("search.direction", problem, "use maximize or minimize")
    return metric, rises


def _typed_mode(config: RunConfig) -> MonitorMode | None:
    """Return `training.monitor_mode` if it is about the metric of the search."""
    monitor, metric = config.training.monitor, config.search.metric
    return config.training.monitor_mode if metric in (None, monitor) or monitor is None else None


def _known_direction(config: RunConfig, metric: str) -> bool | None:
    """Whether a higher value is better: as typed, or of one of our metrics; None if unknown."""
    mode, name = _typed_mode(config), metric.removeprefix("val/")
    if mode is not None:
        return mode is MonitorMode.max
    if name in config.objective.metrics:
        return None
    if config.objective._target_ is None and name.startswith(("accuracy/", "loss/")):
        return name.startswith("accuracy/")
    return rises_by_name(metric)


def trial_mode(config: RunConfig, metric: str, maximize: bool) -> list[str]:
    """Return the override that trials need to have the search's direction, if any."""
    is_known = config.training.monitor_mode is None and _known_direction(config, metric) is not None
    if _typed_mode(config) is not None or is_known:
        return []
    return [f"{MODE}={'max' if maximize else 'min'}"]


def _default_metric(config: RunConfig) -> str:
    objective, data = config.objective, config.data
    kind = objective.kind
    if objective._target_ is not None:
        return "val/loss"
    if kind == "auto":
        task = getattr(data, "task", "auto")
        kind = task if isinstance(task, str) and task != "auto" else kind
    if kind == "auto" and data._target_ is None:
        kind = "classification" if data.kind in CLASSIFICATION_DATA else kind
        kind = "language_modelling" if data.kind in LANGUAGE_MODELLING_DATA else kind
    if kind == "auto":
        problem = f"depends on the data with data={data.kind}, which is not read yet"
        fix = "set search.metric=val/accuracy for classes, search.metric=val/loss for numbers"
        raise ConfigError("search.metric", problem, fix)
    return "val/accuracy" if kind == "classification" else "val/loss"
