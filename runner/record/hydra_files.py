"""The `.hydra` files of a run's folder, read safely: the folder may come from anywhere."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # what OmegaConf reads files with

from runner.errors import StorageError
from runner.storage import read_record

OVERRIDES, CONFIG = ".hydra/overrides.yaml", ".hydra/config.yaml"
FOLDER = ".hydra"
RESUMED = ".hydra-resumed"  # as Hydra is told to call it until the run trains on
NO_VALUE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What PyYAML raises for a value that is not of the type it is tagged with."""
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
        return yaml.load(read_record(path, LARGEST), _Plain)  # noqa: S506  # a SafeLoader
    except RecursionError:
        raise StorageError(f"{path}: is nested too deep") from None
    except (OSError, yaml.YAMLError, *NO_VALUE) as error:
        raise StorageError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error


def read_override_values(folder: Path) -> dict[str, str]:
    """The overrides in a run's folder by key; {} where they cannot be read."""
    try:
        pairs = [line.partition("=") for line in read_overrides(folder)]
    except StorageError:
        return {}
    return {key.lstrip("+").partition("@")[0]: value for key, equals, value in pairs if equals}


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


class _Plain(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases", self.peek_event().start_mark)
        return super().compose_node(parent, index)
