"""`-m`: check a sweep before it begins, and compare its jobs at the end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runner import rooms
from runner.cli.arguments import MULTIRUN_MODE, Arguments
from runner.cli.resume import check_inputs_exist
from runner.core.checkpoint.ownership import check_no_record
from runner.core.config.composing import typed
from runner.core.config.run_config import RunConfig
from runner.core.config.spelling import check_job_keys, first_job, parse_override, sample_jobs
from runner.core.errors import (
    ConfigError,
    Interrupted,
    RunnerError,
    SecurityError,
    UsageError,
    error_text,
)
from runner.core.masking import mask_secrets
from runner.core.record.summary import FINISHED_STATUSES
from runner.core.record.text import escape_control_chars
from runner.core.schemas.jobs import JobKind
from runner.core.schemas.security import SecurityLevel
from runner.core.schemas.sweep import LauncherConfig
from runner.core.security import secrets
from runner.core.security.config_files import ConfigFileChecker
from runner.core.security.paths import check_links
from runner.scale.sweep import plan
from runner.scale.sweep.identity import sweep_hash
from runner.scale.sweep.search import is_search, plan_search
from runner.scale.sweep.state import SweepSession

log = logging.getLogger("runner")

RESUME_AUTO = "checkpoint.resume=auto"
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def prepare_sweep(
    flags: Arguments, compose: Callable[[Sequence[str]], DictConfig], files: ConfigFileChecker
) -> SweepSession:
    """Check a sweep and return its session.

    A wrong key or option is an error; a job that cannot run only fails itself, unless no job can.
    Raises RunnerError.
    """
    overrides = [text for text in flags.overrides if text != MULTIRUN_MODE]
    _check_ranges(overrides)
    first = compose(first_job(overrides))
    parameters = first.hydra.sweeper.get("params") or {}
    swept = [*(f"{key}={value}" for key, value in parameters.items()), *overrides]
    if is_search_sweep := is_search(first):
        overrides = swept
    if parameters:
        first = compose(first_job(swept))
    configs = [first, *_compose_samples(sample_jobs(swept), first, compose)]
    with open_dict(configs[0]):  # as Hydra sets for the first job
        configs[0].hydra.job.num = configs[0].hydra.job.id = 0
    files.check_folders(configs[0], sweeps=True)
    failures: list[RunnerError] = []
    checked: list[RunConfig] = []
    for composed in configs:
        try:
            checked.append(typed(composed.copy()))
            check_inputs_exist(checked[-1])
        except SecurityError:
            raise
        except RunnerError as error:
            failures.append(error)
    if len(failures) == len(configs):
        raise failures[0]
    if "job" not in {**files.cli.values, **parameters}:
        check_job_keys(files.cli.values, [one.job.kind for one in checked])
    if any(composed.job.kind is JobKind.benchmark for composed in configs):
        fix = "leave -m out and name the arms: benchmark.arms=[none,basic]"
        raise ConfigError("job", "a benchmark cannot be swept: its arms take turns", fix)
    config, launcher = configs[0], configs[0].hydra.launcher
    isolated = OmegaConf.get_type(launcher) is LauncherConfig
    if isolated:
        OmegaConf.to_object(launcher)  # checks its values
    else:
        from runner.scale.sweep.cluster_launchers import adapt_launcher

        adapt_launcher(str(launcher.get("_target_")))
    folder, job_flags = secrets.read_path(config, "hydra.sweep.dir"), flags.config_flags()
    if is_search_sweep:  # sweep.resume=auto has the same effect
        overrides = [text for text in overrides if text != RESUME_AUTO]
        config.checkpoint.resume = "none"
    session = SweepSession(folder, "", job_flags, sweep_hash(overrides, job_flags))
    monitoring = checked[0].monitoring
    session.quiet = monitoring.log_level in ("warning", "error") and not monitoring.verbose
    if isolated and config.hydra.sweeper._target_ == BASIC_SWEEPER:
        session.sweeper_overrides = ["hydra/sweeper=jobs"]  # composes each job only once
    if is_search_sweep:
        if not isolated:
            fix = "leave hydra/launcher out; search.parallel says how many trials run at a time"
            raise ConfigError("hydra/launcher", "a search starts its trials itself", fix)
        session.search_plan = plan_search(overrides, checked[0], session.hash)
    _find_earlier_sweep(session, config, overrides, isolated)
    check_no_record(session.folder, key="hydra.sweep.dir")
    return session


def _check_ranges(overrides: Sequence[str]) -> None:
    """Raise ConfigError for an empty range: the sweep would have no jobs, and succeed."""
    for override in map(parse_override, overrides):
        if override.parsed.is_range_sweep() and not override.values():
            fix = "a range excludes its end: range(0,3) is 0, 1, 2"
            raise ConfigError(override.key, f"{override.value} has no value", fix)


def _compose_samples(
    jobs: Sequence[list[str]], first: DictConfig, compose: Callable[[Sequence[str]], DictConfig]
) -> Iterator[DictConfig]:
    """Yield the configs of all jobs but the first, from which each differs in one override.

    Composing takes 0.3 s, so a plain value is set in a copy of the first config.
    """
    for job in jobs[1:]:
        changed = next((t for t, first in zip(job, jobs[0], strict=True) if t != first), "")
        if changed:
            yield _with_value(first, changed) or compose(job)


def _with_value(config: DictConfig, override: str) -> DictConfig | None:
    """Return a copy with the override's value; None unless it is a valid plain value of a key."""
    parsed = parse_override(override).parsed
    key, value = parsed.key_or_group, parsed.value()
    is_plain = value is None or isinstance(value, str | int | float)
    if not is_plain or parsed.is_delete() or parsed.is_add() or parsed.package:
        return None
    parent, _, name = key.rpartition(".")
    copy = config.copy()
    try:
        node = OmegaConf.select(copy, parent) if parent else copy
        if name not in node or OmegaConf.is_config(node._get_node(name)):
            return None
        OmegaConf.update(copy, key, value)
    except (OmegaConfBaseException, TypeError, AttributeError):
        return None  # composing it raises an error with a suggestion
    return copy


def _find_earlier_sweep(
    session: SweepSession, config: DictConfig, overrides: list[str], isolated: bool
) -> None:
    """Set the session's folder to that of an earlier sweep to continue, if there is one.

    For searches with a shared storage, each process has its own folder.
    """
    resume = str(config.sweep.resume)
    if not isolated:
        if resume not in ("auto", "none"):
            raise ConfigError("sweep.resume", "needs hydra/launcher=isolated", "remove it")
        return
    if config.checkpoint.resume == "auto":
        fix = "remove it: the same command again continues an interrupted sweep"
        raise ConfigError("checkpoint.resume", "auto works for a single run only", fix)
    folder_typed = any(text.startswith("hydra.sweep.dir=") for text in overrides)
    shared = session.search_plan is not None and config.search.storage is not None
    earlier = plan.find_sweep(session.folder, folder_typed, resume, session.hash, shared)
    session.folder = earlier or session.folder
    session.resumed = resume not in ("auto", *plan.NO_RESUME)
    if earlier is not None and config.security.level is not SecurityLevel.off:
        check_links(earlier)


def compare_jobs(session: SweepSession, ended: bool) -> tuple[int, list[str]]:
    """Show and write the comparison of the jobs of any launcher, also after an error.

    If the sweep has `ended` normally and compares modes, they are then measured in turns, and the
    comparison is replaced. Returns the number of jobs, and a line for each failed one. Raises
    Interrupted, with the first comparison shown.
    """
    jobs = session.sweep.jobs if session.sweep is not None else []
    failures = [f"{job.title}: {job.status}: {job.reason}" for job in jobs if job.failed]
    if not session.folder.is_dir():
        return len(jobs), failures
    try:
        compare = rooms.find("comparison", "sweep", "the comparison of a sweep")
    except UsageError as error:
        sys.stderr.write(f"warning: {error}\n")
        return len(jobs), failures
    try:
        comparison = compare(session, ended)
    except Interrupted:
        raise
    except UsageError as error:  # no job has started
        log.debug("no comparison: %s", error)
    except Exception as error:  # the failures of the jobs are still reported
        reason = escape_control_chars(mask_secrets(error_text(error)))
        sys.stderr.write(f"warning: no comparison: {reason}\n")
    else:
        if session.sweep is None:  # with another launcher
            failed = [row for row in comparison.rows if row.status not in FINISHED_STATUSES]
            return len(comparison.rows), [f"{r.name}: {r.status}: {r.reason}" for r in failed]
    return len(jobs), failures
