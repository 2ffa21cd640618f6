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

import hydra
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import DictConfig

from runner.cli.arguments import MODE, Arguments
from runner.composing import compose_raw, typed
from runner.config import RunConfig, config_hash
from runner.jobs.config import JobKind
from runner.overrides.groups import CONF
from runner.overrides.spelling import first_job, normalize_overrides
from runner.record import hydra_files
from runner.record.text import quote_for_hydra
from runner.security import secrets
from runner.security.cli_overrides import CliOverrides, check_folders, read_overrides
from runner.security.config_files import ConfigFiles
from runner.security.paths import check_place, keep_within

if TYPE_CHECKING:
    from runner.overrides.recorded import Resumed
    from runner.sweep.state import SweepSession

OUR_FOLDERS = (CONF.resolve(), Path(hydra.__file__).resolve().parent / "conf")
"""Config folders that are exempt from checks."""
PLUGINS = str(Path(__file__).resolve().parents[1] / "plugins")
JOB = "RUNNER_JOB"  # set in a sweep's job, see runner.sweep.job_context


@dataclass
class Request:
    """A checked command line and its composed config."""

    flags: Arguments
    config: DictConfig | None = None  # of one run; None if Hydra composes (sweeps, help)
    session: SweepSession | None = None  # of a sweep
    resumed: Path | None = None  # folder of the run that was named to continue
    chosen: bool = True  # whether the user chose the folder to write to
    notes: list[str] = field(default_factory=list)  # for the log
    typed: CliOverrides = field(default_factory=CliOverrides)
    files: ConfigFiles = field(default_factory=lambda: ConfigFiles(OUR_FOLDERS))

    @property
    def sweeps(self) -> bool:
        """Whether several jobs are to be run."""
        return self.flags.sweeps

    @property
    def names_folder(self) -> bool:
        """Whether `hydra.run.dir` is given: typed, or for a continued run or a sweep's job."""
        return any(text.startswith("hydra.run.dir=") for text in self.flags.overrides)

    @property
    def arguments(self) -> list[str]:
        """The command line for Hydra."""
        return self.flags.for_hydra()

    @contextmanager
    def permissions(self) -> Iterator[None]:
        """Allow reading the permitted variables and config files within the context."""
        readable, shows = self.typed.security.readable, self.flags.cfg is not None
        with secrets.environment_access(readable, shows=shows), self.files.at_work():
            yield


def check(arguments: Arguments) -> Request:
    """Compose the config of a command and check it as the run will, with the same errors."""
    if PLUGINS not in sys.path:  # last; Hydra looks for plugins once
        sys.path.append(PLUGINS)
    Plugins.instance()  # scan while the current folder is not importable
    chosen, flags = True, replace(arguments)
    if JOB in os.environ:
        from runner.sweep.job_context import take_job_context

        context = take_job_context()
        chosen, flags.overrides = context.folder_trusted, [*flags.overrides, *context.overrides]
    given = read_overrides(flags.overrides, CONF)
    folders = {"--config-path": flags.config_path, "--config-dir": flags.config_dir}
    flags.config_path = check_folders(folders, given, CONF).get("--config-path")
    trusted = ", ".join(given.security.trusted)
    notes = [f"security.trusted: code of {trusted} may run"] if trusted else []
    files = ConfigFiles(OUR_FOLDERS, given)
    request = Request(flags, chosen=chosen, notes=notes, typed=given, files=files)
    with secrets.redact_errors(), request.permissions():
        _check(request)
    return request


def _check(request: Request) -> None:
    flags = request.flags
    more = [Path(folder.removeprefix("file://")) for folder in request.typed.searchpath]
    untyped = partial(
        compose_raw,
        config_name=flags.config_name or "config",
        folders=[*flags.folders, *more],
        conf=Path(flags.config_path or CONF),
    )

    def compose(overrides: Sequence[str]) -> DictConfig:
        return untyped([text for text in overrides if text != MODE], hydra_too=True)

    resumed: Resumed | None = None
    overrides = flags.overrides
    if any("checkpoint.resume" in text for text in overrides):
        from runner.overrides.recorded import with_recorded

        resumed = with_recorded(overrides, flags.sweeps)
        request.resumed, overrides = resumed.run, resumed.overrides
    if any("replay.path=" in text for text in overrides):
        from runner.cli.resume import with_captured

        overrides = with_captured(overrides, request.typed.security.trusted)
    flags.overrides = normalize_overrides(overrides, untyped)
    recipe = any(text.lstrip("+").startswith("experiment=") for text in flags.overrides)
    if recipe and not flags.sweeps and flags.cfg is None:  # it may start a sweep without -m
        flags.multirun = compose(first_job(flags.overrides)).hydra.mode is RunMode.MULTIRUN
    if flags.cfg is None and flags.sweeps:
        from runner.cli.sweep import prepare

        request.session = prepare(flags, compose, request.files)
        request.files.continued.append(request.session.folder)
        return
    request.config = compose(flags.overrides)
    if flags.cfg is None:
        _check_run(request, request.config, resumed, compose)


def _check_run(
    request: Request,
    composed: DictConfig,
    resumed: Resumed | None,
    compose: Callable[[Sequence[str]], DictConfig],
) -> None:
    """Check one run, and add the folder in which it continues to its overrides."""
    flags, given = request.flags, request.typed
    planned = secrets.place(composed, "hydra.run.dir")
    request.files.check_folders(composed, sweeps=False)
    config = typed(composed.copy())
    if config.model.weights is not None:
        from runner.cli.resume import check_weights_exist

        check_weights_exist(config)
    folder = _resume_folder(request, resumed, planned, config)
    if folder is not None:
        if not given.off:
            keep_within(folder)
        if given.strict:
            check_place("checkpoint.resume", folder, strict=True)
        flags.overrides.append(f"hydra.run.dir={quote_for_hydra(str(folder))}")
        request.files.continued.append(folder)
        # the recorded config is kept until the checkpoint is loaded
        subfolder = f"hydra.output_subdir={hydra_files.RESUMED}"
        request.config = compose([*flags.overrides, subfolder])
    if config.job.kind is JobKind.benchmark:
        _check_benchmark(config, flags)
    if config.job.kind is JobKind.scan:
        from runner.jobs.scan import find

        find(config.scan.path)


def _check_benchmark(config: RunConfig, flags: Arguments) -> None:
    """Check that every arm composes, and that the stored result to compare with exists."""
    if config.benchmark.claims:  # claims have their own arms
        return
    from runner.benchmark.arms import arms_of
    from runner.benchmark.regression import stored

    name = flags.config_name or "config"
    arms = arms_of(config.benchmark, flags.overrides, flags.folders, name)
    stored(config.benchmark, [arm.name for arm in arms])


def _resume_folder(
    request: Request, resumed: Resumed | None, planned: Path, config: RunConfig
) -> Path | None:
    """Return the folder in which the run continues, or None for a new one."""
    if resumed is not None and resumed.folder is not None:
        request.notes.append(f"continuing {resumed.folder}")
        return resumed.folder
    if config.job.kind is not JobKind.train or config.checkpoint.resume != "auto":
        return None
    if request.names_folder:
        return None
    from runner.cli.resume import unfinished

    folder = unfinished(planned, config_hash(config))
    absent = f"no unfinished run of this config under {planned.parent}; starting afresh"
    what = absent if folder is None else f"continuing {folder}"
    request.notes.append(f"checkpoint.resume=auto: {what}")
    return folder
