"""Benchmark ways to train a live model: `job=benchmark` for Python objects.

>>> from runner import benchmark_optimizations, show_comparison
>>> if __name__ == "__main__":  # every arm is a process of its own, which imports this file
...     result = benchmark_optimizations(model, (inputs, labels), ["none", "basic"], budget_s=20)
...     show_comparison(result)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

from torch import nn

from runner.core.build.arguments import Loss, check_trainable, device_of, loss_objective
from runner.core.build.setup import Components
from runner.core.errors import UsageError
from runner.core.interfaces.technique import Technique, is_complete_technique
from runner.core.optim.optimizer import Optimizer
from runner.core.record.console import print_stdout
from runner.core.record.storage import guard_folder, make_folder
from runner.core.schemas.jobs import LEVELS, BenchmarkConfig
from runner.core.schemas.optimization import Optimization
from runner.core.security.child_process import UnguardedScript, exit_if_imported
from runner.loops.pipeline import dotted_class_name, split_into_dataset, with_components
from runner.measure import comparison, table
from runner.measure.auto.resolve import resolve_arms
from runner.measure.benchmark.arms import Arm, check_budget, compose_arms
from runner.measure.benchmark.engine import measure
from runner.measure.benchmark.result import DONE, BenchmarkResult

CALLER = "benchmark_optimizations"


def benchmark_optimizations(
    model: nn.Module,
    data: Any,
    arms: Sequence[str] = LEVELS,
    *,
    validation: Any = None,
    loss_fn: Loss | None = None,
    optimizer: Optimizer | None = None,
    techniques: Sequence[type[Technique] | Technique] = (),
    reference: str | None = None,
    budget_s: float = 60.0,
    parity: bool = True,
    control: bool = True,
    folder: str | Path | None = None,
    overrides: Sequence[str] = (),
    announce: Callable[[str], None] | None = None,
) -> BenchmarkResult:
    """Measure ways to train `model` on `data` against each other, paired, each in its own process.

    `data` is a map-style data set, or (inputs, target) as tensors or arrays, sample dimension
    first. `arms` are levels or overrides (`"optimizer=sgd optimization=basic"`), compared with
    `reference` or the first one. Each of `techniques` (your own classes, or configured instances)
    adds an arm: the plain run with that technique. `overrides`, such as `training.batch_size=64`,
    apply to all arms. `budget_s` is for measuring; starting, compiling and parity are extra.
    Without `loss_fn` (a mean, of (output, target)) the objective follows from the targets; without
    `optimizer` the config's is used. `announce` receives progress lines.

    The caller's model, modes and random states are unchanged: processes get copies, so all
    arguments must be picklable, and a script needs `if __name__ == "__main__":`. With a `folder`
    the runs, `benchmark.json` and the comparison are written there. A failed arm is a row. Raises
    UsageError, ConfigError, DataError, Interrupted.
    """
    exit_if_imported()
    check_trainable(CALLER, model, loss_fn, optimizer, overrides, data, validation)
    if isinstance(arms, str):
        raise UsageError(f"{CALLER}: arms must be a list, got one string: [{arms!r}]")
    named_techniques = _techniques_by_name(techniques)
    settings = BenchmarkConfig(
        arms=list(arms), reference=reference, budget_s=budget_s, parity=parity, control=control
    )
    arm_overrides = [f"device={device_of(model).type}", "training.epochs=null", *overrides]
    built_arms = compose_arms(settings, arm_overrides, others=len(named_techniques))
    for arm in built_arms:
        check_trainable(CALLER, model, loss_fn, optimizer, arm.overrides, data, validation)
    has_loss, plain_config = loss_fn is not None, built_arms[0].config
    dataset = split_into_dataset(CALLER, model, data, validation, plain_config, has_loss)
    built_arms = [  # no command line trains this model on these data
        replace(arm, command="", config=with_components(arm.config, model, data, rename=True))
        for arm in built_arms
    ]
    built_arms += [_technique_arm(t, name, built_arms) for name, t in named_techniques.items()]
    check_budget(settings, len(built_arms))
    _check_importable(*model.modules(), loss_fn, data, *named_techniques.values())
    objective = loss_fn and loss_objective(loss_fn)
    components = Components(model, dataset, objective, optimizer, techniques=named_techniques)
    result_folder = None if folder is None else Path(folder)
    if result_folder is not None:
        make_folder(result_folder)
        guard_folder(result_folder)
    built_arms = resolve_arms(built_arms, result_folder, components)
    try:
        result = measure(built_arms, settings, result_folder, components, announce=announce)
    except UnguardedScript as error:
        raise UsageError(f"{CALLER}: {error}") from None
    if result_folder is not None:
        from runner.measure.page import write_comparison  # with the library of templates

        write_comparison(comparison.compare_arms(result, result_folder), result_folder)
    if all(row.status != DONE for row in result.arms):
        first = result.arms[0]
        raise UsageError(f"{CALLER}: no arm could be measured: {first.status}: {first.reason}")
    return result


def show_comparison(result: BenchmarkResult, folder: str | Path | None = None) -> None:
    """Print a benchmark's result table; `folder` is where it was recorded."""
    where = None if folder is None else Path(folder)
    print_stdout(table.ComparisonScreen(comparison.compare_arms(result, where)))


def _check_importable(*objects: Any) -> None:
    """Raise UsageError for code defined in a notebook or shell, which no process can import."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is not None and Path(file).is_file():
        return
    for kind in (x if isinstance(x, FunctionType) else type(x) for x in objects):
        if kind.__module__ == "__main__":
            problem = f"{kind.__qualname__} is defined in a notebook or shell"
            fix = "each arm's process must import it; move it to a module (a .py file)"
            raise UsageError(f"{CALLER}: {problem}, but {fix}")


def _techniques_by_name(techniques: Sequence[type[Technique] | Technique]) -> dict[str, Technique]:
    named: dict[str, Technique] = {}
    for given in techniques:
        kind = given if isinstance(given, type) else type(given)
        if not is_complete_technique(kind):
            fix = "inherit from runner.Technique and define apply and engaged"
            raise UsageError(f"{CALLER}: {kind.__name__} is not a Technique; {fix}")
        technique = kind(enabled=True) if isinstance(given, type) else replace(given, enabled=True)
        if dotted_class_name(technique) in named:
            raise UsageError(f"{CALLER}: techniques lists {kind.__name__} twice")
        named[dotted_class_name(technique)] = technique
    return named


def _technique_arm(technique: Technique, target: str, arms: Sequence[Arm]) -> Arm:
    name = type(technique).__name__
    if any(arm.name == name for arm in arms):
        raise UsageError(f"{CALLER}: two arms are named {name}; rename the class")
    config = deepcopy(arms[0].config)
    config.optimization = Optimization(level="none", extra=[target])
    return Arm(name, config, [f"optimization.extra=[{target}]"], folder=f"technique-{name}")
