"""Run what was asked for: Hydra makes the folder and calls back, for the run or each of a sweep."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log, run_job
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.cli.preflight import Request
from runner.composing import typed
from runner.device.config import omp_env
from runner.errors import Interrupted, RunnerError, StorageError, SweepFailed, UsageError
from runner.jobs import find
from runner.jobs.config import JobKind
from runner.masking import masked, masked_all
from runner.overrides.groups import CONF
from runner.record import hydra_files, provenance
from runner.record.console import close_logging, print_stdout, set_up_logging
from runner.record.text import describe_error, escape_control_chars, escape_lines, quote_for_hydra
from runner.security import hidden, paths, secrets
from runner.security.config import SecurityLevel
from runner.security.config_rules import check_level
from runner.training.signals import interruption_before_run
from runner.training.summary import FILE as SUMMARY
from runner.training.summary import Summary

log = logging.getLogger("runner")
OFF = (
    "security=off: configs of other people can run any code here, and files are loaded unchecked "
    "(job=scan still checks them)"
)


@dataclass
class Results:
    """How the jobs of this process ended."""

    exit_code: int = 0  # of the one job, where there is no sweep
    jobs: int = 0
    failures: list[str] = field(default_factory=list)
    resumable: bool = False  # the same command runs what is missing


def launch(request: Request) -> int:
    """Run what was asked for; returns the exit code. Raises RunnerError."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors and does not print them
    logging.raiseExceptions = False  # `--info … | head` is no fault
    os.environ.update(omp_env(os.environ))  # read when torch is imported, which nothing here does
    if request.typed.off and request.sweeps:
        sys.stderr.write(f"warning: {OFF}\n")
    command, results = list(sys.argv), Results()
    job = partial(_run, request=request, results=results, command=command)
    try:
        may_read = secrets.environment_access(
            request.typed.security.readable, shows=request.flags.only_shows
        )
        resumed = paths.resumed_at(request.resumed, request.chosen)
        with may_read, request.files.at_work(), paths.own_files(), resumed:
            if request.flags.cfg:
                show_config(request)
            elif request.flags.info or request.config is None:
                run_hydra(request, results, command)
            else:
                context = hydra_context(request.config)
                run_job(job, request.config, "hydra.run.dir", None, context)
    except SweepFailed as error:
        raise _sweep_failed(results) from error
    except (HydraException, OmegaConfBaseException) as error:
        from runner.overrides.diagnosis import translate

        raise secrets.refusal_in(error) or translate(error) from error
    except ValueError as error:  # of Hydra's own part; a job reports its own
        of_logs = str(error).startswith("Unable to configure")
        logs = "hydra.job_logging or hydra.hydra_logging: " if of_logs else ""
        because = f": {error.__cause__}" if error.__cause__ is not None else ""
        raise UsageError(f"{logs}{error}{because}") from error
    except BrokenPipeError:
        raise
    except OSError as error:  # before a job began
        key = "hydra.run.dir" if request.session is None else "hydra.sweep.dir"
        reason = error.strerror or str(error)
        fix = f"name another place: {key}=/path/to/folder"
        raise StorageError(f"{key}: {error.filename}: {reason}; {fix}") from error
    finally:
        sys.argv[:] = command
    if results.failures:  # a sweeper that goes on after failures
        raise _sweep_failed(results)
    return results.exit_code


def hydra_context(config: DictConfig) -> HydraContext:
    """What `hydra.main` sets up before one run, whose config is composed already."""
    hydra.version.setbase("1.3")
    config.hydra.mode = RunMode.RUN
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    loader = ConfigLoaderImpl(create_config_search_path(None))
    return HydraContext(config_loader=loader, callbacks=Callbacks(config))


def run_hydra(request: Request, results: Results, command: list[str]) -> None:
    """Let Hydra run a sweep, which ends in its comparison however it ends, or answer itself."""

    def task(config: DictConfig) -> float | None:
        return _run(config, request, results, command)

    main = hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)
    sys.argv[1:] = request.arguments
    session = request.session
    if session is None:
        with nullcontext() if request.sweeps else redact_stdout():
            main()
        return
    from runner.cli.sweep import compare
    from runner.sweep.state import active_session

    session.command = provenance.command()
    sys.argv.append(f"hydra.sweep.dir={quote_for_hydra(str(session.folder))}")
    with active_session(session):
        try:
            main()
        finally:
            jobs, failures = compare(session)
            results.jobs, results.resumable = max(results.jobs, jobs), session.sweep is not None
            results.failures = results.failures or failures


def _sweep_failed(results: Results) -> SweepFailed:
    if not results.failures:  # they ran in processes of their own
        return SweepFailed("some jobs of the sweep failed; run.log in each job's folder says why")
    lines = "".join(f"\n  {escape_control_chars(failure)}" for failure in results.failures)
    again = "\nthe same command again runs what is missing" if results.resumable else ""
    return SweepFailed(f"{len(results.failures)} of {results.jobs} jobs failed:{lines}{again}")


def _run(
    config: DictConfig, request: Request, results: Results, command: list[str]
) -> float | None:
    """One job, however it ends; what it returns is what a sweeper optimises."""
    sys.argv[:] = command  # for the record
    about = HydraConfig.get()
    folder = Path(about.runtime.output_dir)
    number = about.job.num if about.mode is RunMode.MULTIRUN else None
    title = f"#{number} {' '.join(provenance.literal_overrides(about.overrides.task))}"
    notes = [*request.notes, *([] if number is None else [f"job {title}"])]
    results.jobs += 1
    before = _written(folder)
    try:
        for name in (hydra_files.FOLDER, hydra_files.RESUMED):
            hidden.mask_saved(folder / name)
        with secrets.redact_errors():
            return _job(config, request, folder, notes)
    except Interrupted as error:
        log.error("%s", error)
        raise SystemExit(error.exit_code) from error  # past Hydra: no further job begins
    except KeyboardInterrupt as error:
        untrained = config.job.kind is JobKind.train and _written(folder) == before
        where = " before the first step; no checkpoint is written" if untrained else ""
        interrupted = interruption_before_run(error, where)
        log.error("%s", interrupted)
        raise SystemExit(interrupted.exit_code) from error
    except Exception as error:
        message, code = _report(error, folder, trained=_written(folder) != before)
        if number is None:
            results.exit_code = code
            return None
        results.failures.append(f"{title}: {message}")
        raise SweepFailed(message) from error  # launchers and sweepers need to know
    finally:
        close_logging()
        shutil.rmtree(folder / hydra_files.RESUMED, ignore_errors=True)  # of a run that failed


def _written(folder: Path) -> int:
    """When `summary.json` was last written, 0 where there is none; training begins with it."""
    try:
        return (folder / SUMMARY).stat().st_mtime_ns
    except OSError:
        return 0


def _job(config: DictConfig, request: Request, folder: Path, notes: list[str]) -> float | None:
    set_up_logging("info", folder)
    check_level(config, request.typed.security)  # in whichever process this is
    checked = typed(config)
    warnings = paths.keep_private(folder, checked.security.level)
    set_up_logging(checked.monitoring.log_level, folder)
    for warning in [*([OFF] if checked.security.level is SecurityLevel.off else []), *warnings]:
        log.warning("%s", warning)
    for note in notes:
        log.info(note)
    summary = find(checked.job.kind)(checked, folder)
    if not isinstance(summary, Summary):
        return None
    _show(masked_all(summary), folder)
    return summary.best if summary.best is not None else summary.metrics.get(summary.monitor)


def _show(summary: Summary, folder: Path) -> None:
    from runner.report import run as report

    print_stdout(report.terminal(summary, folder), crop=False)  # a command is one line


def _report(error: Exception, folder: Path, trained: bool) -> tuple[str, int]:
    """Say and record how a job failed: the message and the exit code.

    On one line; the traceback of a fault goes into the log.
    """
    if trained:
        with suppress(StorageError):
            _show(replace(Summary.read(folder), reason=""), folder)  # the reason follows
    code, log_file = 1, folder / "run.log"
    if isinstance(error, RunnerError):
        code = error.exit_code
        message, *more = masked(str(error)).split("\n")  # what follows is a worker's traceback
        for line in more:
            log.error("  %s", line, extra={"live": True})  # not on the screen
        log.error("%s%s", message, f"; the traceback is in {log_file}" if more else "")
    else:
        text, file, number = describe_error(error)
        message = masked(f"{text} ({file}:{number})")
        log.error(message, exc_info=error, extra={"live": True})  # not on the screen
        log.error("%s; the traceback is in %s", message, log_file)
    if not any((folder / name).exists() for name in (SUMMARY, "benchmark.json")):
        with suppress(OSError):
            Summary("failed", message, command=provenance.command()).write(folder)
    return message, code


def show_config(request: Request) -> None:
    """`--cfg`: print the composed config, or the part that -p names."""
    config: Any = request.config
    flags = request.flags
    HydraConfig.instance().set_config(config)
    # untyped: `${oc.env:NAME}` resolves to that text here, which is no number
    tree: Any = OmegaConf.to_container(config, resolve=False)
    if flags.cfg == "job":
        del tree["hydra"]
    elif flags.cfg == "hydra":
        tree = {
            "hydra": {k: v for k, v in tree["hydra"].items() if k not in ("help", "hydra_help")}
        }
    whole = OmegaConf.create(tree)
    package = flags.package if flags.package != "_global_" else None
    part = whole if package is None else OmegaConf.select(whole, package)
    if part is None:
        raise UsageError(f"--package: there is no {package} in the config")
    if isinstance(part, Container):
        if flags.resolve:
            OmegaConf.resolve(part)
        part = (f"# @package {package}\n" if package else "") + OmegaConf.to_yaml(part)
    sys.stdout.write(escape_lines(masked(f"{part}".rstrip("\n") + "\n")))


@contextmanager
def redact_stdout() -> Iterator[None]:
    """While entered, what is printed is masked and escaped: files of others may be part of it."""
    buffer = StringIO()
    try:
        with redirect_stdout(buffer):
            yield
    finally:
        sys.stdout.write(escape_lines(masked(buffer.getvalue())))
