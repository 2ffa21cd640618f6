"""Every place that Hydra writes to, for each way of launching, and what is gone on with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from runner.errors import SecurityError
from runner.security.intent.logs import check_logs
from runner.security.intent.names import leaves
from runner.security.intent.places import check_below, check_place, typed_place
from runner.security.intent.said import Said
from runner.security.intent.settled import LOGS, WRITES, in_a_job, value_of
from runner.security.targets import NAME

WRITTEN_HERE = ("checkpoint.resume", "sweep.resume", "replay.path")
GONE_ON_WITH = (*WRITTEN_HERE, "scan.path", "benchmark.baseline")
"""Files and folders of earlier runs; a job sees its config without Hydra's part, which must not
make them others.
"""
RESUMES = ("checkpoint.resume", "sweep.resume")
"""Keys that say where to write, when they are typed: the run or sweep goes on in place."""
NAMED = {"run": "hydra.run.dir", "sweep": "hydra.sweep.subdir"}
"""What the folder is called that is written to."""


def check_job(config: DictConfig, said: Said) -> None:
    """Raise SecurityError where a job would write elsewhere, or other lines to a log; `config` is
    as it has it, with its number and folder, before that is made.
    """
    tree: Any = OmegaConf.to_container(config.hydra, resolve=False)
    sweeps = config.hydra.mode is RunMode.MULTIRUN
    found = {**in_a_job(config, tree, "job"), "of": "sweep" if sweeps else "run"}
    check_places(found, said)
    check_logs(found, said)
    if sweeps:
        check_below("hydra.sweep.subdir", found["folder"], Path(str(found["sweep"]["dir"])))


def check_places(hydra: Mapping[str, Any], said: Said) -> None:
    """Folders and files that Hydra makes; under strict those that were typed as well."""
    of, folder, saved = hydra["of"], hydra["folder"], hydra.get("output_subdir")
    places = [("hydra.run.dir", hydra["run"].get("dir"))]
    places.append(("hydra.sweep.dir", hydra["sweep"].get("dir")))
    if folder is not None:
        places.append((NAMED[of], folder))
        if saved is not None:
            places.append(("hydra.output_subdir", Path(folder) / str(saved)))
    for part in ("launcher", *LOGS):
        for key, value in leaves(hydra.get(part), f"hydra.{part}"):
            if key.rpartition(".")[2] in WRITES and value is not None:
                places.append((key, value))
                if said.has(key):
                    continue
                if folder is not None:
                    places.append((key, Path(folder) / str(value)))  # with hydra.job.chdir
                if ".." in str(value).split("/"):  # of which folder?
                    raise SecurityError(f"{key}: {value} is refused: it leads up; name the folder")
                if part in LOGS and not str(value).endswith(".log"):  # nor any weights
                    raise SecurityError(f"{key}: {value} is refused: a log is called ….log")
    allowed = tuple(_typed_roots(said))
    for key, value in places:
        if value is not None:
            check_place(key, value, allowed, said.strict)
    name = hydra["name"]
    if name is not None and not NAME.fullmatch(str(name).replace("-", "_")):
        raise SecurityError(f"hydra.job.name: {name!r} is refused: it is part of a file's name")


def check_resumed(config: DictConfig, said: Said) -> None:
    """What a run goes on from or adds to, where a file says so, was written here."""
    for key in WRITTEN_HERE:
        found = value_of(config, tuple(key.split(".")))
        if found not in (None, "", "None", "none", "auto") and not said.has(key):
            check_place(key, found, tuple(_typed_roots(said)))


def _typed_roots(said: Said) -> list[Any]:
    """Folders that somebody typed: their own decision, but not under strict."""
    if said.strict:
        return []
    found = []
    for key, value in said.values.items():
        if not isinstance(value, str) or "." not in key:
            continue
        last = key.rpartition(".")[2]
        if key.startswith("hydra.") and last in ("dir", *WRITES):
            found.append(typed_place(value))
        elif key in RESUMES and value not in ("none", "auto"):
            place = Path(os.path.realpath(value))  # a run's folder, or one of its checkpoints
            within = (one.parent for one in (place, place.parent) if one.name == "checkpoints")
            found.append(next(within, place))
    return [one for one in found if one is not None and one != one.parent]  # never all there is
