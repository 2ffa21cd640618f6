"""Measure the configurations of a sweep in turns, after its jobs have ended."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

from omegaconf import DictConfig

from runner.core import fork_server
from runner.core.config.composing import typed
from runner.core.config.run_config import RunConfig
from runner.core.errors import Interrupted, error_text
from runner.core.masking import mask_secrets
from runner.core.record.console import print_stdout, set_up_logging
from runner.core.record.hydra_files import overrides_by_key
from runner.core.record.storage import remove_file
from runner.core.record.text import escape_control_chars
from runner.core.schemas.device import DistributedKind
from runner.core.schemas.jobs import BenchmarkConfig, JobKind
from runner.measure.benchmark.arms import Arm
from runner.measure.benchmark.result import FILE, BenchmarkResult
from runner.measure.comparison import Comparison
from runner.measure.comparison_row import ComparisonRow
from runner.measure.discover import compare_folders
from runner.measure.naming import varied_keys
from runner.measure.page import write_comparison
from runner.measure.replicates import configuration_key, name_configurations
from runner.measure.speed import FOLDER, MIN_TURNS, engagement, read_measured_speed
from runner.measure.table import ComparisonScreen
from runner.scale.sweep.state import SweepSession

log = logging.getLogger("runner")

MEASURED_GROUPS = ("optimization", "debug")  # keys of these are compared
MIN_CONFIGURATIONS, MAX_CONFIGURATIONS = 2, 6
TIME_SHARE = 0.2  # of the sweep's time, for measured turns
MIN_BUDGET_S, MAX_BUDGET_S = 10.0, 60.0
MAX_TURN_S = 0.25


def compare_sweep(session: SweepSession, ended: bool) -> Comparison:
    """Write and print a sweep's comparison, also of modes measured in turns if it has `ended`."""
    if session.has_run:  # the figures of an earlier process are outdated
        remove_file(session.folder / FOLDER / FILE)
    comparison = compare_folders([session.folder])
    write_comparison(comparison, session.folder)
    try:
        if ended and measure_configurations(session, comparison):
            comparison = compare_folders([session.folder])
            write_comparison(comparison, session.folder)
    finally:
        if not session.quiet:
            print_stdout(ComparisonScreen(comparison), crop=False)
    return comparison


def measure_configurations(session: SweepSession, comparison: Comparison) -> bool:
    """Measure the configurations in turns and store the figures; False if there are none.

    Raises Interrupted; any other error is logged, as it is none of the jobs'.
    """
    is_measured = read_measured_speed(session.folder) is not None
    if is_measured or session.search_plan is not None or not session.composed:
        return False
    try:
        budget_s = typed(session.composed[0][1].copy()).sweep.benchmark_s
        if budget_s is None:
            total_s = sum(job.seconds for job, _ in session.composed)
            budget_s = min(max(TIME_SHARE * total_s, MIN_BUDGET_S), MAX_BUDGET_S)
        result = _measure(session, select_rows(comparison.rows) if budget_s else [], budget_s)
        if result is not None:
            result.write(session.folder / FOLDER)
        return result is not None
    except Interrupted:
        raise
    except Exception as error:
        reason = escape_control_chars(mask_secrets(error_text(error)))
        log.warning("speeds are not measured: %s", reason)
        return False


def select_rows(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return a finished row of each configuration to measure; [] if they are not to be measured.

    They differ in `MEASURED_GROUPS` alone; other swept keys, seeds too, are those of the first job.
    """
    overrides = [overrides_by_key(row.overrides) for row in rows]
    varied = varied_keys(overrides)
    measured = [key for key in varied if key.partition(".")[0] in MEASURED_GROUPS]
    configurations = {tuple(x.get(key) for key in measured) for x in overrides}
    if not measured or not MIN_CONFIGURATIONS <= len(configurations) <= MAX_CONFIGURATIONS:
        return []
    others = [tuple(x.get(key) for key in varied if key not in measured) for x in overrides]
    pairs = zip(rows, others, strict=True)
    return [row for row, values in pairs if row.finished and values == others[0]]


def _measure(
    session: SweepSession, rows: Sequence[ComparisonRow], budget_s: float
) -> BenchmarkResult | None:
    """Measure one row of each group that engaged the same; return an arm for each row."""
    jobs = {job.folder: (job, composed) for job, composed in session.composed}
    names = name_configurations(rows)
    arms: dict[str, Arm] = {}  # by what engaged
    limits: dict[str, float] = {}
    members: list[tuple[ComparisonRow, str, str]] = []  # with its name, and that of its arm
    for row in rows:
        if row.folder not in jobs:
            continue
        job, composed = jobs[row.folder]
        name = names[configuration_key(row)]
        if (group := engagement(row)) not in arms:
            if (config := _arm_config(composed, row)) is None:
                continue
            arms[group] = Arm(name, config, list(row.overrides), row.command)
            limits[name] = job.seconds  # to start and compile
        members.append((row, name, arms[group].name))
    if len(arms) < MIN_CONFIGURATIONS:
        return None
    from runner.measure.benchmark.engine import measure

    ordered = list(arms.values())
    plain = (x for x in ordered if overrides_by_key(x.overrides).get("optimization") == "none")
    reference = next(plain, ordered[0])
    settings = BenchmarkConfig(
        reference=reference.name,
        budget_s=budget_s,
        processes=1,
        block_s=min(MAX_TURN_S, budget_s / MIN_TURNS / len(ordered)),
        control=False,
        parity=False,
    )
    fork_server.stop()  # that of the jobs: the arms have their own
    set_up_logging("warning" if session.quiet else "info", None)
    log.info("%d configurations are measured in turns (sweep.benchmark_s)", len(ordered))
    result = measure(ordered, settings, seed=reference.config.seed, start_limits=limits)
    return _with_members(result, members)


def _arm_config(composed: DictConfig, row: ComparisonRow) -> RunConfig | None:
    """Return the config of a job with only the techniques that engaged; None if it is no arm."""
    config = deepcopy(typed(composed.copy()))
    if config.job.kind is not JobKind.train or config.distributed.kind is not DistributedKind.none:
        return None
    for name, technique in config.optimization.techniques():
        state = row.techniques.get(name, {})
        if technique.enabled and state.get("requested") and not state.get("engaged"):
            technique.enabled = False
    config.optimization.measure = False  # the job has done so
    compiled = row.techniques.get("compile", {}).get("engaged")
    if compiled and config.optimization.compile.min_steps is None:  # the job has decided it
        config.optimization.compile.min_steps = 0
    return config


def _with_members(
    result: BenchmarkResult, members: Sequence[tuple[ComparisonRow, str, str]]
) -> BenchmarkResult:
    arms = []
    for row, name, measured_name in members:
        arm = replace(result.arm(measured_name), name=name, overrides=list(row.overrides))
        if name != measured_name:
            arm.notes = [*arm.notes, f"engaged the same as {measured_name}, measured once"]
            arm.claim = "same" if measured_name == result.reference else arm.claim
        arms.append(replace(arm, command=row.command, summary={}))
    return replace(result, arms=arms)
