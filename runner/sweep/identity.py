"""When two sweeps are the same, and when a job that was done need not be done again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runner.checkpoint.manifest import MODEL
from runner.checkpoint.manifest import NAME as MANIFEST
from runner.config import NOT_OF_THE_RUN, RunConfig
from runner.device.capabilities import cpu_name
from runner.overrides.spelling import parse_override
from runner.record import provenance
from runner.record.storage import read_record

log = logging.getLogger("runner")

VERSIONS = ("python", "runner", "torch", "numpy", "hydra-core", "omegaconf")
HOW = ("hydra.launcher", "hydra/launcher", "hydra.sweep.dir", "hydra.mode", "hydra.run", "sweep.")
"""Keys that say where and how jobs are run, not which."""
MOST_FILES = 1_000_000  # of a data set, which take seconds to look at
GPUS = Path("/proc/driver/nvidia/gpus")


def sweep_hash(overrides: Sequence[str], flags: Sequence[str] = ()) -> str:
    """A sha256 of what was typed, whatever its order; how and where jobs run does not count."""
    typed = {o.key: str(o) for o in map(parse_override, overrides)}  # the last one of a key holds
    kept = sorted(text for key, text in typed.items() if not key.startswith(HOW))
    return _digest([*flags, *kept])


def job_hash(config: RunConfig, variables: Any = None) -> str:
    """A sha256 of resolved config, environment variables that the job is given, code, the data's
    files, the checkpoint or weights it begins with, versions and device.

    The code is that of our package and of those in `security.trusted`, by the contents of their
    files, so that a commit elsewhere changes nothing and an uncommitted line does.
    """
    found = asdict(config)
    settings = {k: v for k, v in found.items() if k not in ("name", "monitoring", *NOT_OF_THE_RUN)}
    kind = config.job.kind.name
    return _digest(
        {
            "config": settings,
            "job": [kind, found.get(kind)],
            "code": [code_hash("runner"), *map(code_hash, sorted(config.security.trusted))],
            "data": _of_data(found["data"].get("path")),
            "checkpoint": _of_checkpoint(config.checkpoint.resume),
            "weights": _of_weights(config.model.weights),
            "variables": variables,
            "versions": {k: v for k, v in provenance.versions().items() if k in VERSIONS},
            "device": machine(),
        }
    )


def same_versions(before: dict[str, str]) -> bool:
    """Whether a run was made with the versions of today."""
    today = provenance.versions()
    return all(before.get(name) == today.get(name) for name in VERSIONS)


@cache
def code_hash(package: str) -> str:
    """A sha256 of the Python files of an importable package or module, which is not imported."""
    digest = hashlib.sha256()
    for path in _files(package.partition(".")[0]):
        digest.update(path.name.encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _files(package: str) -> Iterator[Path]:
    try:
        # the job has the current folder on its module path, last; here it never is
        spec: ModuleSpec | None = find_spec(package) or PathFinder.find_spec(package, [os.getcwd()])
    except (ImportError, ValueError):
        spec = None
    if spec is None:  # the job itself says that it is not there
        return
    for folder in spec.submodule_search_locations or ():
        yield from sorted(Path(folder).rglob("*.py"))
    if spec.origin is not None and Path(spec.origin).suffix == ".py":
        yield Path(spec.origin)


@cache
def machine() -> dict[str, Any]:
    """What there is to compute with, as far as can be told without torch."""
    gpus = sorted(_text(path).split("IRQ")[0] for path in GPUS.glob("*/information"))
    visible = {k: os.environ[k] for k in sorted(os.environ) if k.endswith("_VISIBLE_DEVICES")}
    return {"cpu": cpu_name(), "system": platform.machine(), "gpus": gpus, "visible": visible}


def _of_data(path: Any) -> str:
    return stamp(Path(path).expanduser()) if isinstance(path, str) else ""


@cache
def stamp(path: Path) -> str:
    """A sha256 of names, sizes and times of the user's file, or of all files in a folder.

    Some 5 µs a file. Of folders with more than MOST_FILES the rest counts for nothing, which is
    said: such a sweep is begun anew with `sweep.resume=none` when its data has changed.
    """
    digest = hashlib.sha256()
    for count, (name, status) in enumerate(_tree(path)):
        if count == MOST_FILES:
            log.warning(
                "%s: changes of files beyond the first %d go unnoticed; after one, use "
                "sweep.resume=none",
                path,
                MOST_FILES,
            )
            break
        entry = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(entry.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _tree(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The file, or the files in the folder, also those that links lead to; in one order always."""
    folders, seen = [str(path)], set()
    while folders:
        place = folders.pop()
        try:
            status = os.stat(place)
            inside = sorted(os.listdir(place)) if stat.S_ISDIR(status.st_mode) else []
        except OSError:
            continue
        if not stat.S_ISDIR(status.st_mode):
            yield os.path.relpath(place, path), status
        elif (status.st_dev, status.st_ino) not in seen:  # a link may lead back
            seen.add((status.st_dev, status.st_ino))
            folders += [os.path.join(place, name) for name in reversed(inside)]


def _of_checkpoint(resume: str) -> list[str]:
    """The manifests of the checkpoints that are named, which tell the weights' own sha256."""
    path = Path(resume)
    if resume in ("none", "auto"):
        return []
    if path.is_file():  # `last`, where there are no links
        path = path.parent
    found = [path / MANIFEST]
    for folder in (path, path / "checkpoints"):
        found += sorted(folder.glob(f"step_*/{MANIFEST}"))
    return [hashlib.sha256(_text(file).encode()).hexdigest() for file in found]


def _of_weights(path: str | None) -> list[str]:
    """The user's file, or what a folder holds that weights are read from."""
    if path is None:
        return []
    place = Path(path).expanduser()
    if place.is_file():
        return [stamp(place)]
    return [*_of_checkpoint(str(place)), stamp(place / MODEL)]


def _text(path: Path) -> str:
    try:
        return read_record(path).decode("utf-8", "replace")
    except OSError:
        return ""


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _plain(value: Any) -> str:
    return value.name if isinstance(value, Enum) else str(value)
