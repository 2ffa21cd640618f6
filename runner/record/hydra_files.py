"""The `.hydra` files of a run's folder, read safely: the folder may come from anywhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # what OmegaConf reads files with

from runner.errors import StorageError
from runner.record.storage import read_record

OVERRIDES, CONFIG = ".hydra/overrides.yaml", ".hydra/config.yaml"
FOLDER = ".hydra"
RESUMED = ".hydra-resumed"  # the name for Hydra until the run trains on
NO_VALUE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What PyYAML raises for a value that is not of the type it is tagged with."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's: ten times as fast
DEEPEST = 50  # nested values; ours are of six
LARGEST = 2**18  # bytes; the overrides of two thousand jobs


def read_overrides(folder: Path) -> list[str]:
    """The overrides that the run in `folder` was started with. StorageError if there are none."""
    path = folder / OVERRIDES
    lines = read_yaml(path)
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise StorageError(f"{path}: is no list of overrides")
    return lines


def adopt_resumed_config(folder: Path) -> None:
    """Replace the config of a run's folder by the one that it was resumed with."""
    new, old = folder / RESUMED, folder / FOLDER
    if new.is_dir():
        shutil.rmtree(old, ignore_errors=True)
        new.rename(old)


def read_yaml(path: Path) -> Any:
    """The values of a small YAML file. Aliases are refused: a few bytes of them make gigabytes.

    Raises StorageError.
    """
    try:
        data = read_record(path, LARGEST)
        check_events(data)
        return yaml.load(data, LOADER)  # noqa: S506  # a SafeLoader
    except (OSError, yaml.YAMLError, *NO_VALUE) as error:
        raise StorageError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error


def check_events(data: bytes) -> None:
    """Refuse what would cost much before any value is made of it."""
    depth = 0
    for event in yaml.parse(data, LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases", event.start_mark)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise yaml.composer.ComposerError(None, None, "nested too deep", event.start_mark)


def overrides_by_key(overrides: Iterable[str]) -> dict[str, str]:
    """Overrides by key; the last one wins. `~key` is a key with the value "removed"."""
    by_key = {}
    for override in overrides:
        key, equals, value = str(override).partition("=")
        if key.startswith("~"):
            by_key[key.lstrip("~")] = "removed"
        elif equals:
            by_key[key.lstrip("+").partition("@")[0]] = value
    return by_key


def recorded_overrides(folder: Path) -> list[str]:
    """The overrides in a run's folder; [] where they cannot be read."""
    try:
        return read_overrides(folder)
    except StorageError:
        return []


def read_flat_config(folder: Path) -> dict[str, Any]:
    """The config in a run's folder with dotted keys; {} where it cannot be read."""
    flat: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{path}.{key}" if path else str(key))
        elif path:
            flat[path] = value

    try:
        walk(read_yaml(folder / CONFIG), "")
    except StorageError:
        return {}
    return flat
