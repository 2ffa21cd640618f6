"""Errors of `training.monitor` and `training.monitor_mode`."""

from __future__ import annotations

from collections.abc import Iterable

from runner.core.errors import ConfigError
from runner.core.format import nearest

MONITOR = "training.monitor"
MODE = "training.monitor_mode"


def unknown_direction(metric: str) -> ConfigError:
    """Return the error for a metric of which nothing declares whether higher values are better."""
    problem = f"cannot be inferred for {metric}"
    return ConfigError(MODE, problem, "use min if lower values are better, max if higher ones")


def unknown_metric(requested: str, available: Iterable[str], suffix: str = "") -> ConfigError:
    """Return the error for a metric that does not exist; `suffix` says what happens to the run."""
    names = list(available)
    with_prefix = f"val/{requested}"
    suggestion = nearest(requested, names) or (with_prefix if with_prefix in names else None)
    shown = [name for name in names if name.count("/") < 2]  # without those of single classes
    advice = f"did you mean {MONITOR}={suggestion}? " if suggestion else ""
    problem = f"unknown metric {requested!r}"
    if requested.startswith("user/"):
        problem = f"nothing has logged {requested} (run.log) by the end of a validation"
    return ConfigError(MONITOR, problem, f"{advice}available: {', '.join(shown)}{suffix}")
