"""A run's folder as a row. It may be damaged, another user's, or from anywhere: the row says so."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.checkpoint.lock import is_locked
from runner.data.config import LOADING
from runner.errors import StorageError
from runner.record.hydra_files import (
    OVERRIDES,
    overrides_by_key,
    read_flat_config,
    recorded_overrides,
)
from runner.record.storage import read_record
from runner.report.comparison import Row, number, text
from runner.training.summary import FILE as SUMMARY
from runner.training.summary import Summary

ENDS = ("done", "stopped", "interrupted", "failed", "killed", "timeout", "oom", "skipped")
"""What the status of a row can be, beside `running`."""
DEEPEST = 50  # lists in lists of a record; ours are of five
TROUBLE = (OSError, ValueError, AttributeError, RecursionError)
"""What reading an untrusted folder may raise."""


def is_run(folder: Path) -> bool:
    """Whether it is one that trains or evaluates: other jobs leave no summary, nor need to.

    Another user's may be one: its row says that it cannot be read.
    """
    try:
        if (folder / SUMMARY).exists():
            return True
        begun = (folder / OVERRIDES).exists()
    except PermissionError:
        return True
    typed = overrides_by_key(recorded_overrides(folder)) if begun else {"job": "none"}
    return typed.get("job", "train") in ("train", "evaluate")


def of_job(index: int, job: dict[str, Any], sweep: Path) -> Row:
    """A job as its sweep tells of it, with what its run says."""
    listed = job.get("overrides")
    typed = [str(item) for item in listed] if isinstance(listed, list) else []
    name = text(job, "folder") or str(index)
    return _guarded(sweep / name, typed, lambda: _of_job(sweep, name, job, typed))


def of_run(folder: Path) -> Row:
    """A run's folder; one whose record is missing or damaged says so."""
    typed = recorded_overrides(folder)
    return _guarded(folder, typed, lambda: _of_run(folder, typed))


def _guarded(folder: Path, typed: list[str], make: Callable[[], Row]) -> Row:
    try:
        return make()
    except TROUBLE as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        reason = f"its folder cannot be read: {why or type(error).__name__}"
        place = str(folder) if isinstance(error, PermissionError) else ""
        return Row(typed, "failed", reason, folder=place, command=_command(typed))


def _of_job(sweep: Path, name: str, job: dict[str, Any], typed: list[str]) -> Row:
    if "\0" in name or ".." in Path(name).parts or Path(name).is_absolute():
        raise ValueError("it cannot be in the sweep's")
    status, reason, running = text(job, "status"), text(job, "reason"), is_locked(sweep)
    if status == "running" and not running:
        status, reason = "killed", "the sweep ended before it did"
    elif status == "waiting":
        status, reason = "skipped", "its turn has not come yet" if running else "never begun"
    elif status not in ("", "running", *ENDS):
        status, reason = "failed", f"no status that a job can have: {status}"
    folder = sweep / name
    if not is_run(folder):
        row = Row(typed, status or "skipped", reason or "never begun", folder=str(folder))
        return replace(row, command=_command(typed))
    row = _of_run(folder, typed)
    if row.finished and status == "killed":  # the sweep ended before it could note the job's end
        return row
    if status and status not in ("running", row.status):
        row = replace(row, status=status, reason=reason or row.reason)
    return row


def _of_run(folder: Path, typed: list[str]) -> Row:
    row = Row(typed, "failed", folder=str(folder), command=_command(typed))
    if not (folder / SUMMARY).exists():
        if is_locked(folder):
            return replace(row, status="running", reason="it has not come to a summary yet")
        return replace(row, status="killed", reason=f"no {SUMMARY}: it ended before it wrote one")
    try:
        Summary.read(folder)  # says what is wrong with it
    except StorageError as error:
        return replace(row, reason=str(error).replace(str(folder) + "/", ""))
    summary = read_json(folder / SUMMARY)
    if not isinstance(summary, dict):
        return replace(row, reason=f"{SUMMARY}: nested too deeply")
    status, reason = text(summary, "status") or "failed", text(summary, "reason")
    if status == "running" and not is_locked(folder):
        steps = number(summary, "steps") or 0
        status, reason = "killed", f"its process is gone; its last record is of step {steps:,.0f}"
    settings = read_flat_config(folder) or {
        "data.name": text(summary, "name"),
        **overrides_by_key(typed),
    }
    return replace(
        row,
        status=status,
        reason=reason,
        summary=summary,
        command=text(summary, "command") or row.command,
        judged_on=_judged_on(settings, text(summary, "monitor")),
        work=_work(settings, summary),
    )


def _judged_on(settings: Mapping[str, Any], monitor: str) -> str:
    """What is the same for runs whose monitored metrics can be compared."""

    def chosen(group: str) -> Any:
        named = (settings.get(f"{group}.{key}") for key in ("_target_", "kind"))
        return next(filter(None, named), None) or settings.get(group)

    parts = [chosen("data"), settings.get("data.path"), settings.get("data.target")]
    objective = chosen("objective"), settings.get("objective.loss")
    named = [name for name in objective if name not in (None, "auto")]
    if monitor == "val/loss" and named:  # the loss depends on it
        parts += ["with", *named]
    return " ".join(str(part) for part in parts if part)


def _work(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """What there was to compute: samples of something else take another time."""
    device = text(summary, "device", "kind"), text(summary, "device", "name")
    parts = {
        key: str(value)
        for key, value in sorted(settings.items())
        if key.partition(".")[0] in ("data", "model") and key.removeprefix("data.") not in LOADING
    }
    return f"{device} {parts}"


def _command(overrides: Sequence[str]) -> str:
    return shlex.join(["python", "-m", "runner", *overrides])


def read_json(path: Path) -> Any:
    """The values in a record; None where it is damaged, or deeper than any of ours."""
    try:
        tree = json.loads(read_record(path))
    except (OSError, ValueError, RecursionError):
        return None
    return tree if _is_shallow(tree, DEEPEST) else None


def _is_shallow(value: Any, levels: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(item, levels - 1) for item in inside)
