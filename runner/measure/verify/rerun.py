"""Verify that a recorded run is reproducible: train its config again and compare."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from runner.core.checkpoint.manifest import MODEL, PREPROCESSING, read_manifest, shard_names
from runner.core.config.run_config import RunConfig
from runner.core.errors import CheckpointError, ConfigError, StorageError
from runner.core.record.digests import CHANGED_FIX, DataFiles, change_problem
from runner.core.record.storage import read_record
from runner.core.record.summary import Summary
from runner.core.record.text import shorten
from runner.core.schemas.data import LOADING_KEYS, DataChanged
from runner.measure.verify.end_state import differing_keys, read_metrics, saved_steps
from runner.measure.verify.processes import RunProbe, train_in_processes, without_monitoring

log = logging.getLogger("runner")

CHANGE_KINDS = "config data technique choice threads cpu device version code".split()
"""Kinds of changes, most likely cause first."""
UNEXPLAINED = (
    "no recorded fact differs: nondeterministic steps "
    "(try device.deterministic=true), or changed user code"
)

SAME_STEPS = ("checkpoint", "debug", "device", "monitoring")
"""Groups of keys that may change while a run is continued, without other results."""


@dataclass(frozen=True)
class RerunEquality:
    """The comparison of a recorded run with a repetition."""

    run: str
    steps: int
    compared: dict[str, int]
    differing: list[str]  # in order of steps
    was: str = ""  # first differing value, as recorded
    now: str = ""
    changes: list[str] = field(default_factory=list)  # since then, in data, versions, …
    cause: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether every number is equal."""
        return not self.differing


def verify_rerun(config: RunConfig, folder: Path, config_hash: str) -> RerunEquality:
    """Repeat the run that `checkpoint.resume` names, in new processes.

    A run that ended early is repeated up to its last step. Raises CheckpointError if it has no
    record or no steps.
    """
    recorded = find_run(Path(config.checkpoint.resume))
    summary = Summary.read(recorded)
    if not summary.steps:
        raise CheckpointError(f"{recorded}: the run has no steps to compare")
    _check_data(recorded, config)
    repeat_config = deepcopy(without_monitoring(config))
    repeat_config.checkpoint.resume, repeat_config.checkpoint.enabled = "none", True
    with TemporaryDirectory(dir=folder, prefix="verify-") as temporary:
        probe = RunProbe(stop_at=0 if summary.status == "done" else summary.steps)
        purpose = f"{recorded}, {summary.steps:,} steps, trained again"
        train_in_processes(repeat_config, Path(temporary), probe, purpose=purpose)
        return compare_runs(recorded, Path(temporary), summary, config_hash)


def _describe_continuation(run: Path) -> str:
    """Return how the run was continued with keys that may change its steps, or forked, or ""."""
    starts: list[tuple[int, list[str]]] = []
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        sessions = json.loads(read_record(run / "provenance.json"))["sessions"]
        starts = [(s.get("step", 0), s.get("changed_keys", [])) for s in sessions]
    for step, texts in starts:
        if step and (changed := [*filter(_changes_steps, texts)]):
            return f"at step {step:,} with {', '.join(changed)}"
    first = starts[0][0] if starts else 0
    is_fork = first and all(key.step > first for key in read_metrics(run))
    return f"from step {first:,} of another run" if is_fork else ""


def _changes_steps(changed: str) -> bool:
    group, _, name = changed.partition("=")[0].partition(".")
    return group not in SAME_STEPS and not (group == "data" and name in LOADING_KEYS)


def _check_data(run: Path, config: RunConfig) -> None:
    """Raise ConfigError if the run's data have changed, unless `data.changed` is accept.

    Other paths than those of the run are taken as meant.
    """
    facts, files = dict(_read_facts(run)), DataFiles(config.data)
    then = facts.get("data sha256")
    accepts = getattr(config.data, "changed", None) is DataChanged.accept
    if then is None or accepts or not files.paths or then == files.digest["sha256"]:
        return
    if (earlier := _trained_paths(run)) and earlier != files.paths:
        log.warning("the run was trained on %s, and is repeated on %s", earlier, files.paths)
        return
    problem = change_problem(files, "the run was trained on it", then)
    raise ConfigError("data.path", problem, CHANGED_FIX)


def _trained_paths(run: Path) -> dict[str, str]:
    """Return the files that a run was trained on, by config key; {} if its record lacks them."""
    with suppress(OSError, StorageError, ValueError, LookupError, TypeError):
        checkpoint = [*saved_steps(run).values()][-1]
        return dict(json.loads(read_record(checkpoint / PREPROCESSING))["files"]["paths"])
    return {}


def compare_runs(
    recorded: Path, repeated: Path, summary: Summary, config_hash: str
) -> RerunEquality:
    """Compare the metrics of both, and the weights of their last common checkpoint."""
    metrics, new_metrics = read_metrics(recorded), read_metrics(repeated)
    if summary.status != "done":  # it may have ended before a validation
        new_metrics = {key: value for key, value in new_metrics.items() if key in metrics}
    keys, notes = differing_keys(metrics, new_metrics), list[str]()
    names, was, now = [str(key) for key in keys], "", ""
    if keys:
        both = metrics, new_metrics
        was, now = (repr(v[keys[0]]) if keys[0] in v else "missing" for v in both)
    digests, new_digests = _digests(recorded), _digests(repeated)
    step = max(digests.keys() & new_digests.keys(), default=None)
    if step is None:
        notes.append("weights are not compared: no checkpoints of the same step")
    elif digests[step] != new_digests[step]:
        names.append(f"weights at step {step}")
        was, now = was or digests[step], now or new_digests[step]
    then, today = dict(_read_facts(recorded)), dict(_read_facts(repeated))
    changed = [key for key in then if key in today and then[key] != today[key]]
    changed.sort(key=lambda key: CHANGE_KINDS.index(key.partition(" ")[0]))
    values = ((key, shorten(str(then[key]), 80), shorten(str(today[key]), 80)) for key in changed)
    changes = [f"{key}: was {old}, now {new}" for key, old, new in values]
    if config_hash != summary.config_hash:
        changes.insert(0, "config: changed by typed overrides or by this version's defaults")
    if continuation := _describe_continuation(recorded):
        changes.insert(0, f"continued {continuation}, which one command may not repeat")
    if not any(key.startswith("data") for key in then):
        notes.append("the run has no digest of its data: changed data would not be detected")
    counts = {"metric": len(metrics), "weights": int(step is not None)}
    cause = (changes or [UNEXPLAINED])[0] if names else ""
    found = counts, names, was, now, changes, cause, notes
    return RerunEquality(str(recorded), summary.steps, *found)


def find_run(path: Path) -> Path:
    """Return the folder of the named run, or of the run with the named checkpoint."""
    for folder in (path, *path.resolve().parents[:2]):
        if (folder / "summary.json").is_file() and (folder / "metrics.jsonl").is_file():
            return folder
    raise CheckpointError(f"checkpoint.resume: {path} has no summary.json and metrics.jsonl")


def _digests(run: Path) -> dict[int, str]:
    digests = {}
    for step, path in saved_steps(run).items():
        with suppress(CheckpointError):
            files = read_manifest(path).files
            digests[step] = " ".join(files[x].sha256 for x in shard_names(files) or [MODEL])
    return digests


def _read_facts(run: Path) -> Iterator[tuple[str, Any]]:
    with suppress(StorageError):
        summary = Summary.read(run)
        yield "device", summary.device.get("name")
        yield from ((f"version {name}", v) for name, v in summary.versions.items())
        for row in summary.techniques:
            yield f"technique {row.name}", "engaged" if row.engaged else "not engaged"
    with suppress(OSError, ValueError, LookupError, TypeError):
        session = json.loads(read_record(run / "provenance.json"))["sessions"][0]
        yield "code", (session["git"] or {}).get("commit")
        for part in ("sha256", "files", "bytes"):
            yield f"data {part}", session["data"][part]
    with suppress(CheckpointError, IndexError):
        manifest = read_manifest([*saved_steps(run).values()][-1])
        yield from (("threads", manifest.threads), ("cpu", manifest.cpu))
        yield from ((f"choice {key}", value) for key, value in manifest.choices.items())
