"""`-m`: what is found out before a sweep is begun, and what is made of it when it is over."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf

from runner.cli.arguments import Arguments
from runner.composing import typed
from runner.config import RunConfig
from runner.data.paths import existing
from runner.errors import ConfigError, RunnerError, SecurityError, UsageError
from runner.jobs.config import JobKind
from runner.masking import masked
from runner.overrides.spelling import Compose, sample_jobs
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

MODE = "hydra.mode=MULTIRUN"
BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
BUILDS = (JobKind.train, JobKind.evaluate, JobKind.benchmark, JobKind.verify)
AFRESH = ("auto", "none", "None", "")


@dataclass
class Prepared:
    """A sweep to be begun, or the overrides of the one benchmark that it amounts to."""

    session: Session | None = None
    benchmark: list[str] | None = None


def check_weights_exist(config: RunConfig) -> None:
    """Raise ConfigError where `model.weights` is to be read and is not there.

    A run that continues from a checkpoint does not read it.
    """
    path = config.model.weights
    if path is not None and config.job.kind in BUILDS and config.checkpoint.resume == "none":
        existing(path, "model.weights")


def prepare(arguments: Arguments, overrides: Sequence[str], compose: Compose) -> Prepared:
    """Check a sweep. A key or option that is wrong ends it here; a job that cannot run is one
    failure, unless no job can. Raises RunnerError.
    """
    overrides = [o for o in overrides if o != MODE]
    jobs = sample_jobs(overrides)
    failures: list[RunnerError] = []
    kinds = set()
    config = DictConfig({})
    for number, job in enumerate(jobs):
        composed = compose(job)
        if not number:
            config = composed.copy()
        kinds.add(composed.job.kind)
        try:
            check_weights_exist(typed(composed))
        except SecurityError:
            raise
        except RunnerError as error:
            failures.append(error)
    if len(failures) == len(jobs):
        raise failures[0]
    return _prepared(arguments, overrides, config, kinds)


def _prepared(
    arguments: Arguments, overrides: list[str], config: DictConfig, kinds: set[JobKind]
) -> Prepared:
    launcher = config.hydra.launcher
    isolated = OmegaConf.get_type(launcher) is LauncherConfig
    if isolated:
        OmegaConf.to_object(launcher)  # it checks its values
    else:
        register_plugins_for_children()
    folder = secrets.place(config, "hydra.sweep.dir")
    if kinds == {JobKind.benchmark} and (isolated or launcher._target_ == BASIC):
        arms = merge_benchmark(overrides)
        if arms is not None:
            return Prepared(benchmark=[*arms, f"hydra.run.dir={quote_for_hydra(str(folder))}"])
    flags = _flags(arguments)
    session = Session(folder, "", flags, sweep_hash(overrides, flags))
    resume = str(config.sweep.resume)
    if isolated and config.checkpoint.resume == "auto":
        raise ConfigError(
            "checkpoint.resume", "auto is for one run",
            "leave it out: the same command again goes on with a sweep that was cut off",
        )  # fmt: skip
    if isolated:
        named = any(o.startswith("hydra.sweep.dir=") for o in overrides)
        found = plan.find_sweep(folder, named, resume, session.hash, flags)
        session.folder, session.resumed = found or folder, resume not in AFRESH
        if found is not None and config.security.level is not SecurityLevel.off:
            keep_within(found)
    elif resume not in ("auto", "none"):
        raise ConfigError("sweep.resume", "is for hydra/launcher=isolated", "leave it out")
    return Prepared(session)


def _flags(arguments: Arguments) -> list[str]:
    """Hydra's own flags that every job of the sweep needs as well."""
    names = ("config_path", "config_name", "config_dir")
    given = [(name, getattr(arguments, name)) for name in names]
    return [f"--{name.replace('_', '-')}={value}" for name, value in given if value is not None]


@contextmanager
def quiet_hydra() -> Iterator[None]:
    """While entered, a job that failed is an error without Hydra's own line about it on stderr."""
    before: property = vars(JobReturn)["return_value"]

    def value(self: JobReturn) -> Any:
        if self.status is JobStatus.COMPLETED:
            return self._return_value
        raise self._return_value

    JobReturn.return_value = property(value, before.fset)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        JobReturn.return_value = before  # type: ignore[method-assign, assignment]


@dataclass(frozen=True)
class Outcome:
    """How a sweep came out."""

    jobs: int = 0
    failures: list[str] = field(default_factory=list)  # a line each


def compare(session: Session) -> Outcome:
    """Show and write what the jobs came to, side by side.

    Also where jobs failed or the sweep was cut off, and whichever launcher ran them.
    """
    sweep = session.sweep
    jobs = [] if sweep is None else sweep.jobs
    outcome = Outcome(len(jobs), [f"{j.title}: {j.status}: {j.reason}" for j in jobs if j.failed])
    if not session.folder.is_dir():
        return outcome
    from runner.record.console import print_stdout
    from runner.report.comparison import write
    from runner.report.discover import of_folders
    from runner.report.table import terminal

    try:
        found = of_folders([session.folder])
        write(found, session.folder)
        print_stdout(terminal(found), crop=False)
    except UsageError as error:  # no job has begun
        log.debug("no comparison: %s", error)
        return outcome
    except Exception as error:  # the jobs are over, and how they ended is still to be said
        told = escape_control_chars(masked(f"{type(error).__name__}: {error}"))
        sys.stderr.write(f"warning: no comparison: {told}\n")
        return outcome
    if sweep is not None:
        return outcome
    bad = [row for row in found.rows if row.status not in WELL]
    return Outcome(len(found.rows), [f"{row.name}: {row.status}: {row.reason}" for row in bad])
