"""Whose folder it is: only a run's own resume continues or replaces the record in its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import count
from pathlib import Path

from runner.core.errors import UsageError
from runner.core.record.hydra_files import FOLDER, RESUMED
from runner.core.record.storage import (
    OLD_PREFIX,
    link_refusal,
    make_folder,
    read_record,
    remove_file,
    rename,
)

ARCHIVE = ".earlier"  # hidden, so that nothing in it is taken for a run
NOT_FINITE = "the weights are not finite"  # how the reason of a run begins that ended with them
CHECKPOINTS = "checkpoints"
RECORD = ("summary.json", "metrics.jsonl")
OTHER_FILES = ("report.md", "curves.svg", "provenance.json", "history.json", "debug")
EVENT_FILES = "events.out.tfevents.*"

_checked: ContextVar[bool] = ContextVar("runner.folder_checked", default=False)


@contextmanager
def folder_is_checked() -> Iterator[None]:
    """While entered, `check_folder` refuses only checkpoints: the command line has checked it."""
    token = _checked.set(True)
    try:
        yield
    finally:
        _checked.reset(token)


def has_checkpoints(folder: Path) -> bool:
    """Whether a run can resume from the folder."""
    return any(any(folder.glob(f"checkpoints/{old}step_*")) for old in ("", OLD_PREFIX))


def check_no_record(folder: Path, fix: str = "", key: str = "hydra.run.dir") -> None:
    """Raise UsageError if the folder, named by `key`, holds the record of a run."""
    names = [name for name in RECORD if (folder / name).exists()]
    if has_checkpoints(folder):
        names = ["checkpoints"]
    if names:
        what = f"the {' and '.join(names)} of another run"
        raise UsageError(f"{folder} has {what}; use another {key}{fix}")


def check_folder(folder: Path, resume: str, trains: bool, restarted: bool = False) -> None:
    """Raise UsageError if `folder` holds a record and this is not that run's own resume.

    `resume` is `checkpoint.resume`. A `restarted` run may have left a record without checkpoints.
    """
    if trains and is_own_resume(folder, resume):
        return
    if (restarted or _checked.get()) and not (resume == "none" and has_checkpoints(folder)):
        return
    fix = ", or leave it out"
    if trains and resume == "none":
        fix = ", or continue that run: checkpoint.resume=auto"
        fix += ", with a larger training.steps if it has ended" if has_checkpoints(folder) else ""
    elif trains and has_checkpoints(folder):
        fix = f", or continue that run: checkpoint.resume={folder}"
    check_no_record(folder, fix)


def is_own_resume(folder: Path, resume: str) -> bool:
    """Whether a training with this `checkpoint.resume` continues the run in `folder`."""
    if resume in ("none", "auto"):
        return resume == "auto"
    path = Path(resume).expanduser().resolve()  # a run, its checkpoints or one of them
    return folder.resolve() in (path, *path.parents[:2])


def has_lost_weights(folder: Path) -> bool:
    """Whether an unguarded run ended here with non-finite weights: no checkpoint is of use."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        summary = json.loads(read_record(folder / RECORD[0]))
        return summary["ended_by"] == "policy" and str(summary["reason"]).startswith(NOT_FINITE)
    return False


def archive_record(folder: Path) -> None:
    """Move a record without useful checkpoints to the archive; event files, shown as runs, go."""
    useless = [CHECKPOINTS] if has_lost_weights(folder) else []
    has_others = has_checkpoints(folder) and not useless
    if has_others or not any((folder / name).exists() for name in RECORD):
        return
    archive = folder / ARCHIVE
    if archive.is_symlink():
        raise link_refusal(archive)
    target = next(p for number in count(1) if not os.path.lexists(p := archive / f"run-{number}"))
    make_folder(target)
    # the new config is still beside the recorded one
    recorded = [FOLDER] if (folder / RESUMED).is_dir() else []
    for name in (*useless, *RECORD, *OTHER_FILES, *recorded):
        if (folder / name).exists():
            rename(folder / name, target / name)
    for file in folder.glob(EVENT_FILES):
        remove_file(file)
