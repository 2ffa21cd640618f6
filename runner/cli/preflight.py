"""The check before anything is started: a mistake is one line, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import hydra
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from runner.benchmark.arms import arms_of
from runner.cli.arguments import Arguments
from runner.cli.replay import with_captured
from runner.cli.resume import Resumed, unfinished, with_recorded
from runner.cli.sweep import MODE, check_weights_exist, prepare
from runner.composing import compose_raw, typed
from runner.config import RunConfig, config_hash
from runner.jobs.config import JobKind
from runner.overrides.groups import CONF
from runner.overrides.spelling import normalize_overrides, sample_jobs
from runner.record.text import quote_for_hydra
from runner.security import secrets
from runner.security.cli_overrides import CliOverrides, check_folders, read_overrides
from runner.security.config_files import ConfigFiles
from runner.security.paths import check_place, keep_within
from runner.sweep import job
from runner.sweep.job import register_plugins
from runner.sweep.state import Session

OURS = (CONF.resolve(), Path(hydra.__file__).resolve().parent / "conf")
"""Folders of configs that are looked at no further."""


@dataclass
class Request:
    """What Hydra is to be given, and what the run should say about it."""

    arguments: list[str]
    sweeps: bool = False
    continues: bool = False  # in the folder of an earlier run
    resumed: Path | None = None  # the folder of a run that was named to go on with
    chosen: bool = True  # the folder to write to, by somebody
    notes: list[str] = field(default_factory=list)
    session: Session | None = None  # of the sweep, where there is one
    only_shows: bool = False  # a config; nothing is run
    only_prints: bool = False  # that, or help
    typed: CliOverrides = field(default_factory=CliOverrides)
    files: ConfigFiles = field(default_factory=lambda: ConfigFiles(OURS))


def check(arguments: Arguments) -> Request:
    """Compose what was asked for, and check it as the run will. Raises what the run would."""
    register_plugins()
    Plugins.instance()  # found now, while the current folder is not on the module path
    orders = job.take_job_context()
    arguments.overrides += orders.overrides
    given = read_overrides(arguments.overrides, CONF)
    flags = {"--config-path": arguments.config_path, "--config-dir": arguments.config_dir}
    where = check_folders(flags, given, CONF).get("--config-path")
    arguments = replace(arguments, config_path=where)
    files = ConfigFiles(OURS, given)
    door = secrets.door(given.security.readable, shows=arguments.only_shows)
    with secrets.told_by_name(), door, files.at_work():
        found = _check(arguments, given)
    return replace(
        found, only_shows=arguments.only_shows, only_prints=arguments.only_prints,
        typed=given, files=files,
        chosen=orders.chosen,
    )  # fmt: skip


def _check(arguments: Arguments, given: CliOverrides) -> Request:
    path = arguments.config_path
    more = [Path(folder.removeprefix("file://")) for folder in given.searchpath]
    config_of = partial(
        compose_raw,
        config_name=arguments.config_name or "config",
        folders=[*arguments.folders, *more],
        conf=CONF if path is None else Path(path),
    )

    def compose(overrides: Sequence[str]) -> DictConfig:
        return config_of([text for text in overrides if text != MODE], hydra_too=True)

    if arguments.is_hydras:
        if path is not None and not (arguments.hydra_help or arguments.shell_completion):
            for one in sample_jobs(arguments.overrides):
                config = compose(one)
                if not arguments.only_shows:
                    typed(config)
        return Request(arguments.for_hydra(arguments.overrides), arguments.sweeps)
    resumed = with_recorded(arguments.overrides, arguments.sweeps)
    overrides = normalize_overrides(with_captured(resumed.overrides, config_of), config_of)
    request = Request([], arguments.sweeps, notes=_trusted(given), resumed=resumed.run)
    if arguments.only_shows:
        compose(overrides)
    elif arguments.sweeps:
        prepared = prepare(arguments, overrides, compose)
        request.session = prepared.session
        if prepared.benchmark is not None:
            arguments = replace(arguments, multirun=False)
            overrides, request.sweeps = prepared.benchmark, False
            _check_benchmark(typed(compose(overrides)), overrides, arguments)
    else:
        _check_run(request, compose(overrides), overrides, resumed, arguments, given)
    request.arguments = arguments.for_hydra(overrides)
    return request


def _check_run(
    request: Request,
    config: DictConfig,
    overrides: list[str],
    resumed: Resumed,
    arguments: Arguments,
    given: CliOverrides,
) -> None:
    """Check one run, and append the folder that it continues in to its overrides."""
    planned = secrets.place(config, "hydra.run.dir")
    checked = typed(config)
    check_weights_exist(checked)
    place = _place(resumed, overrides, planned, checked, request)
    if place is not None:
        if not given.off:
            keep_within(place)
        if given.strict:
            check_place("checkpoint.resume", place, strict=True)
        overrides.append(f"hydra.run.dir={quote_for_hydra(str(place))}")
        request.continues = True
    if checked.job.kind is JobKind.benchmark:
        _check_benchmark(checked, overrides, arguments)
    if checked.job.kind is JobKind.scan:
        from runner.jobs.scan import find

        find(checked.scan.path)


def _trusted(given: CliOverrides) -> list[str]:
    names = given.security.trusted
    return [f"security.trusted: code of {', '.join(names)} may run"] if names else []


def _check_benchmark(config: RunConfig, overrides: Sequence[str], arguments: Arguments) -> None:
    """Every arm composes, and the stored result to hold them against is there."""
    from runner.benchmark.regression import stored  # needs numpy, which other answers do not

    settings = config.benchmark
    if not settings.claims:  # which have arms of their own
        name = arguments.config_name or "config"
        arms = arms_of(settings, overrides, arguments.folders, name)
        stored(settings, [arm.name for arm in arms])


def _place(
    resumed: Resumed,
    overrides: Sequence[str],
    planned: Path,
    checked: RunConfig,
    request: Request,
) -> Path | None:
    """The folder to continue in, or None for a fresh one."""
    if resumed.folder is not None:
        request.notes.append(f"continuing {resumed.folder}")
        return resumed.folder
    fixed = any(text.startswith("hydra.run.dir=") for text in overrides)
    if checked.job.kind is not JobKind.train or checked.checkpoint.resume != "auto" or fixed:
        return None
    found = unfinished(planned, config_hash(checked))
    if found is None:
        where = f"no unfinished run of this config under {planned.parent}"
        request.notes.append(f"checkpoint.resume=auto: {where}; starting afresh")
    else:
        request.notes.append(f"checkpoint.resume=auto: continuing {found}")
    return found
