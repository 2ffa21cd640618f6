"""`-m`: the check before a sweep begins, and the comparison when it is over."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence

from omegaconf import DictConfig, OmegaConf

from runner.cli.arguments import MODE, Arguments
from runner.cli.resume import check_weights_exist
from runner.composing import typed
from runner.errors import ConfigError, RunnerError, SecurityError, UsageError
from runner.jobs.config import JobKind
from runner.masking import masked
from runner.overrides.spelling import sample_jobs
from runner.record.text import escape_control_chars, quote_for_hydra
from runner.security import secrets
from runner.security.config import SecurityLevel
from runner.security.paths import keep_within
from runner.sweep import plan
from runner.sweep.command import merge_benchmark
from runner.sweep.config import LauncherConfig
from runner.sweep.identity import sweep_hash
from runner.sweep.job import register_plugins_for_children
from runner.sweep.state import WELL, Session

log = logging.getLogger("runner")

BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"


def prepare(
    flags: Arguments, compose: Callable[[Sequence[str]], DictConfig]
) -> Session | list[str]:
    """The sweep, checked, or the overrides of the one benchmark that it amounts to.

    A wrong key or option ends it; a job that cannot run is one failure, unless no job can.
    Raises RunnerError.
    """
    overrides = [text for text in flags.overrides if text != MODE]
    jobs = sample_jobs(overrides)
    configs = [compose(job) for job in jobs]
    failures: list[RunnerError] = []
    for composed in configs:
        try:
            check_weights_exist(typed(composed.copy()))
        except SecurityError:
            raise
        except RunnerError as error:
            failures.append(error)
    if len(failures) == len(jobs):
        raise failures[0]
    config, launcher = configs[0], configs[0].hydra.launcher
    isolated = OmegaConf.get_type(launcher) is LauncherConfig
    if isolated:
        OmegaConf.to_object(launcher)  # checks its values
    else:
        register_plugins_for_children()
    folder = secrets.place(config, "hydra.sweep.dir")
    benchmarks = {composed.job.kind for composed in configs} == {JobKind.benchmark}
    if benchmarks and (isolated or launcher._target_ == BASIC):
        merged = merge_benchmark(overrides)
        if merged is not None:
            return [*merged, f"hydra.run.dir={quote_for_hydra(str(folder))}"]
    job_flags = flags.flags("config_path", "config_name", "config_dir")
    session = Session(folder, "", job_flags, sweep_hash(overrides, job_flags))
    _find_earlier(session, config, overrides, isolated)
    return session


def _find_earlier(
    session: Session, config: DictConfig, overrides: list[str], isolated: bool
) -> None:
    """Continue in the folder of an earlier sweep, where there is one to continue."""
    resume = str(config.sweep.resume)
    if not isolated:
        if resume not in ("auto", "none"):
            raise ConfigError("sweep.resume", "is for hydra/launcher=isolated", "leave it out")
        return
    if config.checkpoint.resume == "auto":
        fix = "leave it out: the same command again continues a sweep that was cut off"
        raise ConfigError("checkpoint.resume", "auto is for one run", fix)
    named = any(text.startswith("hydra.sweep.dir=") for text in overrides)
    earlier = plan.find_sweep(session.folder, named, resume, session.hash)
    session.folder = earlier or session.folder
    session.resumed = resume not in ("auto", "none", "None", "")
    if earlier is not None and config.security.level is not SecurityLevel.off:
        keep_within(earlier)


def compare(session: Session) -> tuple[int, list[str]]:
    """Show and write the comparison of the jobs, whichever launcher ran them, however it ended.

    Returns the number of jobs, and a line for each that failed.
    """
    jobs = session.sweep.jobs if session.sweep is not None else []
    failures = [f"{job.title}: {job.status}: {job.reason}" for job in jobs if job.failed]
    if not session.folder.is_dir():
        return len(jobs), failures
    from runner.record.console import print_stdout
    from runner.report.comparison import write
    from runner.report.discover import of_folders
    from runner.report.table import terminal

    try:
        rows = of_folders([session.folder])
        write(rows, session.folder)
        print_stdout(terminal(rows), crop=False)
    except UsageError as error:  # no job has begun
        log.debug("no comparison: %s", error)
    except Exception as error:  # the failures of the jobs are still reported
        reason = escape_control_chars(masked(f"{type(error).__name__}: {error}"))
        sys.stderr.write(f"warning: no comparison: {reason}\n")
    else:
        if session.sweep is None:  # of another launcher
            failed = [row for row in rows.rows if row.status not in WELL]
            return len(rows.rows), [f"{row.name}: {row.status}: {row.reason}" for row in failed]
    return len(jobs), failures
