"""The check before anything is started: a mistake is one line, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from hydra.core.plugins import Plugins
from omegaconf import DictConfig, open_dict

from runner.benchmark.arms import arms_of
from runner.cli.arguments import Arguments
from runner.cli.replay import with_captured
from runner.cli.resume import Resumed, unfinished, with_recorded
from runner.cli.sweep import prepare
from runner.config import RunConfig, compose_raw, config_hash, typed
from runner.jobs.config import JobKind
from runner.overrides.spelling import quoted, spelled
from runner.sweep import job
from runner.sweep.plugin import make_known
from runner.sweep.session import Session


@dataclass
class Request:
    """What Hydra is to be given, and what the run should say about it."""

    arguments: list[str]
    sweeps: bool = False
    continues: bool = False  # in the folder of an earlier run
    notes: list[str] = field(default_factory=list)
    session: Session | None = None  # of the sweep, where there is one


def check(arguments: Arguments) -> Request:
    """Compose what was asked for, and check it as the run will. Raises what the run would."""
    make_known()
    Plugins.instance()  # found now, while the current folder is not on the module path
    arguments.overrides += job.overrides()
    if arguments.is_hydras:
        return Request(arguments.for_hydra(arguments.overrides), arguments.sweeps)
    compose = partial(
        compose_raw, config_name=arguments.config_name or "config", folders=arguments.folders
    )
    resumed = with_recorded(arguments.overrides, arguments.sweeps)
    overrides = spelled(with_captured(resumed.overrides, compose), compose)
    request = Request([], arguments.sweeps)
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
            overrides.append(f"hydra.run.dir={quoted(str(place))}")
            request.continues = True
        if config.job.kind is JobKind.benchmark:
            _check_benchmark(config, overrides, arguments)
    request.arguments = arguments.for_hydra(overrides)
    return request


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
    planned = Path(config.hydra.run.dir)
    with open_dict(config):
        del config["hydra"]
    checked: RunConfig = typed(config)
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
