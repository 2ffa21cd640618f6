"""Checks before anything starts: a mistake is reported in one line, and leaves no files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from runner import rooms
from runner.cli.arguments import MULTIRUN_MODE, Arguments
from runner.core.config.composing import BUILTIN_FOLDERS, compose_raw, typed
from runner.core.config.groups import CONF
from runner.core.config.run_config import RunConfig, config_hash
from runner.core.config.spelling import check_job_keys, first_job, normalize_overrides
from runner.core.errors import ConfigError
from runner.core.record import hydra_files
from runner.core.record.text import quote_for_hydra
from runner.core.schemas.jobs import JobKind
from runner.core.schemas.sweep import JOB_VARIABLE
from runner.core.security import secrets
from runner.core.security.cli_overrides import CliOverrides, parse_overrides, resolve_config_folders
from runner.core.security.config_files import ConfigFileChecker
from runner.core.security.paths import check_links, check_output_path

if TYPE_CHECKING:
    from runner.core.config.recorded import ResumedRun
    from runner.scale.sweep.state import SweepSession

PLUGIN_FOLDER = str(Path(__file__).resolve().parents[1] / "scale" / "plugins")
RANK_VARIABLES = {"RANK", "SLURM_STEP_ID"}  # variables that torchrun and srun set


@dataclass
class Request:
    """A checked command line and its composed config."""

    flags: Arguments
    config: DictConfig | None = None  # of one run; None if Hydra composes (sweeps, help)
    session: SweepSession | None = None  # of a sweep
    resumed_run: Path | None = None  # folder of the run that was named to continue
    is_job: bool = False  # of a sweep, which owns the folder
    folder_trusted: bool = True  # whether the user chose the folder to write to
    notes: list[str] = field(default_factory=list)  # for the log
    cli_overrides: CliOverrides = field(default_factory=CliOverrides)
    files: ConfigFileChecker = field(default_factory=lambda: ConfigFileChecker(BUILTIN_FOLDERS))

    @property
    def arguments(self) -> list[str]:
        """The command line for Hydra."""
        return self.flags.hydra_arguments()

    @contextmanager
    def permissions(self) -> Iterator[None]:
        """Allow reading the permitted variables and config files within the context."""
        readable = self.cli_overrides.security.readable_variables
        show_names = self.flags.cfg is not None
        with secrets.environment_access(readable, show_names=show_names), self.files.at_work():
            yield


def check(arguments: Arguments) -> Request:
    """Compose the config of a command and check it as the run will, with the same errors."""
    if PLUGIN_FOLDER not in sys.path:  # last; Hydra looks for plugins once
        sys.path.append(PLUGIN_FOLDER)
    Plugins.instance()  # scan while the current folder is not importable
    folder_trusted, flags = True, replace(arguments)
    is_job = JOB_VARIABLE in os.environ
    if is_job:
        from runner.scale.sweep.job_context import take_job_context

        context = take_job_context()
        folder_trusted = context.folder_trusted
        flags.overrides = [*flags.overrides, *context.overrides]
    cli_overrides = parse_overrides(flags.overrides, CONF)
    folders = {"--config-path": flags.config_path, "--config-dir": flags.config_dir}
    flags.config_path = resolve_config_folders(folders, cli_overrides, CONF).get("--config-path")
    trusted = ", ".join(cli_overrides.security.trusted)
    notes = [f"security.trusted: code of {trusted} may run"] if trusted else []
    files = ConfigFileChecker(BUILTIN_FOLDERS, cli_overrides)
    request = Request(flags, is_job=is_job, folder_trusted=folder_trusted, notes=notes)
    request.cli_overrides, request.files = cli_overrides, files
    with secrets.redact_errors(), request.permissions():
        _check_request(request)
    request.notes += request.files.notes
    return request


def _check_request(request: Request) -> None:
    flags = request.flags
    folders = [*flags.config_folders, *request.cli_overrides.search_folders]
    name, conf = flags.config_name or "config", Path(flags.config_path or CONF)
    request.files.user_folders, request.files.primary = folders, name
    request.files.check_reserved_names()
    compose_config = partial(compose_raw, config_name=name, folders=folders, conf=conf)

    def compose(overrides: Sequence[str]) -> DictConfig:
        return compose_config([text for text in overrides if text != MULTIRUN_MODE], hydra_too=True)

    resumed: ResumedRun | None = None
    overrides = flags.overrides
    if any("checkpoint.resume" in text for text in overrides):
        from runner.core.config.recorded import check_config_files, merge_recorded_overrides

        resumed = merge_recorded_overrides(overrides, flags.is_sweep)
        request.resumed_run, overrides = resumed.run, resumed.overrides
        if resumed.run is not None and not request.is_job:
            check_config_files(resumed.run, name, folders)
    if any("replay.path=" in text for text in overrides):
        from runner.cli.resume import add_captured_name

        overrides = add_captured_name(overrides, request.cli_overrides.security.trusted)
    flags.overrides = normalize_overrides(overrides, compose_config, folders)
    has_experiment = any(text.lstrip("+").startswith("experiment=") for text in flags.overrides)
    # an experiment may start a sweep without -m
    if has_experiment and not flags.is_sweep and flags.cfg is None:
        flags.multirun = compose(first_job(flags.overrides)).hydra.mode is RunMode.MULTIRUN
    if flags.cfg is None and flags.is_sweep:
        rooms.require("scale", "a sweep (-m)")
        from runner.cli.sweep import prepare_sweep

        request.session = prepare_sweep(flags, compose, request.files)
        request.files.resumed_folders.append(request.session.folder)
        return
    request.config = compose(flags.overrides)
    if flags.cfg is None:
        _check_run(request, request.config, resumed, compose)


def _check_run(
    request: Request,
    composed: DictConfig,
    resumed: ResumedRun | None,
    compose: Callable[[Sequence[str]], DictConfig],
) -> None:
    """Check one run, and add the folder in which it continues to its overrides."""
    flags, cli_overrides = request.flags, request.cli_overrides
    planned = secrets.read_path(composed, "hydra.run.dir")
    request.files.check_folders(composed, sweeps=False)
    try:
        config = typed(composed.copy())
    except ConfigError as error:
        if error.key == "data.target" and OmegaConf.is_missing(composed.data, "target"):
            from runner.core.config.diagnosis import unnamed_target

            raise unnamed_target(Path(os.path.expanduser(str(composed.data.path)))) from None
        raise
    if not request.is_job:  # whose sweep may be over jobs
        check_job_keys(cli_overrides.values, [config.job.kind])
    if config.model.weights is not None or hasattr(config.data, "path"):
        from runner.cli.resume import check_inputs_exist

        check_inputs_exist(config)
    folder = _resume_folder(request, resumed, planned, config)
    if folder is not None:
        if not cli_overrides.off:
            check_links(folder)
        if cli_overrides.strict:
            check_output_path("checkpoint.resume", folder, strict=True)
        flags.overrides.append(f"hydra.run.dir={quote_for_hydra(str(folder))}")
        request.files.resumed_folders.append(folder)
    elif planned.is_dir():
        from runner.core.checkpoint.lock import lock
        from runner.core.checkpoint.ownership import check_folder

        trains = config.job.kind is JobKind.train
        if trains and (planned / hydra_files.FOLDER).is_dir():
            lock(planned).release()  # raises if a run is using it
            folder = planned
        resume = _continue_requeued_run(flags, planned, config)
        if not (request.is_job or _is_restarted()):
            check_folder(planned, resume, trains)
    if folder is not None:  # the recorded config is kept until training starts
        subfolder = f"hydra.output_subdir={hydra_files.RESUMED}"
        request.config = compose([*flags.overrides, subfolder])
    if config.job.kind is JobKind.benchmark:
        # every arm composes, and the stored result to compare with exists
        check_arms = rooms.find("preflight", "benchmark", "job=benchmark")
        name, folders = flags.config_name or "config", flags.config_folders
        check_arms(config.benchmark, flags.overrides, folders, name)
    if config.job.kind is JobKind.scan:
        rooms.find("preflight", "scan", "job=scan")(config.scan.path)


def _is_restarted() -> bool:
    """Whether torchrun or SLURM has started this run again, or this process is a rank above 0."""
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        return True
    if not RANK_VARIABLES & os.environ.keys():
        return False
    from runner.scale.distributed.rank_info import detect_rank

    return (place := detect_rank()) is not None and bool(place.rank or place.attempt)


def _continue_requeued_run(flags: Arguments, planned: Path, config: RunConfig) -> str:
    """Let a run that SLURM has requeued continue in its folder; return `checkpoint.resume`."""
    from runner.core.checkpoint.ownership import has_checkpoints

    resume, trains = config.checkpoint.resume, config.job.kind is JobKind.train
    is_requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    if is_requeued and trains and resume == "none" and has_checkpoints(planned):
        flags.overrides.append("checkpoint.resume=auto")
        return "auto"
    return resume


def _resume_folder(
    request: Request, resumed: ResumedRun | None, planned: Path, config: RunConfig
) -> Path | None:
    """Return the folder in which the run continues, or None for a new one."""
    if resumed is not None and resumed.folder is not None:
        request.notes.append(f"continuing {resumed.folder}")
        return resumed.folder
    if config.job.kind is not JobKind.train or config.checkpoint.resume != "auto":
        return None
    # typed, or for a continued run or a sweep's job
    if any(text.startswith("hydra.run.dir=") for text in request.flags.overrides):
        if not any(planned.glob("checkpoints/step_*")):
            note = f"checkpoint.resume=auto: no checkpoint in {planned}; starting afresh"
            request.notes.append(note)
        return None
    from runner.cli.resume import find_unfinished_run

    folder = find_unfinished_run(planned, config_hash(config))
    not_found = f"no unfinished run of this config under {planned.parent}; starting afresh"
    note = not_found if folder is None else f"continuing {folder}"
    request.notes.append(f"checkpoint.resume=auto: {note}")
    return folder
