"""Hand over to Hydra, which makes the folder and calls back: for the run, or each of a sweep."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import hydra
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.benchmark.result import FILE as BENCHMARK
from runner.cli.preflight import Request
from runner.cli.sweep import compare, quiet_hydra
from runner.composing import typed
from runner.device.config import omp_env
from runner.errors import Interrupted, RunnerError, StorageError, SweepFailed, UsageError
from runner.jobs import find
from runner.jobs.config import JobKind
from runner.masking import masked, masked_all
from runner.overrides.diagnosis import translate
from runner.overrides.groups import CONF
from runner.record import hydra_files, provenance
from runner.record.console import close_logging, set_up_logging
from runner.record.text import (
    describe_error,
    escape_control_chars,
    escape_lines,
    quote_for_hydra,
)
from runner.security import hidden, paths, secrets
from runner.security.cli_overrides import CliOverrides
from runner.security.config import SecurityLevel
from runner.security.config_rules import check_level
from runner.sweep.state import Session, active_session
from runner.training.signals import interruption_before_run
from runner.training.summary import FILE as SUMMARY
from runner.training.summary import Summary

log = logging.getLogger("runner")
OFF = (
    "security=off: configs of other people can run any code here, and files are loaded without a "
    "look (job=scan looks all the same)"
)


class Reported(Exception):
    """A job of a sweep failed, and has said so itself."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


@dataclass
class State:
    """How the jobs of this process went."""

    exit_code: int = 0  # of the one job, where there is no sweep
    jobs: int = 0
    failures: list[str] = field(default_factory=list)
    again: bool = False  # the same command runs only what is missing


def launch(request: Request) -> int:
    """Run what was asked for and say with which code to exit. Raises RunnerError."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, and are not printed by Hydra
    logging.raiseExceptions = False  # `--info … | head` is no fault
    os.environ.update(omp_env(os.environ))  # read when torch is loaded, which nothing here does
    as_typed, state = list(sys.argv), State()
    if request.typed.off and request.sweeps:
        sys.stderr.write(f"warning: {OFF}\n")
    session = request.session
    if session is not None:
        session.command = provenance.command()

    def task(config: DictConfig) -> float | None:
        sys.argv[:] = as_typed  # what the record shows as the command
        return _run(config, request, state)

    sys.argv[1:] = request.arguments
    if request.continues:  # what the run was started with stays until its checkpoint is loaded
        sys.argv.append(f"hydra.output_subdir={hydra_files.RESUMED}")
    if session is not None:
        sys.argv.append(f"hydra.sweep.dir={quote_for_hydra(str(session.folder))}")
    try:
        may_read = secrets.door(request.typed.security.readable, shows=request.only_shows)
        resumed = paths.resumed_at(request.resumed, request.chosen)
        shows = as_plain_text() if request.only_prints else nullcontext()
        with may_read, request.files.at_work(), paths.own_files(), resumed, shows:
            _hand_over(task, session, state)
    except (Reported, SweepFailed) as error:
        raise _sweep_failed(state) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise secrets.refusal_in(error) or translate(error) from error
    except ValueError as error:  # of a job it would be Reported: this is about Hydra's flags
        of_logs = str(error).startswith("Unable to configure")
        logs = "hydra.job_logging or hydra.hydra_logging: " if of_logs else ""
        because = f": {error.__cause__}" if error.__cause__ is not None else ""
        raise UsageError(f"{logs}{error}{because}") from error
    except BrokenPipeError:
        raise
    except OSError as error:  # before a job began
        raise _no_folder(
            error, "hydra.run.dir" if session is None else "hydra.sweep.dir"
        ) from error
    finally:
        sys.argv[:] = as_typed
    if state.failures:  # a sweeper that puts up with them
        raise _sweep_failed(state)
    return state.exit_code


def _no_folder(error: OSError, key: str) -> StorageError:
    """Hydra, or a sweep, could not make its folder."""
    taken = isinstance(error, FileExistsError | NotADirectoryError)
    why = "something on the way is no folder" if taken else error.strerror or str(error)
    return StorageError(
        f"{key}: {error.filename} cannot be made: {why}; name another place: {key}=/path/to/folder"
    )


def _hand_over(
    task: Callable[[DictConfig], float | None], session: Session | None, state: State
) -> None:
    """Let Hydra run what it is asked to; a sweep ends in its comparison, however it ends."""
    with untyped_configs(), ExitStack() as stack:
        if session is not None:
            stack.enter_context(quiet_hydra())
            stack.enter_context(active_session(session))
        try:
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(task)()
        finally:
            if session is not None:
                outcome = compare(session)
                state.failures = state.failures or outcome.failures
                state.jobs = max(state.jobs, outcome.jobs)
                state.again = session.sweep is not None


def _sweep_failed(state: State) -> SweepFailed:
    if not state.failures:  # they ran in processes of their own
        return SweepFailed("some jobs of the sweep failed; run.log in each job's folder says why")
    lines = "".join(f"\n  {escape_control_chars(failure)}" for failure in state.failures)
    again = "\nthe same command again runs what is missing" if state.again else ""
    return SweepFailed(f"{len(state.failures)} of {state.jobs} jobs failed:{lines}{again}")


def _run(config: DictConfig, request: Request, state: State) -> float | None:
    """One job, however it ends; what it returns is what a sweeper optimises."""
    about = HydraConfig.get()
    folder = Path(about.runtime.output_dir)
    number = about.job.num if about.mode is RunMode.MULTIRUN else None
    overrides = " ".join(provenance.as_typed(about.overrides.task))
    state.jobs += 1
    before = _written(folder)
    try:
        for name in (hydra_files.FOLDER, hydra_files.RESUMED):
            hidden.mask_saved(folder / name)
        with secrets.told_by_name():
            return _job(config, request.typed, folder, [*request.notes, *_title(number, overrides)])
    except Interrupted as error:
        log.error("%s", error)
        raise SystemExit(error.exit_code) from error  # past Hydra: no further job is begun
    except KeyboardInterrupt as error:
        unbegun = config.job.kind is JobKind.train and _written(folder) == before
        where = " before the first step; no checkpoint is written" if unbegun else ""
        interrupted = interruption_before_run(error, where)
        log.error("%s", interrupted)
        raise SystemExit(interrupted.exit_code) from error
    except Exception as error:
        if _written(folder) != before:  # training had begun: the table says what there is of it
            with suppress(StorageError):
                _show(replace(Summary.read(folder), reason=""), folder)  # it comes next
        message, code = _report(error, folder)
        if not any((folder / name).exists() for name in (SUMMARY, BENCHMARK)):
            # it failed while it was built
            with suppress(OSError):
                Summary("failed", message, command=provenance.command()).write(folder)
        if number is None:
            state.exit_code = code
            return None
        state.failures.append(f"#{number} {overrides}: {message}")
        raise Reported(code) from error  # launchers and sweepers are to know
    finally:
        close_logging()
        shutil.rmtree(folder / hydra_files.RESUMED, ignore_errors=True)  # of what has not gone on


def _written(folder: Path) -> int:
    """When `summary.json` was last written, 0 where there is none; building a run writes none."""
    try:
        return (folder / SUMMARY).stat().st_mtime_ns
    except OSError:
        return 0


def _title(number: int | None, overrides: str) -> list[str]:
    return [] if number is None else [f"job #{number}: {overrides}"]


def _job(config: DictConfig, given: CliOverrides, folder: Path, notes: list[str]) -> float | None:
    set_up_logging("info", folder)
    check_level(config, given.security)  # in whichever process this is
    checked = typed(config)
    open_to_all = paths.keep_private(folder, checked.security.level)
    set_up_logging(checked.monitoring.log_level, folder)
    if checked.security.level is SecurityLevel.off:
        log.warning(OFF)
    for warning in open_to_all:
        log.warning("%s", warning)
    for note in notes:
        log.info(note)
    summary = find(checked.job.kind)(checked, folder)
    if not isinstance(summary, Summary):
        return None
    _show(masked_all(summary), folder)
    return summary.best if summary.best is not None else summary.metrics.get(summary.monitor)


def _show(summary: Summary, folder: Path) -> None:
    from runner.record.console import print_stdout
    from runner.report import run as report

    print_stdout(report.terminal(summary, folder), crop=False)  # a command is one line


def _report(error: Exception, folder: Path) -> tuple[str, int]:
    """Say what happened, on one line; a fault's traceback goes into the log."""
    if isinstance(error, RunnerError):
        first, *more = masked(str(error)).split("\n")  # what follows is the traceback of a worker
        for line in more:
            log.error("  %s", line, extra={"live": True})  # not on the screen
        log.error("%s%s", first, f"; the traceback is in {folder / 'run.log'}" if more else "")
        return first, error.exit_code
    said, file, number = describe_error(error)
    message = masked(f"{said} ({file}:{number})")
    log.error(message, exc_info=error, extra={"live": True})  # not on the screen
    log.error("%s; the traceback is in %s", message, folder / "run.log")
    return message, 1


@contextmanager
def untyped_configs() -> Iterator[None]:
    """While entered, Hydra prints configs without the types of their keys.

    `${oc.env:NAME}` is resolved to that name then, which is no number and no flag.
    """
    before: Any = Hydra.get_sanitized_cfg

    def untyped(self: Hydra, cfg: DictConfig, cfg_type: str) -> DictConfig:
        found: Any = OmegaConf.to_container(before(self, cfg, cfg_type), resolve=False)
        return DictConfig(found)

    Hydra.get_sanitized_cfg = untyped  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_sanitized_cfg = before  # type: ignore[method-assign]


@contextmanager
def as_plain_text() -> Iterator[None]:
    """While entered, what is printed is text alone: files of others may be part of it."""
    plain: Any = _Plain(sys.stdout)
    with redirect_stdout(plain):
        yield


class _Plain:
    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(escape_lines(masked(text)))
        return len(text)

    def flush(self) -> None:
        self.stream.flush()
