"""List and remove old runs, checkpoints and caches: `python -m runner.report --clean [PATH…]`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from runner.core.checkpoint.folder import FOLDER as CHECKPOINTS
from runner.core.checkpoint.lock import NAME as LOCK
from runner.core.checkpoint.lock import is_locked
from runner.core.errors import StorageError, UsageError
from runner.core.format import join_names, short_path, size
from runner.core.record.hydra_files import (
    CONFIG,
    SWEEP,
    read_flat_config,
    read_start_folder,
    read_yaml,
)
from runner.core.record.hydra_files import FOLDER as HYDRA
from runner.core.record.storage import METRICS, remove_file, remove_folder, user_cache
from runner.core.record.summary import SUMMARY_FILE

OUTPUTS = "outputs"
SETTLE_S = 1.0  # until a config that cannot be read is looked at again
MARKS = (SUMMARY_FILE, METRICS, HYDRA, CHECKPOINTS, SWEEP, "sweep.json", "benchmark.json")
"""Names of which one is in the folder of each run, sweep, benchmark or prediction."""
REFERENCES = ("checkpoint.resume", "model.weights")


@dataclass(frozen=True)
class Entry:
    """What can be removed as a whole, with its size on disk."""

    path: Path
    bytes: int
    checkpoint_bytes: int
    changed: float  # seconds since the epoch, of the newest file
    note: str = ""


def list_entries() -> list[Entry]:
    """Return the runs and sweeps below `outputs` and the folders of the cache, largest first."""
    outputs, references = Path(OUTPUTS), find_references()
    entries: list[Entry] = []
    for folder in find_folders(outputs):
        note, own = "running" if is_running(folder) else "", folder.absolute()
        users = [x for x, used in references if overlaps(folder, used) and not _lies_in(x, own)]
        if users:
            note = f"used by {join_names(dict.fromkeys(map(short_path, users)))}"
        entries.append(_measure(folder, note))
    if (cache := user_cache(os.environ)) is not None and cache.is_dir():
        entries += [_measure(path, "cache, made again") for path in sorted(cache.iterdir())]
    return sorted(entries, key=lambda entry: -entry.bytes)


def remove(paths: Sequence[Path]) -> list[Entry]:
    """Remove files or folders, all or none, and return them.

    Only runs below outputs/ are seen as users. Raises UsageError for what is outside outputs/ and
    the cache, a link, of a running process, or used by another run, and if a run's config cannot
    be read; StorageError if removing fails.
    """
    targets = list(dict.fromkeys(path.absolute() for path in paths))
    references, removed = find_references(), list[Entry]()
    _check_configs(targets)
    for target in targets:
        _check(target)
    _check_users(targets, references)
    for target in targets:
        if not target.exists():  # in another one of them
            continue
        removed.append(_measure(target, ""))
        try:
            (remove_folder if target.is_dir() else remove_file)(target)
        except OSError as error:
            raise StorageError(f"{target}: not removed: {error.strerror or error}") from error
    return removed


def find_folders(root: Path) -> Iterator[Path]:
    """Yield the topmost folders at or below `root` that have one of `MARKS`; links are left out."""
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return
    if root.name != OUTPUTS and any(mark in names for mark in MARKS):
        yield root
        return
    for name in names:
        if (path := root / name).is_dir() and not path.is_symlink():
            yield from find_folders(path)


def find_references() -> list[tuple[Path, Path]]:
    """Return (run, path that it names in one of `REFERENCES`) of all runs below `outputs`."""
    found: list[tuple[Path, Path]] = []
    for folder, names, _ in os.walk(OUTPUTS):
        if HYDRA not in names:
            continue
        run = Path(folder)
        config, start = read_flat_config(run), read_start_folder(run) or Path()
        for key in REFERENCES:
            value = config.get(key)
            if isinstance(value, str) and value not in ("none", "auto", ""):
                used = start / os.path.expanduser(value)
                # the folder of the start may have been moved to here since
                moved = used.relative_to(start) if used.is_relative_to(start) else used
                for path in dict.fromkeys((used.resolve(), moved.resolve())):
                    found.append((run.absolute(), path))
    return sorted(found)


def is_running(folder: Path) -> bool:
    """Whether a process has locked the folder, or one in it."""
    return any(LOCK in files and is_locked(Path(path)) for path, _, files in os.walk(folder))


def overlaps(path: Path, used: Path) -> bool:
    """Whether one of both lies in the other."""
    own = path.resolve()
    return own == used or own in used.parents or used in own.parents


def _lies_in(path: Path, folder: Path) -> bool:
    return folder in (path, *path.parents)


def _check_configs(targets: list[Path]) -> None:
    """Raise UsageError for a config that cannot be read, unless its run is to be removed."""
    for folder, names, _ in os.walk(OUTPUTS):
        run = Path(folder).absolute()
        if HYDRA not in names or any(_lies_in(run, target) for target in targets):
            continue
        if not os.path.lexists(path := run / CONFIG):
            continue
        if problem := _config_problem(path):
            time.sleep(SETTLE_S)  # a run that starts is writing it, or one that failed removes it
            problem = _config_problem(path) if os.path.lexists(path) else ""
        if problem:
            problem += ", so the checkpoints that its run uses are unknown"
            raise UsageError(f"--clean: {problem}; correct it, or remove its run, too")


def _config_problem(path: Path) -> str:
    try:
        return "" if isinstance(read_yaml(path), dict) else f"{path}: not a config"
    except StorageError as error:
        return str(error)


def _check(target: Path) -> None:
    real = Path(os.path.realpath(target))  # also of a link to itself
    outputs, cache = Path(OUTPUTS).resolve(), user_cache(os.environ)
    in_cache = cache is not None and cache.resolve() in (real, *real.parents)
    problem = ""
    if not os.path.lexists(target):
        problem = "does not exist"
    elif target.is_symlink():
        problem = "is a link; name the folder that it leads to"
    elif real == outputs:
        problem = "is all outputs; name folders in it"
    elif outputs not in real.parents and not in_cache:
        problem = f"is outside {outputs}; remove it yourself, or start in its folder"
    elif ".." in target.parts:
        problem = "contains ..; name the folder itself"
    elif is_running(target) or any(is_locked(folder) for folder in real.parents):
        problem = "is in use by a running process; stop it first"
    if problem:
        raise UsageError(f"--clean: {target} {problem}")


def _check_users(targets: list[Path], references: list[tuple[Path, Path]]) -> None:
    """Raise UsageError with all runs that use the targets, and with the users of those."""
    going = list(targets)
    for folder in going:  # grows by the users
        own = folder.resolve()
        for user, used in references:
            stays = not any(_lies_in(user, other) for other in going)
            if stays and overlaps(folder, used) and user.resolve() not in (own, *own.parents):
                going.append(user)
    if users := going[len(targets) :]:
        names = join_names(map(short_path, users), len(users))
        verb = "is" if len(targets) == 1 else "are"
        problem = f"{join_names(map(str, targets), len(targets))} {verb} used by {names}"
        raise UsageError(f"--clean: {problem} ({' and '.join(REFERENCES)}); remove all at once")


def _measure(path: Path, note: str) -> Entry:
    total, checkpoints, newest, seen = 0, 0, 0.0, set[tuple[int, int]]()
    walked = [(str(path.parent), [], [path.name])] if path.is_file() else os.walk(path)
    for folder, _, names in walked:
        for name in names:
            try:
                found = os.lstat(os.path.join(folder, name))
            except OSError:  # it has gone
                continue
            newest = max(newest, found.st_mtime)
            if (found.st_dev, found.st_ino) in seen:  # a hard link
                continue
            seen.add((found.st_dev, found.st_ino))
            taken = found.st_blocks * 512
            total += taken
            checkpoints += taken if CHECKPOINTS in Path(folder).parts else 0
    return Entry(path, total, checkpoints, newest, note)


def entry_lines(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a heading and one line for each entry, with its whole path."""
    form = "{:>9}  {:>11}  {:<16}  {}"
    yield form.format("size", "checkpoints", "last changed", "folder")
    for entry in entries:
        day = datetime.fromtimestamp(entry.changed).strftime("%Y-%m-%d %H:%M")
        checkpoints = size(entry.checkpoint_bytes) if entry.checkpoint_bytes else ""
        path = short_path(entry.path) + (f"  ({entry.note})" if entry.note else "")
        yield form.format(size(entry.bytes), checkpoints, day, path)
