"""The check before anything is started: a mistake is one line, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hydra.core.plugins import Plugins
from omegaconf import DictConfig, open_dict

from runner.cli.arguments import Arguments
from runner.cli.replay import with_captured
from runner.cli.resume import Resumed, quoted, unfinished, with_recorded
from runner.config import RunConfig, compose_raw, config_hash, typed
from runner.errors import RunnerError
from runner.jobs.config import JobKind
from runner.overrides.spelling import Compose, some_jobs, spelled


@dataclass
class Request:
    """What Hydra is to be given, and what the run should say about it."""

    arguments: list[str]
    sweeps: bool = False
    continues: bool = False  # in the folder of an earlier run
    notes: list[str] = field(default_factory=list)


def check(arguments: Arguments) -> Request:
    """Compose what was asked for, and check it as the run will. Raises what the run would."""
    Plugins.instance()  # found now, while the current folder is not on the module path
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
        _check_sweep(overrides, compose)
    else:
        config = compose(overrides, hydra_too=True)
        place = _place(resumed, overrides, config, request)
        if place is not None:
            overrides.append(f"hydra.run.dir={quoted(place)}")
            request.continues = True
    request.arguments = arguments.for_hydra(overrides)
    return request


def _check_sweep(overrides: Sequence[str], compose: Compose) -> None:
    """A key or option that is wrong ends the sweep here; a job that cannot run is one failure."""
    failures: list[RunnerError] = []
    jobs = some_jobs([o for o in overrides if o != "hydra.mode=MULTIRUN"])
    for job in jobs:
        config = compose(job)
        try:
            typed(config)
        except RunnerError as error:
            failures.append(error)
    if len(failures) == len(jobs):
        raise failures[0]


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
