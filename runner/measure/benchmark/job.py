"""job=benchmark: compare the speed of ways to train; print the table and write files."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from runner.core.config.run_config import RunConfig
from runner.core.config.variants import without_techniques
from runner.core.device.signals import raise_on_signals
from runner.core.errors import Interrupted, Regression, RunnerError, StorageError, SweepFailed
from runner.core.format import count_noun
from runner.core.record import provenance
from runner.core.record.console import print_stdout
from runner.measure import comparison
from runner.measure.benchmark import regression
from runner.measure.benchmark.arms import Arm, compose_arms, reference_arm, requests_techniques
from runner.measure.benchmark.attribution import attribute
from runner.measure.benchmark.blocks import INTERRUPTED
from runner.measure.benchmark.engine import BenchmarkInterrupted, list_failed_arms, measure
from runner.measure.benchmark.result import DONE, BenchmarkResult
from runner.measure.benchmark.rounds import MeasureOptions, ending_signal
from runner.measure.table import ComparisonScreen

log = logging.getLogger("runner")

ERROR_PRIORITY = (Interrupted, StorageError, SweepFailed, RunnerError)
"""Priority of errors: the first of these kinds is raised."""


def main(config: RunConfig, folder: Path) -> BenchmarkResult:
    """Measure, print the table, write the files; then raise any error.

    Only then it raises Interrupted, StorageError, SweepFailed (an arm failed) or Regression.
    """
    settings = config.benchmark
    arms = compose_arms(settings, *_hydra_arguments())
    if any(arm.config.optimization.level == "auto" for arm in arms):
        from runner.measure.auto.resolve import resolve_arms

        arms = resolve_arms(arms, folder)
    baseline = regression.load_baseline(settings, [arm.name for arm in arms])
    errors: list[RunnerError] = []
    try:
        result = measure(arms, settings, folder, seed=config.seed)
    except BenchmarkInterrupted as cut:
        result = cut.result
        errors.append(cut)
    if settings.attribute and not errors:
        errors += _measure_attribution(result, arms, config)
    try:
        if baseline is not None and not errors:
            errors += _compare_with_baseline(result, baseline, config)
    finally:  # an error in the comparison must not lose the measurements
        errors += _write_and_print(result, folder)
    if failed := list_failed_arms(result):
        errors.append(SweepFailed(f"{len(failed)} of {len(arms)} arms failed: {'; '.join(failed)}"))
    for kind in ERROR_PRIORITY:
        for error in errors:
            if isinstance(error, kind):
                raise error
    return result


def _hydra_arguments() -> tuple[Sequence[str], Sequence[Path], str]:
    if not HydraConfig.initialized():
        return [], [], "config"
    hydra_config = HydraConfig.get()
    folders = [s.path for s in hydra_config.runtime.config_sources if s.provider == "command-line"]
    name = hydra_config.job.config_name or "config"
    overrides = provenance.literal_overrides(hydra_config.overrides.task)
    return overrides, [Path(folder) for folder in folders], name


def _measure_attribution(
    result: BenchmarkResult, arms: Sequence[Arm], config: RunConfig
) -> list[RunnerError]:
    level, reference = arms[-1], reference_arm(arms, config.benchmark)
    level_result = result.arm(level.name)
    if level_result.status != DONE:
        problem = f"{level.name} {level_result.status}: {level_result.reason}"
        result.notes.append(f"no attribution: {problem}")
        return []
    plain = without_techniques(level.config)
    if requests_techniques(reference.config) or without_techniques(reference.config) != plain:
        reference = Arm("plain", plain)
    try:
        with raise_on_signals():
            result.attribution = attribute(
                replace(level, folder=""),
                replace(reference, folder=""),
                MeasureOptions(config.benchmark),
                level_result.summary,
                config.seed,
                math.inf if result.noise_floor is None else result.noise_floor,
            )
            if result.attribution.stopped == INTERRUPTED:
                return [Interrupted(ending_signal(), " during the attribution")]
    except RunnerError as error:  # the arms are still shown
        return [error]
    return []


def _compare_with_baseline(
    result: BenchmarkResult, stored: BenchmarkResult, config: RunConfig
) -> list[RunnerError]:
    try:
        baseline = regression.compare_with_baseline(result, stored, config.benchmark)
    except RunnerError as error:  # e.g. another device, known only after a run was built
        return [error]
    result.baseline, lines = baseline.to_dict(), baseline.regressions
    count = count_noun(len(lines), "regression")
    return [Regression(f"{count} against {baseline.path}: {'; '.join(lines)}")] if lines else []


def _write_and_print(result: BenchmarkResult, folder: Path) -> list[RunnerError]:
    """Write the files and print the table, even if the disk is full."""
    errors = list[RunnerError]()
    try:
        result.write(folder)  # first: what was measured is kept if the page fails
    except StorageError as error:
        errors.append(error)
    from runner.measure.page import write_comparison  # with the library of templates

    rows = comparison.compare_arms(result, folder)
    write_comparison(rows, folder)
    print_stdout(ComparisonScreen(rows), crop=False)  # commands stay on one line
    return errors
