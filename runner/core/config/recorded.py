"""Find the run of `checkpoint.resume`, and merge its recorded overrides."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runner.core.config import groups
from runner.core.config.aliases import find_options
from runner.core.config.groups import GROUP_ALIASES, USER_CLASS_GROUPS
from runner.core.config.spelling import EXCLUSIVE, CliOverride, parse_override, with_argument_keys
from runner.core.errors import CheckpointError, ConfigError, StorageError, UsageError
from runner.core.format import nearest
from runner.core.record import hydra_files
from runner.core.record.text import PLAIN_NAME, quote_for_hydra, value_for_hydra

RESUME_KEY = "checkpoint.resume"
SPECIAL_VALUES = ("none", "auto", "None")
STEP_FOLDER = re.compile(r"step_\d+|last|best")
CHECKPOINTS = "checkpoints"
PATH_KEYS = (
    *("data.path", "data.validation_path", "data.test_path", "data.tokenizer"),
    *("model.path", "model.weights"),
)
"""Keys of files and folders; relative ones are meant from where the run was started."""
ROLLBACK_KEYS = {
    f"stability.{key}" for key in ("max_consecutive_skips", "max_rollbacks", "rollback_lr_factor")
}
REMOVED_KEYS = ("distributed.nodes", "distributed.rendezvous")
"""Keys of earlier versions, without which a run that recorded them is resumed."""
CHANGED_KEY, TYPED_DATA_JOBS = "data.changed", ("evaluate", "predict", "verify")


@dataclass(frozen=True)
class ResumedRun:
    """Overrides of the continued run, and its folder if it continues in place."""

    overrides: list[str]
    folder: Path | None = None
    run: Path | None = None  # the named run, also if it continues elsewhere


def check_config_files(run: Path, name: str, folders: Sequence[Path]) -> None:
    """Raise UsageError if the run took its options from a folder or a config not given now.

    Its overrides would name options that are missing, or others of the same name.
    """
    config, sources = read_config_sources(run)
    given = {folder.resolve() for folder in folders}
    for folder in (Path(path) for kind, path in sources if "command-line" in kind):
        if folder.is_dir() and folder.resolve() not in given:
            problem = f"{RESUME_KEY}: {run} was run with the options in {folder}"
            raise UsageError(f"{problem}; add --config-dir={folder}")
    if config and name.removesuffix(".yaml") != config:
        main = next((f"--config-path={path} " for kind, path in sources if kind == "main"), "")
        is_ours = config == "config" or any("command-line" in kind for kind, _ in sources)
        fix = f"type {'' if is_ours else main}--config-name={config}"
        raise UsageError(f"{RESUME_KEY}: {run} was run with the config {config}; {fix}")


def read_config_sources(run: Path) -> tuple[str, list[tuple[str, str]]]:
    """Return the name of the run's config and providers and paths searched; "", [] if unknown."""
    try:
        recorded = hydra_files.read_yaml(run / hydra_files.FOLDER / "hydra.yaml")["hydra"]
        searched = recorded["runtime"]["config_sources"]
        sources = [(str(source["provider"]), str(source["path"])) for source in searched]
        return (recorded.get("job", {}).get("config_name") or "").removesuffix(".yaml"), sources
    except (StorageError, KeyError, TypeError, AttributeError):
        return "", []


def merge_recorded_overrides(overrides: Sequence[str], sweeps: bool) -> ResumedRun:
    """Prepend the recorded overrides of the run that `checkpoint.resume` names, if it names one.

    The run continues in its own folder, unless it is evaluated, swept over, or hydra.run.dir is
    typed. Raises CheckpointError for a path that is not a run.
    """
    typed = [parse_override(text) for text in overrides]
    resumes = [o for o in typed if o.key == RESUME_KEY and o.sign != "~"]
    names = _resume_values(resumes[-1]) if resumes else []
    paths = [Path(name) for name in names if name not in SPECIAL_VALUES]
    if not paths:
        return ResumedRun(list(overrides))
    runs = [_find_run(path) for path in paths]
    recorded = [_recorded_overrides(run) for run in runs]
    if any(other != recorded[0] for other in recorded[1:]):
        raise ConfigError(RESUME_KEY, "names runs of different configs", "name one run at a time")
    kept = _with_recorded_mappings(runs[0], _select_recorded(recorded[0], typed), typed)
    merged = [*kept, *overrides]
    merged += _absolute_paths(runs[0], typed)
    keys = {o.key: o.value for o in map(parse_override, merged)}
    names_data = any(o.key in PATH_KEYS and o.key.startswith("data.") for o in typed)
    names_data = names_data and keys.get("data._target_", "null") == "null"  # has no such key
    if names_data and keys.get("job") in TYPED_DATA_JOBS and CHANGED_KEY not in keys:
        merged.append(f"{CHANGED_KEY}=accept")  # the user means what the path has now
    elsewhere = sweeps or keys.get("job", "train") != "train" or "hydra.run.dir" in keys
    return ResumedRun(merged, None if elsewhere else runs[0], runs[0])


def _resume_values(override: CliOverride) -> list[str]:
    is_sweep = override.parsed.is_sweep_override()
    names = [text.strip("'\"") for text in override.values()] if is_sweep else []
    names = names or [str(override.parsed.value())]
    if not all(names):
        raise ConfigError(RESUME_KEY, "is empty", "name the folder of a run, or auto")
    return names


def _find_run(path: Path) -> Path | None:
    """Return the run's folder that `path` is, or is in; None for a checkpoint outside a run."""
    if not path.is_dir():
        nearest_name = nearest(path.name, (folder.name for folder in path.parent.glob("*/")))
        fix = f"; did you mean {path.with_name(nearest_name)}?" if nearest_name else ""
        if path.exists():
            fix = f"; to start from weights in a file: model.weights={path}"
        problem = f"there is no folder {path} (relative to {Path.cwd()})"
        raise CheckpointError(f"{RESUME_KEY}: {problem}{fix}")
    folder = path
    for pattern in (STEP_FOLDER, re.compile(CHECKPOINTS)):
        if pattern.fullmatch(folder.name):
            folder = folder.absolute().parent if folder.parent == Path() else folder.parent
    if (folder / CHECKPOINTS).is_dir():
        return folder
    if STEP_FOLDER.fullmatch(path.name):
        return None
    recorded = {o.key: o.value for o in map(parse_override, _recorded_overrides(path))}
    if RESUME_KEY in recorded:
        fix = f"use {RESUME_KEY}={recorded[RESUME_KEY]}"
        raise CheckpointError(f"{RESUME_KEY}: {path} is an evaluation of another run; {fix}")
    runs = [p.parent for p in (*path.glob(f"*/{CHECKPOINTS}"), *path.glob(f"*/*/{CHECKPOINTS}"))]
    newest = max(runs, key=lambda run: run.stat().st_mtime_ns, default=None)
    hint = f"the newest in it is {newest}" if newest else f"it has no {CHECKPOINTS}"
    raise CheckpointError(f"{RESUME_KEY}: {path} is not a training run's folder; {hint}")


def _recorded_overrides(run: Path | None) -> list[str]:
    """Return the overrides with which a run was started, as Hydra recorded them."""
    if run is None or not (run / hydra_files.OVERRIDES).is_file():
        return []
    try:
        return hydra_files.read_overrides(run)
    except StorageError as error:
        raise CheckpointError(str(error)) from error


def _select_recorded(recorded: Sequence[str], typed: Sequence[CliOverride]) -> list[str]:
    """Return the recorded overrides that the typed ones do not replace.

    `security` and `hydra` keys, `data.changed` and the storage of a search are never taken.
    """
    options = groups.group_options()
    keys_and_values = [(GROUP_ALIASES.get(o.key, o.key), o.value) for o in typed]
    typed_values = {k: find_options(k, value, options.get(k, ())) for k, value in keys_and_values}
    dropped = with_argument_keys(set(typed_values)) | {RESUME_KEY, CHANGED_KEY}
    dropped |= {"search.storage", *REMOVED_KEYS}
    dropped |= {EXCLUSIVE[key] for key in dropped if key in EXCLUSIVE}
    recorded_values = {o.key: o.value for o in map(parse_override, recorded)}
    if "experiment" not in recorded_values:  # a recipe names its own options
        defaults = {g: o for g, o in groups.default_options().items() if g in USER_CLASS_GROUPS}
        recorded_values = defaults | recorded_values
    replaced_groups = [
        f"{g}."
        for g in typed_values.keys() & options.keys()
        if _group_value({g: typed_values[g]} | recorded_values, g) != _group_value(typed_values, g)
    ]
    trains = typed_values.get("job", "train") == "train" or typed_values.get("verify.what") == "run"
    dropped_groups = () if trains else ("distributed",)  # other jobs run in one process
    if not trains:  # whose result is what they print
        dropped |= {"monitoring", "monitoring.log_level", "monitoring.progress"}
    prefixes = ("security", "hydra", *dropped_groups, *replaced_groups)
    if typed_values.keys() & ROLLBACK_KEYS:
        prefixes += ("stability.recovery",)  # of an older version, which they replace
    keys = [(text, parse_override(text).key) for text in recorded]
    return [text for text, key in keys if key not in dropped and not key.startswith(prefixes)]


def _with_recorded_mappings(
    run: Path | None, overrides: list[str], typed: Sequence[CliOverride]
) -> list[str]:
    """Replace mappings that were typed whole, such as `optimizer.options={}`, by recorded ones.

    Older versions merged them with the option's. Entries now typed with `+` are left out.
    """
    parsed = [parse_override(text) for text in overrides]
    whole = {o.key for o in parsed if o.sign in ("", "++") and isinstance(o.parsed.value(), dict)}
    if run is None or not whole:
        return overrides
    added_keys = {o.key for o in typed if o.sign == "+"}
    mappings: dict[str, str] = {}
    with suppress(StorageError):
        config = hydra_files.read_yaml(run / hydra_files.CONFIG)
        for key in whole:
            node = config
            for part in key.split("."):
                node = node.get(part) if isinstance(node, dict) else None
            if isinstance(node, dict) and all(PLAIN_NAME.fullmatch(str(name)) for name in node):
                kept = {k: v for k, v in node.items() if f"{key}.{k}" not in added_keys}
                mappings[key] = value_for_hydra(kept)
    entries = tuple(f"{key}." for key in mappings)
    others = [str(o) for o in parsed if o.key not in mappings and not o.key.startswith(entries)]
    return [*others, *(f"{key}={value}" for key, value in mappings.items())]


def _absolute_paths(run: Path | None, typed: Sequence[CliOverride]) -> list[str]:
    """Return overrides with absolute paths for a run that was started in another folder."""
    folder = None if run is None else hydra_files.read_start_folder(run)
    if run is None or folder is None or folder == Path.cwd():
        return []
    config = hydra_files.read_flat_config(run)
    typed_keys = {GROUP_ALIASES.get(o.key, o.key) for o in typed}
    overrides = []
    for key in PATH_KEYS:
        path, group = config.get(key), key.partition(".")[0]
        replaced = typed_keys & {key, group, f"{group}._target_", "experiment"}
        if isinstance(path, str) and not replaced and not path.startswith("~") and "$" not in path:
            if not os.path.isabs(path) and (folder / path).exists():
                overrides.append(f"{key}={quote_for_hydra(str(folder / path))}")
    return overrides


def _group_value(overrides: Mapping[str, str], group: str) -> str:
    """Return what a group is set to: a user's class, or an option."""
    target = overrides.get(f"{group}._target_", "null")
    return overrides[group] if target in ("null", "") else target
