"""What Hydra noted in a run's folder, read with care: the folder may come from anywhere."""

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


def overrides(folder: Path) -> list[str]:
    """Those the run in `folder` was started with. StorageError where there are none."""
    path = folder / OVERRIDES
    found = plain_yaml(path)
    if not isinstance(found, list) or not all(isinstance(line, str) for line in found):
        raise StorageError(f"{path}: is no list of overrides")
    return found


def adopt(folder: Path) -> None:
    """Let the config that a run goes on with take the place of the one it was started with."""
    new, old = folder / RESUMED, folder / FOLDER
    if new.is_dir():
        shutil.rmtree(old, ignore_errors=True)
        new.rename(old)


def plain_yaml(path: Path) -> Any:
    """What stands in a small YAML file without aliases, of which a few bytes can make gigabytes.

    StorageError says in what way it is not good.
    """
    try:
        return yaml.load(read_record(path, LARGEST), _Plain)  # noqa: S506  # a SafeLoader
    except RecursionError:
        raise StorageError(f"{path}: is nested too deep") from None
    except (OSError, yaml.YAMLError, *NO_VALUE) as error:
        raise StorageError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error


class _Plain(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases", self.peek_event().start_mark)
        return super().compose_node(parent, index)
