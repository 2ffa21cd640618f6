"""Find the run of `checkpoint.resume`, and merge its recorded overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.errors import CheckpointError, ConfigError, StorageError
from runner.format import nearest
from runner.overrides.groups import ALIASES, FOREIGN, default_options, options
from runner.overrides.spelling import EXCLUSIVE, CliOverride, parse_override, with_argument_keys
from runner.record import hydra_files

KEY = "checkpoint.resume"
WORDS = ("none", "auto", "None")
STEP = re.compile(r"step_\d+|last|best")
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Resumed:
    """Overrides of the continued run, and its folder if it continues in place."""

    overrides: list[str]
    folder: Path | None = None
    run: Path | None = None  # the named run, also if it continues elsewhere


def with_recorded(overrides: Sequence[str], sweeps: bool) -> Resumed:
    """Prepend the recorded overrides of the run that `checkpoint.resume` names, if it names one.

    The run continues in its own folder, unless it is evaluated, swept over, or hydra.run.dir is
    typed. Raises CheckpointError for a path that is not a run.
    """
    typed = [parse_override(text) for text in overrides]
    resumes = [o for o in typed if o.key == KEY and o.sign != "~"]
    paths = [Path(name) for name in _names(resumes[-1]) if name not in WORDS] if resumes else []
    if not paths:
        return Resumed(list(overrides))
    runs = [_run_of(path) for path in paths]
    recorded = [_recorded_overrides(run) for run in runs]
    if any(other != recorded[0] for other in recorded[1:]):
        raise ConfigError(KEY, "names runs of different configs", "name one run at a time")
    merged = [*_kept(recorded[0], typed), *overrides]
    keys = {o.key: o.value for o in map(parse_override, merged)}
    elsewhere = sweeps or keys.get("job", "train") != "train" or "hydra.run.dir" in keys
    return Resumed(merged, None if elsewhere else runs[0], runs[0])


def _names(override: CliOverride) -> list[str]:
    swept = override.parsed.is_sweep_override()
    names = [text.strip("'\"") for text in override.values()] if swept else []
    names = names or [str(override.parsed.value())]
    if not all(names):
        raise ConfigError(KEY, "is empty", "name the folder of a run, or auto")
    return names


def _run_of(path: Path) -> Path | None:
    """Return the run's folder that `path` is, or is in; None for a checkpoint outside a run."""
    if not path.is_dir():
        near = nearest(path.name, (folder.name for folder in path.parent.glob("*/")))
        fix = f"; did you mean {path.with_name(near)}?" if near else ""
        if path.exists():
            fix = f"; to start from weights in a file: model.weights={path}"
        raise CheckpointError(f"{KEY}: there is no folder {path} (looked from {Path.cwd()}){fix}")
    folder = path
    for pattern in (STEP, re.compile(CHECKPOINTS)):
        if pattern.fullmatch(folder.name):
            folder = folder.absolute().parent if folder.parent == Path() else folder.parent
    if (folder / CHECKPOINTS).is_dir():
        return folder
    if STEP.fullmatch(path.name):
        return None
    evaluated = [o.value for o in map(parse_override, _recorded_overrides(path)) if o.key == KEY]
    if evaluated:
        run = evaluated[-1]
        raise CheckpointError(f"{KEY}: {path} is an evaluation of {run}; use {KEY}={run}")
    runs = [p.parent for p in path.glob(f"*/{CHECKPOINTS}") if p.is_dir()]
    newest = max(runs, key=lambda run: run.stat().st_mtime_ns, default=None)
    also = f"the newest in it is {newest}" if newest else f"it has no {CHECKPOINTS}"
    raise CheckpointError(f"{KEY}: {path} is not a training run's folder; {also}")


def _recorded_overrides(run: Path | None) -> list[str]:
    """Return the overrides with which a run was started, as Hydra recorded them."""
    if run is None or not (run / hydra_files.OVERRIDES).is_file():
        return []
    try:
        return hydra_files.read_overrides(run)
    except StorageError as error:
        raise CheckpointError(str(error)) from error


def _kept(recorded: Sequence[str], typed: Sequence[CliOverride]) -> list[str]:
    """Return the recorded overrides that the typed ones do not replace.

    `security` and `hydra` keys are not taken from a folder, which may come from anywhere.
    """
    now = {ALIASES.get(o.key, o.key): o.value for o in typed}
    dropped = with_argument_keys(set(now)) | {KEY}
    dropped |= {EXCLUSIVE[key] for key in dropped if key in EXCLUSIVE}
    before = {o.key: o.value for o in map(parse_override, recorded)}
    if "experiment" not in before:  # a recipe names its own options
        before = {g: o for g, o in default_options().items() if g in FOREIGN} | before
    groups = now.keys() & options().keys()
    swapped = [f"{g}." for g in groups if _part({g: now[g]} | before, g) != _part(now, g)]
    trains = now.get("job", "train") == "train" or now.get("verify.what") == "run"
    alone = () if trains else ("distributed",)  # other jobs run in one process
    prefixes = ("security", "hydra", *alone, *swapped)
    keys = [(text, parse_override(text).key) for text in recorded]
    return [text for text, key in keys if key not in dropped and not key.startswith(prefixes)]


def _part(overrides: Mapping[str, str], group: str) -> str:
    """Return what a group is set to: a user's class, or an option."""
    target = overrides.get(f"{group}._target_", "null")
    return overrides[group] if target in ("null", "") else target
