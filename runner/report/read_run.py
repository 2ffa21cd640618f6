"""A run's folder as a row. It may be damaged, another user's, or from anywhere: the row says so."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.checkpoint.lock import is_locked
from runner.errors import StorageError
from runner.record import hydra_files
from runner.record.hydra_files import read_flat_config
from runner.record.storage import read_record
from runner.report import row_fields
from runner.report.comparison import Row
from runner.report.naming import keys
from runner.training.summary import FILE as SUMMARY
from runner.training.summary import Summary

ENDS = ("done", "stopped", "interrupted", "failed", "killed", "timeout", "oom", "skipped")
"""What the status of a row can be, beside `running`."""
DEEPEST = 50  # lists in lists of a record; ours are of five
TROUBLE = (OSError, ValueError, AttributeError, RecursionError)
"""What reading a folder that nobody has vetted may raise."""


def is_run(folder: Path) -> bool:
    """Whether it is one that trains or evaluates: other jobs leave no summary, nor need to.

    Another user's may be one: its row says that it cannot be read.
    """
    try:
        if (folder / SUMMARY).exists():
            return True
        begun = (folder / hydra_files.OVERRIDES).exists()
    except PermissionError:
        return True
    return begun and keys(overrides_in(folder)).get("job", "train") in ("train", "evaluate")


def of_job(number: int, job: dict[str, Any], sweep: Path) -> Row:
    """A job as its sweep tells of it, with what its run says."""
    listed = job.get("overrides")
    typed = [str(item) for item in listed] if isinstance(listed, list) else None
    folder = sweep / (row_fields.text(job, "folder") or str(number))
    return _guarded(folder, typed, lambda: _of_job(folder, job, typed, is_locked(sweep)))


def of_run(folder: Path) -> Row:
    """A run's folder; one whose record is missing or damaged says so."""
    return _guarded(folder, None, lambda: _of_run(folder, None))


def _guarded(folder: Path, typed: list[str] | None, make: Callable[[], Row]) -> Row:
    try:
        return make()
    except TROUBLE as error:
        told = error.strerror if isinstance(error, OSError) else str(error)
        reason = f"its folder cannot be read: {told or type(error).__name__}"
        return Row(typed or [], "failed", reason, folder=_place(folder), command=command(typed))


def _place(folder: Path) -> str:
    """The folder, where it is one that can be."""
    try:
        return str(folder) if folder.exists() else ""
    except PermissionError:
        return str(folder)
    except (OSError, ValueError):  # no such name
        return ""


def _of_job(folder: Path, job: dict[str, Any], typed: list[str] | None, going_on: bool) -> Row:
    named = row_fields.text(job, "folder")
    if "\0" in named or ".." in Path(named).parts or Path(named).is_absolute():
        raise ValueError("it cannot be in the sweep's")
    status, reason = row_fields.text(job, "status"), row_fields.text(job, "reason")
    if status == "running" and not going_on:
        status, reason = "killed", "the sweep ended before it did"
    elif status == "waiting":
        status, reason = "skipped", "its turn has not come yet" if going_on else "never begun"
    elif status not in ("", "running", *ENDS):
        status, reason = "failed", f"no status that a job can have: {status}"
    if not is_run(folder):
        row = Row(typed or [], status or "skipped", reason or "never begun", folder=str(folder))
        return replace(row, command=command(typed))
    row = _of_run(folder, typed)
    if row.finished and status == "killed":  # its end was not noted any more
        return row
    if status and status not in ("running", row.status):
        row = replace(row, status=status, reason=reason or row.reason)
    return row


def _of_run(folder: Path, typed: list[str] | None) -> Row:
    overrides = overrides_in(folder) if typed is None else typed
    row = Row(overrides, "failed", folder=str(folder), command=command(overrides))
    if not (folder / SUMMARY).exists():
        if is_locked(folder):
            return replace(row, status="running", reason="it has not come to a summary yet")
        return replace(row, status="killed", reason=f"no {SUMMARY}: it ended before it wrote one")
    try:
        Summary.read(folder)  # says what is wrong with it
    except StorageError as error:
        return replace(row, reason=str(error).replace(str(folder) + "/", ""))
    raw = read_json(folder / SUMMARY)
    if not isinstance(raw, dict):
        return replace(row, reason=f"{SUMMARY}: nested too deeply")
    status, reason = row_fields.text(raw, "status") or "failed", row_fields.text(raw, "reason")
    if status == "running" and not is_locked(folder):
        steps = row_fields.number(raw, "steps") or 0
        status, reason = "killed", f"its process is gone; its last record is of step {steps:,.0f}"
    return replace(
        row,
        status=status,
        reason=reason,
        summary=raw,
        command=row_fields.text(raw, "command") or row.command,
        judged_on=_judged_on(
            read_flat_config(folder) or keys(overrides), row_fields.text(raw, "monitor")
        ),
    )


def _judged_on(settings: Mapping[str, Any], monitor: str) -> str:
    """What is the same for runs whose monitored metrics can be held against each other."""

    def of(group: str, *names: str) -> list[str]:
        found = [settings.get(f"{group}._target_") or settings.get(f"{group}.kind")]
        found = found if found[0] else [settings.get(group)]
        found += [settings.get(f"{group}.{name}") for name in names]
        return [str(value) for value in found if value is not None]

    parts = of("data", "path", "target")
    if monitor == "val/loss":  # a metric is the same by whatever loss it came to be
        parts += [f"with {' '.join(own)}" for own in [of("objective")] if own not in ([], ["auto"])]
    return " ".join(parts)


def refused(row: Row) -> bool:
    """Whether it ended while the run was put together: nothing was trained."""
    said = row.summary
    return said.get("status") == "failed" and said.get("steps") == 0 and not said.get("config_hash")


def overrides_in(folder: Path) -> list[str]:
    """What was typed for the run; [] where that cannot be had."""
    try:
        return hydra_files.read_overrides(folder)
    except StorageError:
        return []


def command(overrides: Sequence[str] | None) -> str:
    """What does the same by itself."""
    return shlex.join(["python", "-m", "runner", *(overrides or [])])


def read_json(path: Path) -> Any:
    """The values in a record; None where it is damaged, or deeper than any of ours."""
    try:
        found = json.loads(read_record(path))
    except (OSError, ValueError, RecursionError):
        return None
    return found if _within(found, DEEPEST) else None


def _within(value: Any, levels: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_within(item, levels - 1) for item in inside)
