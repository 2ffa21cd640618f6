"""Launch of a run or a sweep through Hydra, which makes the folders and calls back for each job."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from traceback import format_exception
from typing import TYPE_CHECKING, Any

import hydra
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core import utils as hydra_utils
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobStatus, configure_log, run_job
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner import rooms
from runner.cli.preflight import RANK_VARIABLES, Request
from runner.core.checkpoint.lock import NAME as LOCK
from runner.core.checkpoint.lock import is_locked
from runner.core.checkpoint.ownership import check_folder, folder_is_checked
from runner.core.config.composing import typed
from runner.core.config.groups import CONF
from runner.core.device.signals import interruption_before_run, prefer_signal_error
from runner.core.errors import (
    ConfigError,
    Interrupted,
    RunnerError,
    StorageError,
    SweepFailed,
    UsageError,
)
from runner.core.jobs import load_job
from runner.core.masking import mask_nested, mask_secrets
from runner.core.record import hydra_files, provenance
from runner.core.record.console import (
    LOG,
    close_logging,
    has_log_file,
    print_stdout,
    restore_logging,
    set_up_logging,
)
from runner.core.record.storage import guard_folder, remove_file, remove_folder
from runner.core.record.summary import SUMMARY_FILE as SUMMARY
from runner.core.record.summary import Summary
from runner.core.record.text import (
    LONGEST_TRACE,
    WORKING_FOLDER_REMOVED,
    describe_error,
    escape_control_chars,
    escape_lines,
    is_working_folder_removed,
    limit_length,
    quote_for_hydra,
    summarize_error,
)
from runner.core.schemas.device import DistributedKind, omp_env
from runner.core.schemas.jobs import JobKind
from runner.core.schemas.security import SecurityLevel
from runner.core.security import paths, secrets
from runner.core.security.config_files import check_security_group

if TYPE_CHECKING:
    from runner.scale.sweep.state import SweepSession

log = logging.getLogger("runner")
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of a write, which names no file
BEFORE_BUILD = {hydra_files.FOLDER, LOG, LOCK}
"""Files in a run's folder before the run is built."""
QUIET_LEVELS = ("warning", "error")  # of monitoring.log_level: no end table
RANKS_MODULE = "runner.cli.ranks"  # imported for several processes only
SECURITY_OFF_WARNING = (
    "security=off: configs of other people can run any code here, and files are loaded unchecked "
    "(job=scan still checks them)"
)


@dataclass
class JobResults:
    """Results of the jobs of this process."""

    exit_code: int = 0  # of a single job, not of a sweep
    jobs: int = 0
    failures: list[str] = field(default_factory=list)
    resumable: bool = False  # repeating the command runs the missing jobs
    # the run's folder if it existed before the run, else its nearest existing parent
    existing_path: Path | None = None


def launch(request: Request) -> int:
    """Run the request and return the exit code. Raises RunnerError."""
    hydra_utils._save_config = hydra_files.save_config
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors and does not print them
    os.environ.update(omp_env(os.environ))  # read when torch is imported, which nothing here does
    if request.cli_overrides.off and request.flags.is_sweep:
        sys.stderr.write(f"warning: {SECURITY_OFF_WARNING}\n")
    for note in request.files.notes if request.flags.cfg or request.flags.is_sweep else ():
        sys.stderr.write(f"{escape_control_chars(mask_secrets(note))}\n")
    command, results = list(sys.argv), JobResults()
    resumed = paths.distrust_resumed_folder(request.resumed_run, request.folder_trusted)
    try:
        with _translate_errors(request, results):
            with request.permissions(), paths.restrict_umask(), resumed:
                if request.flags.cfg:
                    show_config(request)
                elif _run_as_rank(request.config, request, exit_at_once=True):
                    pass
                elif request.session is not None:
                    run_sweep(request, request.session, results, command)
                elif request.config is not None:
                    folder = secrets.read_path(request.config, "hydra.run.dir").absolute()
                    guard_folder(folder)
                    results.existing_path = next(p for p in (folder, *folder.parents) if p.exists())
                    job = partial(
                        _run_and_report, request=request, results=results, command=command
                    )
                    context = hydra_context(request.config)
                    result = run_job(job, request.config, "hydra.run.dir", None, context)
                    if result.status is JobStatus.FAILED:  # Hydra does not raise the error
                        raise result._return_value
    finally:
        sys.argv[:] = command
    if results.failures:  # a sweeper that continues after failures
        raise _sweep_error(results)
    # imported in a sweep's job, which has taken its context
    if job_context := sys.modules.get("runner.scale.sweep.job_context"):
        job_context.report_end()
    return results.exit_code


def _run_as_rank(config: DictConfig | None, request: Request, exit_at_once: bool = False) -> bool:
    """Run this process's part if it is a rank above 0; return whether it is."""
    if not RANK_VARIABLES & os.environ.keys():
        return False
    return bool(import_module(RANKS_MODULE).run_rank(config, request, exit_at_once))


@contextmanager
def _translate_errors(request: Request, results: JobResults) -> Iterator[None]:
    """Translate errors of Hydra and of its files to RunnerErrors."""
    try:
        yield
    except SweepFailed as error:
        raise _sweep_error(results) from error
    except (HydraException, OmegaConfBaseException) as error:
        from runner.core.config.diagnosis import translate

        raise secrets.find_refusal(error) or translate(error) from error
    except ValueError as error:  # from Hydra's own config; jobs report theirs
        about_logs = str(error).startswith("Unable to configure")
        log_key = "hydra.job_logging or hydra.hydra_logging: " if about_logs else ""
        cause = f": {error.__cause__}" if error.__cause__ is not None else ""
        raise UsageError(f"{log_key}{error}{cause}") from error
    except BrokenPipeError:
        raise
    except OSError as error:  # before a job began
        key = "hydra.run.dir" if request.session is None else "hydra.sweep.dir"
        reason = error.strerror or str(error)
        if is_working_folder_removed(error):
            raise StorageError(WORKING_FOLDER_REMOVED) from error
        if error.filename is None and request.flags.cfg:
            raise StorageError(f"stdout cannot be written: {reason}") from error
        if error.filename is None and error.errno not in FULL_DISK:
            text, file, number = describe_error(error)
            raise StorageError(f"{text} ({file}:{number})") from error
        fix = f"set another folder: {key}=/path/to/folder"
        place = "" if error.filename is None else f"{error.filename}: "
        raise StorageError(f"{key}: {place}{reason}; {fix}") from error


def hydra_context(config: DictConfig) -> HydraContext:
    """Set up Hydra as `hydra.main` does, for one composed run; return its context."""
    hydra.version.setbase("1.3")
    config.hydra.mode = RunMode.RUN
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    loader = ConfigLoaderImpl(create_config_search_path(None))
    return HydraContext(config_loader=loader, callbacks=Callbacks(config))


def run_sweep(
    request: Request, session: SweepSession, results: JobResults, command: list[str]
) -> None:
    """Let Hydra run a sweep, and compare its jobs at the end, even after an error."""

    def task(config: DictConfig) -> float | None:
        with in_slurm_job(config) if SUBMITIT_VARIABLE in os.environ else nullcontext():
            return _run_and_report(config, request, results, command)

    main = hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)
    from runner.cli.sweep import compare_jobs
    from runner.scale.sweep.cluster_launchers import SUBMITIT_VARIABLE, in_slurm_job
    from runner.scale.sweep.state import active_session

    guard_folder(session.folder)
    if (sweep_file := session.folder / hydra_files.SWEEP).is_symlink():
        remove_file(sweep_file)  # Hydra would write through it
    session.command = provenance.command()
    folder_override = f"hydra.sweep.dir={quote_for_hydra(str(session.folder))}"
    sys.argv[1:] = [*request.arguments, *session.sweeper_overrides, folder_override]
    with active_session(session):
        ended = False
        try:
            main()
            ended = True
        finally:
            jobs, failures = compare_jobs(session, ended)
            results.jobs = max(results.jobs, jobs)
            # a failed trial is not run again
            results.resumable = session.sweep is not None and session.search_plan is None
            results.failures = results.failures or failures


def _sweep_error(results: JobResults) -> SweepFailed:
    if not results.failures:  # they ran in their own processes
        return SweepFailed("some jobs of the sweep failed; run.log in each job's folder says why")
    lines = "".join(f"\n  {escape_control_chars(failure)}" for failure in results.failures)
    hint = "\nonce mended, the same command runs the missing jobs" if results.resumable else ""
    return SweepFailed(f"{len(results.failures)} of {results.jobs} jobs failed:{lines}{hint}")


def _run_and_report(
    config: DictConfig, request: Request, results: JobResults, command: list[str]
) -> float | None:
    """Run one job and report how it ended; returns the value that a sweeper optimises."""
    sys.argv[:] = command  # for the record
    if _run_as_rank(config, request):  # a launcher has started several processes
        return None
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    number = hydra_config.job.num if hydra_config.mode is RunMode.MULTIRUN else None
    title = f"#{number} {' '.join(provenance.literal_overrides(hydra_config.overrides.task))}"
    notes = [*request.notes, *([] if number is None else [f"job {title}"])]
    results.jobs += 1
    mtime_before = _summary_mtime(folder)
    try:
        for name in (hydra_files.FOLDER, hydra_files.RESUMED):
            secrets.mask_hydra_files(folder / name)
        with prefer_signal_error(), secrets.redact_errors():
            if number is not None:  # a job of another launcher; preflight checks a single run
                trains = config.job.kind is JobKind.train
                check_folder(folder, str(config.checkpoint.resume), trains)
            with folder_is_checked():
                return _run_job(config, request, folder, notes)
    except (Interrupted, KeyboardInterrupt) as error:
        if isinstance(error, Interrupted):
            interrupted = error
        else:
            untrained = config.job.kind is JobKind.train and _summary_mtime(folder) == mtime_before
            where = " before the first step; no checkpoint is written" if untrained else ""
            interrupted = interruption_before_run(error, where)
        restore_logging()
        log.error("%s", interrupted)
        # Hydra does not catch it: no more jobs start
        raise SystemExit(interrupted.exit_code) from error
    except BaseException as error:  # also SystemExit of the user's code, whatever its code
        changed = _summary_mtime(folder) != mtime_before
        message, code = _report_failure(error, folder, changed, results.existing_path)
        if number is None:
            results.exit_code = code
            return None
        results.failures.append(f"{title}: {message}")
        raise SweepFailed(message) from error  # launchers and sweepers need the exception
    finally:
        close_logging()
        remove_folder(folder / hydra_files.RESUMED, ignore_errors=True)  # left by a failed run


def _summary_mtime(folder: Path) -> int:
    """Return the mtime in ns of `summary.json`, which training writes first; 0 without one."""
    try:
        return (folder / SUMMARY).stat().st_mtime_ns
    except OSError:
        return 0


def _run_job(config: DictConfig, request: Request, folder: Path, notes: list[str]) -> float | None:
    set_up_logging("info", folder)
    # checked again, since this may be another process
    check_security_group(config, request.cli_overrides.security)
    run_config = typed(config)
    warnings = paths.restrict_run_folder(folder, run_config.security.level)
    set_up_logging(run_config.monitoring.log_level, folder)
    if run_config.security.level is SecurityLevel.off:
        warnings = [SECURITY_OFF_WARNING, *warnings]
    for warning in warnings:
        log.warning("%s", warning)
    for note in notes:
        log.info(note)
    data_path = getattr(run_config.data, "path", None)
    is_relative = data_path and not Path(data_path).expanduser().is_absolute()
    if HydraConfig.get().job.chdir and is_relative:
        problem = f"data.path={data_path} is relative, and read from the run's folder"
        log.warning("hydra.job.chdir=true: %s; type a full path", problem)
    single = run_config.distributed.kind is DistributedKind.none
    # arms of a benchmark and runs to compare are started one by one
    single = single or run_config.job.kind in (JobKind.benchmark, JobKind.verify)
    needed_by = f"distributed={run_config.distributed.kind.value}"
    if single:
        main = load_job(run_config.job.kind)
    else:
        main = rooms.find("processes", "launch", needed_by)
    summary = main(run_config, folder)
    if not isinstance(summary, Summary):
        return None
    if run_config.monitoring.log_level in QUIET_LEVELS and not run_config.monitoring.verbose:
        return summary.monitored
    try:
        _print_summary(mask_nested(summary), folder, run_config.monitoring.verbose)
    except Exception as error:  # such as a removed working folder; the run has ended well
        log.warning("the end table is not shown: %s", summarize_error(error))
    return summary.monitored


def _print_summary(summary: Summary, folder: Path, verbose: bool = False) -> None:
    from runner.core.jobs.run_report import RunSummaryTable

    print_stdout(RunSummaryTable(summary, folder, verbose), fold=False, crop=False)


def _report_failure(
    error: BaseException, folder: Path, trained: bool, existing_path: Path | None
) -> tuple[str, int]:
    """Log and record how a job failed; return the one-line message and the exit code.

    After a usage error before the run has written anything, folders that did not exist before are
    removed, but not those of a sweep's jobs.
    """
    restore_logging()
    if trained and not is_locked(folder):  # else another run has taken a removed folder
        with suppress(StorageError):
            summary = Summary.read(folder)
            if not isinstance(error, StorageError):
                summary.reason = ""  # it follows
            _print_summary(summary, folder)
    if isinstance(error, RunnerError):  # further lines are a worker's traceback
        message, _, trace = mask_secrets(str(error)).partition("\n")
        message = limit_length(message)
        code = error.exit_code
    else:
        text, file, number = describe_error(error)
        message, code = mask_secrets(f"{text} ({file}:{number})"), 1
        trace = "".join(format_exception(error))
    in_file = has_log_file()  # else the console shows the traceback
    for line in limit_length(mask_secrets(trace), LONGEST_TRACE).splitlines():
        log.error("  %s", line, extra={"live": in_file})
    hint = f"; the traceback is in {folder / LOG}" if trace and in_file else ""
    log.error("%s%s", message, hint)
    is_usage_error = code == UsageError.exit_code and not trace
    removable = is_usage_error and existing_path not in (None, folder.absolute())
    if removable and {path.name for path in folder.iterdir()} <= BEFORE_BUILD:
        _remove_folder(folder, existing_path)
    elif not (is_locked(folder) or any((folder / n).exists() for n in (SUMMARY, "benchmark.json"))):
        with suppress(OSError):
            Summary("failed", message, "error", command=provenance.command()).write(folder)
    return message, code


def _remove_folder(folder: Path, existing_path: Path | None) -> None:
    """Delete a folder, and its empty parents up to `existing_path`."""
    close_logging()
    with suppress(OSError):
        shutil.rmtree(folder)
        for parent in folder.absolute().parents:
            if parent == existing_path:
                break
            parent.rmdir()  # raises if not empty


def show_config(request: Request) -> None:
    """Print the composed config for `--cfg`, or the part that -p names."""
    config: Any = request.config
    flags = request.flags
    HydraConfig.instance().set_config(config)
    # unresolved: environment values appear as `${oc.env:NAME}`, which may not fit the key's type
    tree: Any = OmegaConf.to_container(config, resolve=False)
    if flags.cfg == "job":
        del tree["hydra"]
    shown_tree = OmegaConf.create({"hydra": tree["hydra"]} if flags.cfg == "hydra" else tree)
    package = flags.package if flags.package != "_global_" else None
    part = shown_tree if package is None else OmegaConf.select(shown_tree, package)
    if part is None:
        raise UsageError(f"--package: there is no {package} in the config")
    if isinstance(part, Container):
        if flags.resolve:
            from runner.core.security.interpolations import failed_interpolation

            if (failed := failed_interpolation(shown_tree)) is not None:
                raise ConfigError(failed[0], str(failed[1]).partition("\n")[0])
            OmegaConf.resolve(part)
        part = (f"# @package {package}\n" if package else "") + OmegaConf.to_yaml(part)
    sys.stdout.write(escape_lines(mask_secrets(f"{part}".rstrip("\n") + "\n")))
