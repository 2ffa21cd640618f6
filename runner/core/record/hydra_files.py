"""Read the `.hydra` files of a run's folder safely; the folder is untrusted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # what OmegaConf reads files with

from runner.core.errors import StorageError
from runner.core.masking import mask_secrets
from runner.core.record.storage import open_folder, read_record, remove_folder, rename, safe_opener

OVERRIDES, CONFIG = ".hydra/overrides.yaml", ".hydra/config.yaml"
FOLDER = ".hydra"
SWEEP = "multirun.yaml"
RESUMED = ".hydra-resumed"  # Hydra's folder of a resumed run until training continues
YAML_VALUE_ERRORS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""Exceptions that PyYAML raises for a value that does not fit its tag."""
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is ten times as fast
MAX_DEPTH = 50  # nesting depth; ours is six
MAX_YAML_BYTES = 2**18  # bytes; enough for the overrides of two thousand jobs
Scalar = bool | int | float | str
DEFAULT_COLUMNS = "data.kind model.kind optimization.level optimizer.lr training.batch_size".split()
HPARAM_COLUMNS = [
    *DEFAULT_COLUMNS,
    *("seed", "model.width", "model.depth", "model.dropout", "optimizer.name"),
    *("optimizer.weight_decay", "optimizer.ema", "schedule.kind", "schedule.warmup"),
    *("stability.clip_norm", "training.micro_batch"),
]
"""Config keys that always have an HParams column; the full config is in the Text tab."""
NON_HPARAM_GROUPS = ("checkpoint", "hydra", "job", "monitoring", "name", "security", "sweep")


def read_overrides(folder: Path) -> list[str]:
    """Return the overrides that the run was started with. StorageError if there are none."""
    path = folder / OVERRIDES
    lines = read_yaml(path)
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise StorageError(f"{path}: not a list of overrides")
    return lines


def read_start_folder(folder: Path) -> Path | None:
    """Return the folder in which the run was started; None if it cannot be read."""
    try:
        started = read_yaml(folder / FOLDER / "hydra.yaml")["hydra"]["runtime"]["cwd"]
    except (StorageError, KeyError, TypeError):
        return None
    return Path(started) if isinstance(started, str) else None


def adopt_resumed_config(folder: Path) -> None:
    """Replace the config of a run's folder by the config that it was resumed with."""
    new, old = folder / RESUMED, folder / FOLDER
    if new.is_dir():
        remove_folder(old, ignore_errors=True)
        rename(new, old)


def save_config(cfg: Any, filename: str, output_dir: Path) -> None:
    """Write a config as YAML, in place of Hydra's function, which writes through links."""
    from omegaconf import OmegaConf

    with (
        open_folder(output_dir, create=True),
        open(output_dir / filename, "w", encoding="utf-8", opener=safe_opener) as file,
    ):
        file.write(mask_secrets(OmegaConf.to_yaml(cfg)))


def read_small_files(folder: Path) -> dict[str, bytes]:
    """Return config and provenance of a run by path, to write them again if they are removed."""
    files = dict[str, bytes]()
    for path in (*(folder / FOLDER).glob("*.yaml"), folder / "provenance.json"):
        with suppress(OSError):
            files[str(path.relative_to(folder))] = read_record(path)
    return files


def has_files(folder: Path, names: Iterable[str]) -> bool:
    """Whether all these files are in the folder."""
    return all((folder / name).exists() for name in names)


def read_yaml(path: Path) -> Any:
    """Load a small YAML file; aliases, which could expand, are refused. StorageError."""
    try:
        data = read_record(path, MAX_YAML_BYTES)
        check_events(data)
        return yaml.load(data, YAML_LOADER)  # noqa: S506  # a SafeLoader
    except (OSError, yaml.YAMLError, *YAML_VALUE_ERRORS) as error:
        raise StorageError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error


def check_events(data: bytes) -> None:
    """Raise ComposerError for aliases and deep nesting, before any value is constructed."""
    depth = 0
    for event in yaml.parse(data, YAML_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > MAX_DEPTH:
            problem = "nested too deep" if depth > MAX_DEPTH else "aliases"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)


def overrides_by_key(overrides: Iterable[str]) -> dict[str, str]:
    """Map overrides by key; the last one wins. `~key` maps to "removed"."""
    by_key = {}
    for override in overrides:
        key, equals, value = str(override).partition("=")
        if key.startswith("~"):
            by_key[key.lstrip("~")] = "removed"
        elif equals:
            by_key[key.lstrip("+").partition("@")[0]] = value
    return by_key


def recorded_overrides(folder: Path) -> list[str]:
    """Return the overrides in a run's folder; [] if they cannot be read."""
    try:
        return read_overrides(folder)
    except StorageError:
        return []


def read_flat_config(folder: Path) -> dict[str, Any]:
    """Return the config in a run's folder with dotted keys; {} if it cannot be read."""
    try:
        return {key: value for key, value in flat_items(read_yaml(folder / CONFIG)) if key}
    except StorageError:
        return {}


def flat_items(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values of nested mappings by dotted key, empty mappings too."""
    if isinstance(tree, Mapping) and (tree or not key):
        for name, inner in tree.items():
            yield from flat_items(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, tree


def hparam_columns(
    settings: Mapping[str, Any], overrides: Mapping[str, str], shared: Mapping[str, str]
) -> tuple[dict[str, Scalar], list[str]]:
    """Return the HParams columns of a run, and those to show first: its own overrides.

    A key that is not in `settings` is a group, with its value in `overrides`.
    """
    override_keys = [key for key in overrides if key.partition(".")[0] not in NON_HPARAM_GROUPS]
    values = {k: settings.get(k, overrides.get(k)) for k in (*HPARAM_COLUMNS, *override_keys)}
    values = {key: x.value if isinstance(x, Enum) else x for key, x in values.items()}
    columns = {
        key: value
        for key, value in values.items()
        if isinstance(value, Scalar) and (not isinstance(value, float) or math.isfinite(value))
    }
    differing = [key for key in override_keys if overrides[key] != shared.get(key)]
    return columns, [key for key in differing if key in columns] or DEFAULT_COLUMNS
