"""Hashes that tell whether two sweeps are the same, and whether a finished job is up to date."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runner.core.config.run_config import UNHASHED_KEYS, RunConfig, digest
from runner.core.config.spelling import parse_override
from runner.core.device.capabilities import cpu_name
from runner.core.record import provenance
from runner.core.schemas.data import LIMIT_KEYS, DataConfig
from runner.core.security.cli_overrides import iterate_leaves

VERSIONED_PACKAGES = ("python", "runner", "torch", "numpy", "hydra-core", "omegaconf")
EXECUTION_KEYS = ("hydra.launcher", "hydra/launcher", "hydra.sweep.dir", "hydra.mode", "hydra.run")
"""Keys that determine where and how jobs run, but not which."""
EXTENDABLE_KEYS = ("search.trials", "search.parallel")  # may change when a search is continued
MAX_ENTRIES = 100_000  # of a folder that a user's data set reads, to be compared
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def sweep_hash(overrides: Sequence[str], flags: Sequence[str] = ()) -> str:
    """Return a sha256 of the overrides in any order, without keys of execution."""
    # the last override of a key counts
    by_key = {o.key: str(o) for o in map(parse_override, overrides)}
    data_keys = (f"data.{key}" for key in ("changed", *LIMIT_KEYS))
    ignored = (*EXECUTION_KEYS, "sweep.", *EXTENDABLE_KEYS, *data_keys)
    return digest([*flags, *sorted(v for k, v in by_key.items() if not k.startswith(ignored))])


def job_hash(config: RunConfig, variables: Any = None) -> str:
    """Return a sha256 of config, environment variables, code, data files, initial checkpoint or
    weights, versions and device of a job.

    The code is that of our package and those in `security.trusted`, by file contents.
    """
    tree = asdict(config)
    settings = {k: v for k, v in tree.items() if k not in UNHASHED_KEYS}
    kind = config.job.kind.name
    keys = ("path", "validation_path", "test_path", "tokenizer")
    paths = [*(tree["data"].get(key) for key in keys), tree["model"].get("path")]
    return digest(
        {
            "config": settings,
            "job": [kind, tree.get(kind)],
            "code": [code_hash("runner"), *map(code_hash, sorted(config.security.trusted))],
            "data": [file_stamp(Path(os.path.expanduser(path))) for path in paths if path],
            "arguments": [file_stamp(path, MAX_ENTRIES) for path in argument_paths(config.data)],
            "checkpoint": _checkpoint_stamp(config.checkpoint.resume),
            "weights": _checkpoint_stamp(config.model.weights),
            "variables": variables,
            "versions": {k: v for k, v in provenance.versions().items() if k in VERSIONED_PACKAGES},
            "device": describe_hardware(),
        }
    )


def argument_paths(data: DataConfig) -> list[Path]:
    """Return the files and folders that texts among the arguments of a user's data set name."""
    texts = [x for _, x in iterate_leaves(data.arguments, "data") if isinstance(x, str) and x]
    paths = [Path(os.path.expanduser(text)) for text in texts if data._target_ and "\0" not in text]
    return [path for path in paths if os.path.exists(path)]


def unstamped_paths(config: RunConfig) -> list[str]:
    """Return the folders of a user's data set that are too large to be compared."""
    return [str(p) for p in argument_paths(config.data) if not file_stamp(p, MAX_ENTRIES)]


@cache
def code_hash(package: str) -> str:
    """Return a sha256 of a package's Python files, without importing it."""
    sha256 = hashlib.sha256()
    for path in _package_files(package.partition(".")[0]):
        sha256.update(path.name.encode() + b"\0")
        sha256.update(path.read_bytes())
    return sha256.hexdigest()


def _package_files(package: str) -> Iterator[Path]:
    try:
        # the job has the current folder last on its module path; this process does not have it
        spec = find_spec(package) or PathFinder.find_spec(package, [os.getcwd()])
    except (ImportError, ValueError):
        spec = None
    if spec is None:  # the job reports that it does not exist
        return
    for folder in spec.submodule_search_locations or ():
        yield from sorted(Path(folder).rglob("*.py"))
    if spec.origin is not None and Path(spec.origin).suffix == ".py":
        yield Path(spec.origin)


@cache
def describe_hardware() -> dict[str, Any]:
    """Return processor and GPUs, as known without torch."""
    files = NVIDIA_GPUS.glob("*/information")
    gpus = sorted(file.read_text(errors="replace").split("IRQ")[0] for file in files)
    visible = {k: os.environ[k] for k in sorted(os.environ) if k.endswith("_VISIBLE_DEVICES")}
    return {"cpu": cpu_name(), "system": platform.machine(), "gpus": gpus, "visible": visible}


@cache
def file_stamp(path: Path, max_entries: int | None = None) -> str:
    """Return a sha256 of names, sizes and times of a file or folder; about 5 µs per file.

    The outputs of runs and caches of modules do not count. "" for more than `max_entries`.
    """
    sha256, files, outputs = hashlib.sha256(), [path], os.path.abspath("outputs")
    if path.is_dir():
        files, entries = [], 0
        for folder, folders, names in os.walk(path):
            entries += len(folders) + len(names)
            if max_entries is not None and entries > max_entries:
                return ""
            paths = {name: os.path.abspath(os.path.join(folder, name)) for name in folders}
            folders[:] = [x for x in folders if x != "__pycache__" and paths[x] != outputs]
            files += [Path(folder, name) for name in names]
    for file in sorted(files):
        with suppress(OSError):
            status = file.stat()
            entry = f"{os.path.relpath(file, path)}\0{status.st_size}\0{status.st_mtime_ns}\0"
            sha256.update(entry.encode("utf-8", "surrogatepass"))
    return sha256.hexdigest()


def _checkpoint_stamp(source: str | None) -> str:
    """Return the stamp of the checkpoints or file of a run or of weights; "" if none."""
    if source in (None, "none", "auto"):
        return ""
    path = Path(os.path.expanduser(str(source)))
    if path.is_file() and path.name in ("last", "best"):  # on file systems without links
        path = path.parent
    inner = path / "checkpoints"
    return file_stamp(inner if inner.is_dir() else path)
