"""`checkpoint.resume`: which folder a run continues in, and what it was started with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.checkpoint.lock import is_locked
from runner.errors import CheckpointError, ConfigError, StorageError
from runner.overrides.groups import ALIASES, FOREIGN, default_options, options
from runner.overrides.spelling import EXCLUSIVE, CliOverride, parse_override, with_argument_keys
from runner.overrides.suggestions import nearest
from runner.record import hydra_files
from runner.record.hydra_files import OVERRIDES as FILE
from runner.record.storage import read_record
from runner.record.text import resume_argument

KEY = "checkpoint.resume"
WORDS = ("none", "auto")
STEP = re.compile(r"step_\d+|last|best")
CHECKPOINTS = "checkpoints"
ENDED = ("done", "stopped")


@dataclass(frozen=True)
class Resumed:
    """The overrides to go on with, and the folder to go on in, if the run continues in place."""

    overrides: list[str]
    folder: Path | None = None
    run: Path | None = None  # that is named, wherever it is gone on with


def with_recorded(overrides: Sequence[str], sweeps: bool) -> Resumed:
    """Put under the overrides those of the run that `checkpoint.resume` names, if it names one.

    The run continues in its own folder, unless it is evaluated, swept over, or told where to go.
    Raises CheckpointError for a path that is not there.
    """
    typed = [parse_override(text) for text in overrides]
    asked = [o for o in typed if o.key == KEY and o.sign != "~"]
    if not asked:
        return Resumed(list(overrides))
    names = _values(asked[-1])
    if "" in names:
        raise ConfigError(
            KEY, "is empty, as of a variable that the shell does not have",
            "name the folder of a run, or auto",
        )  # fmt: skip
    paths = [Path(name) for name in names if name not in (*WORDS, "None")]
    if not paths:
        return Resumed(list(overrides))
    for path in paths:
        _check_leads(path)
    runs = [_run_of(path) for path in paths]
    before = [_recorded(run) for run in runs]
    if any(other != before[0] for other in before[1:]):
        raise ConfigError(KEY, "names runs of different configs", "name one run at a time")
    merged = [*_under(before[0], typed), *overrides]
    keys = {o.key: o.value for o in map(parse_override, merged)}
    elsewhere = sweeps or keys.get("job", "train") != "train" or "hydra.run.dir" in keys
    return Resumed(merged, None if elsewhere else runs[0], runs[0])


def _values(typed: CliOverride) -> list[str]:
    if typed.parsed.is_sweep_override():
        if not typed.parsed.is_discrete_sweep():
            raise ConfigError(KEY, f"{typed.value} names no folder")
        return [text.strip("'\"") for text in typed.parsed.sweep_string_iterator()]
    return [str(typed.parsed.value())]


def _check_leads(path: Path) -> None:
    """It is there, and not a folder above runs; what is in it is looked at when it is loaded."""
    if not path.exists():
        if path.name == str(path) and (word := nearest(path.name, WORDS)):
            raise ConfigError(KEY, f"there is no folder {path}", f"did you mean {word}?")
        near = nearest(path.name, [p.name for p in path.parent.glob("*") if p.is_dir()])
        guess = f"; did you mean {path.with_name(near)}?" if near else ""
        raise CheckpointError(f"{KEY}: there is no folder {path} (looked from {Path.cwd()}){guess}")
    _check_job(path)
    if path.is_file() and not STEP.fullmatch(path.name):
        raise ConfigError(
            KEY, f"{path} is a file, and a run goes on from a folder with checkpoints",
            f"to start from the weights in it: model.weights={path}",
        )  # fmt: skip
    runs = [p.parent for p in path.glob(f"*/{CHECKPOINTS}") if p.is_dir()]
    if runs and _run_of(path) is None:
        newest = max(runs, key=lambda run: run.stat().st_mtime_ns)
        raise CheckpointError(f"{KEY}: {path} is no run; the newest in it is {newest}")


def _check_job(path: Path) -> None:
    """Refuse the folder of a job that trains nothing; of an evaluation, name the run to name."""
    try:
        composed = hydra_files.read_yaml(path / hydra_files.CONFIG)
        job, resumed, weights = (
            composed[group][key]
            for group, key in (("job", "kind"), ("checkpoint", "resume"), ("model", "weights"))
        )
    except (StorageError, LookupError, TypeError):  # it has other troubles, or none
        return
    if job == "train" or (path / CHECKPOINTS).exists():
        return
    named = resumed if resumed not in WORDS else None
    if job == "evaluate" and (named or weights):
        way = (
            f"name that: {resume_argument(Path(str(named)))}"
            if named
            else f"model.weights={weights} starts from it"
        )
        raise CheckpointError(f"{KEY}: {path} is an evaluation of {named or weights}; {way}")
    raise CheckpointError(f"{KEY}: {path} is of job={job}, which leaves no checkpoint")


def _run_of(path: Path) -> Path | None:
    """The run's folder that `path` is, or lies in; None for a checkpoint on its own."""
    folder = path
    if STEP.fullmatch(folder.name) and folder.absolute().parent.name == CHECKPOINTS:
        folder = folder.absolute().parent if folder.parent == Path() else folder.parent
    if folder.name == CHECKPOINTS:
        folder = folder.absolute().parent if folder.parent == Path() else folder.parent
    return folder if (folder / CHECKPOINTS).is_dir() else None


def _recorded(run: Path | None) -> list[str]:
    """The overrides a run was started with, as Hydra wrote them down."""
    if run is None or not (run / FILE).is_file():
        return []
    try:
        return hydra_files.read_overrides(run)
    except StorageError as error:
        raise CheckpointError(str(error)) from error


def _under(started: Sequence[str], user: Sequence[CliOverride]) -> list[str]:
    """The recorded overrides that the user's leave standing."""
    groups = options()
    mine = with_argument_keys({ALIASES.get(o.key, o.key) for o in user})
    gone = {EXCLUSIVE[key] for key in mine if key in EXCLUSIVE}
    now = {ALIASES.get(o.key, o.key): o.value for o in user}
    named = {group: now[group] for group in now.keys() & groups.keys()}
    before = {o.key: o.value for o in map(parse_override, started)}
    if "experiment" not in before:  # which names options of its own
        before = {g: option for g, option in default_options().items() if g in FOREIGN} | before
    swapped = [f"{g}." for g in named if _part({**named, **before}, g) != _part(now, g)]
    kept = []
    for text in started:
        key = parse_override(text).key
        # whom to trust is for the one who types to say: a folder may come from anywhere, and
        # Hydra, which records none of its own keys there, can be told to call anything
        if (
            key in mine | gone
            or key == KEY
            or key.startswith(("security", "hydra"))
            or any(key.startswith(group) for group in swapped)
        ):
            continue
        kept.append(text)
    return kept


def _part(overrides: Mapping[str, str], group: str) -> str:
    """What the group is: a class of somebody's own, or an option."""
    target = overrides.get(f"{group}._target_", "null")
    return overrides[group] if target in ("null", "") else target


def unfinished(planned: Path, config_hash: str) -> Path | None:
    """The newest run beside `planned` with that config and checkpoints, but no end and no owner."""
    found = []
    for file in planned.parent.glob("*/summary.json"):
        try:
            summary = json.loads(read_record(file))
            written = file.stat().st_mtime_ns
        except (OSError, ValueError):  # a run that is no more readable is no candidate
            continue
        same = isinstance(summary, dict) and summary.get("config_hash") == config_hash
        if same and summary.get("status") not in ENDED and (file.parent / CHECKPOINTS).is_dir():
            found.append((written, file.parent))
    newest_first = (folder for _, folder in sorted(found, reverse=True))
    return next((folder for folder in newest_first if not is_locked(folder)), None)
