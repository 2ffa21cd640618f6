"""The check before anything is started: a mistake is one line, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import hydra
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from runner.benchmark.arms import arms_of
from runner.cli.arguments import Arguments
from runner.cli.replay import with_captured
from runner.cli.resume import Resumed, unfinished, with_recorded
from runner.cli.sweep import MODE, prepare
from runner.cli.there import check_there
from runner.composing import compose_raw, typed
from runner.config import RunConfig, config_hash
from runner.errors import ConfigError
from runner.jobs.config import JobKind
from runner.overrides.groups import CONF
from runner.overrides.spelling import some_jobs, spelled
from runner.record.text import quote_for_hydra
from runner.security import secrets
from runner.security.folders import keep_within
from runner.security.intent.flags import check_folders
from runner.security.intent.places import check_place
from runner.security.intent.reading import Reading
from runner.security.intent.said import Said, check_text, read_overrides
from runner.security.intent.settled import check_leads
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
    may_read: list[str] | None = field(default_factory=list)  # of the environment; None: all of it
    said: Said = field(default_factory=Said)  # about security
    reading: Reading = field(default_factory=lambda: Reading(OURS))  # how config files are read


def check(arguments: Arguments) -> Request:
    """Compose what was asked for, and check it as the run will. Raises what the run would."""
    register_plugins()
    Plugins.instance()  # found now, while the current folder is not on the module path
    orders = job.take_job_context()
    arguments.overrides += orders.overrides
    check_text(arguments.overrides)  # before any of it is parsed
    said = read_overrides(arguments.overrides, CONF)
    flags = {"--config-path": arguments.config_path, "--config-dir": arguments.config_dir}
    where = check_folders(flags, said, CONF).get("--config-path")
    arguments = replace(arguments, config_path=where)
    reading = Reading(OURS, said)
    may_read = secrets.typed_names(arguments.overrides)
    read = secrets.door(may_read, shows=arguments.only_shows)
    with secrets.told_by_name(), read, reading.at_work():
        for text in arguments.overrides:
            secrets.check_text(text, text.partition("=")[0].lstrip("+~"))
        found = _check(arguments, said)
    return replace(
        found, only_shows=arguments.only_shows, only_prints=arguments.only_prints,
        may_read=may_read, said=said, reading=reading,
        chosen=orders.chosen,
    )  # fmt: skip


def _check(arguments: Arguments, said: Said) -> Request:
    path = arguments.config_path
    more = [Path(folder.removeprefix("file://")) for folder in said.searchpath]
    loose = partial(
        compose_raw, config_name=arguments.config_name or "config",
        folders=[*arguments.folders, *more], conf=CONF if path is None else Path(path),
    )  # fmt: skip
    compose = _whole(loose)
    if arguments.is_hydras:
        if path is not None and not (arguments.hydra_help or arguments.shell_completion):
            for one in some_jobs(arguments.overrides):
                compose(one)
        return Request(arguments.for_hydra(arguments.overrides), arguments.sweeps)
    resumed = with_recorded(arguments.overrides, arguments.sweeps)
    overrides = spelled(with_captured(resumed.overrides, loose), loose)
    request = Request([], arguments.sweeps, notes=_trusted(said), resumed=resumed.run)
    if arguments.only_shows:
        compose(overrides)
    elif arguments.sweeps:
        prepared = prepare(arguments, overrides, compose)
        request.session = prepared.session
        if prepared.benchmark is not None:
            arguments = replace(arguments, multirun=False)
            overrides, request.sweeps = prepared.benchmark, False
            _check_benchmark(compose(overrides), overrides, arguments)
    else:
        config = compose(overrides, hydra_too=True)
        place = _place(resumed, overrides, config, request)
        if place is not None:
            if not said.off:
                keep_within(place)
            if said.strict:
                check_place("checkpoint.resume", place, strict=True)
            overrides.append(f"hydra.run.dir={quote_for_hydra(str(place))}")
            request.continues = True
        if config.job.kind is JobKind.benchmark:
            _check_benchmark(config, overrides, arguments)
        if config.job.kind is JobKind.scan:
            from runner.jobs.scan import find

            find(config.scan.path)
    request.arguments = arguments.for_hydra(overrides)
    return request


def _whole(compose: Callable[..., DictConfig]) -> Callable[..., DictConfig]:
    """The same, for the config of a run: whatever Hydra will act on leads somewhere."""

    def whole(overrides: list[str], hydra_too: bool = False) -> DictConfig:
        config = compose([text for text in overrides if text != MODE], hydra_too=True)
        if config.hydra.mode is RunMode.MULTIRUN:  # its jobs would be sweeps as well
            raise ConfigError("hydra.mode", "is not for a config", "leave it out, and type -m")
        check_leads(config)
        if not hydra_too:
            with open_dict(config):
                del config["hydra"]
        return config

    return whole


def _trusted(said: Said) -> list[str]:
    names = said.security.trusted
    return [f"security.trusted: code of {', '.join(names)} may run"] if names else []


def _check_benchmark(config: DictConfig, overrides: Sequence[str], arguments: Arguments) -> None:
    """Every arm composes, and the stored result to hold them against is there."""
    from runner.benchmark.regression import stored  # needs numpy, which other answers do not

    settings = typed(config).benchmark
    if not settings.claims:  # which have arms of their own
        name = arguments.config_name or "config"
        arms = arms_of(settings, overrides, arguments.folders, name)
        stored(settings, [arm.name for arm in arms])


def _place(
    resumed: Resumed, overrides: Sequence[str], config: DictConfig, request: Request
) -> Path | None:
    """The folder to continue in, or None for a fresh one."""
    planned = secrets.place(config, "hydra.run.dir")
    with open_dict(config):
        del config["hydra"]
    checked: RunConfig = typed(config)
    check_there(checked)
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
