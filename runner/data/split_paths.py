"""Separate validation and test sets, by config key or in folders train, val and test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runner.data.config import DataConfig
from runner.data.dataset import Dataset
from runner.data.open import Opening, open_data
from runner.data.paths import check_link, existing
from runner.data.preprocessing import Preprocessing, source_of
from runner.errors import ConfigError, DataError, UsageError
from runner.techniques.base import Choice

PATHS = {"validation": "data.validation_path", "test": "data.test_path"}
FOLDERS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
"""Common folder names of each split, case-insensitive."""
SPLIT_FOLDERS = "data.split_folders"
SAVED = ("tabular", "text", "images")
"""Kinds of data that may be a folder written by Hugging Face `datasets`."""


@dataclass(frozen=True)
class Parts:
    """Paths of the validation and test samples that are not split off `data.path`."""

    folder: str = ""  # in data.path, of the training samples; "": all of it
    paths: dict[str, Path] = field(default_factory=dict)  # of `validation` and `test`
    choices: tuple[Choice, ...] = ()


def find_parts(config: DataConfig, opening: Opening) -> Parts:
    """Return the splits that the config names or that are folders below `data.path`.

    Raises ConfigError if two splits share samples, or a split is given twice.
    """
    whole = opening.whole(config)  # other data than the training data: not split
    keys = {} if whole else PATHS
    named = {part: getattr(config, key.partition(".")[2], None) for part, key in keys.items()}
    paths = {part: existing(path, PATHS[part]) for part, path in named.items() if path is not None}
    root = Path(getattr(config, "path", "")).expanduser()
    own, places = Parts(), {"": root}
    if config._target_ is None and root.is_dir():
        if config.kind in SAVED:
            own = _saved_splits(root, opening, config) or own
        if not own.folder and getattr(config, "split_folders", False):
            own = _split_folders(root, config, opening)
        places = {"": root / own.folder}
        if config.kind == "tokens" and not whole:
            own = _token_files(root, paths, opening)
            places = {"": root / "train.bin", "validation": root / "val.bin"}
    if "validation" in own.paths and (config.split is not None or config.folds is not None):
        key = "data.split" if config.folds is None else "data.folds"
        problem = f"{own.paths['validation']} is the validation set"
        raise ConfigError(key, problem, f"leave it out, or name data.path={root / own.folder}")
    parts = replace(own, paths={**own.paths, **paths})
    _check_disjoint({**places, **parts.paths})
    return parts


def open_part(
    part: str,
    path: Path,
    config: DataConfig,
    fitted: Preprocessing,
    resolve: Callable[[str, str], Any],
    opening: Opening,
) -> tuple[Dataset, tuple[Choice, ...]]:
    """Open all samples of `part` with the fitted preprocessing; return them and the choices."""
    key = PATHS[part]
    own: Any = {"path": str(path), **{name.partition(".")[2]: None for name in PATHS.values()}}
    fitted = replace(fitted, source=source_of(config))
    try:
        how = Opening(opening.policy, fitted, evaluates=True)
        data = open_data(replace(config, **own), resolve, how)
    except UsageError as error:
        text = str(error).removeprefix("data.path: ")
        if isinstance(error, DataError):
            raise DataError(f"{key}: {text}") from None
        if text == str(error):
            raise
        raise ConfigError(key, text) from None
    choices = [choice for choice in data.choices if choice.key != "data.validation"]
    return data, tuple(replace(choice, reason=f"{key}: {choice.reason}") for choice in choices)


def _check_disjoint(places: dict[str, Path]) -> None:
    """Raise ConfigError if a split's path equals, contains or lies in that of another."""
    for part, other in (("validation", ""), ("test", ""), ("test", "validation")):
        if part not in places or other not in places:
            continue
        path, place = places[part].resolve(), places[other].resolve()
        inside, around = path.is_relative_to(place), place.is_relative_to(path)
        if inside or around:
            relation = "is" if inside and around else "lies in" if inside else "contains"
            problem = f"{places[part]} {relation} {PATHS.get(other, 'data.path')}"
            raise ConfigError(PATHS[part], problem, "use separate samples")


def _saved_splits(root: Path, opening: Opening, config: DataConfig) -> Parts | None:
    """Return the splits of a folder written by `datasets`; other split names are not used."""
    from runner.data.saved_dataset import split_names

    if not (splits := split_names(root)):
        return None
    places = {part: [n for n in splits if n.lower() in FOLDERS[part]] for part in FOLDERS}
    if opening.whole(config) or len(places["train"]) != 1:
        problem = f"{root} has the splits {', '.join(splits)}"
        raise ConfigError("data.path", problem, f"name one of them, such as {root / splits[0]}")
    used = {part: root / names[0] for part, names in places.items() if names}
    reason = f"splits of {root}"
    if others := [name for name in splits if root / name not in used.values()]:
        reason += f"; not used: {', '.join(others)}"
    return _checked_parts(root, used, "data.path", reason, opening)


def _token_files(root: Path, paths: dict[str, Path], opening: Opening) -> Parts:
    """Return a token folder's test.bin; ConfigError for data.validation_path beside val.bin."""
    if "validation" in paths:
        fix = f"leave it out, or name data.path={root / 'train.bin'}"
        raise ConfigError(PATHS["validation"], f"{root} has a val.bin", fix)
    test = root / "test.bin"
    if not test.is_file() or "test" in paths:
        return Parts()
    reason = f"{test} is next to train.bin; to change it: {PATHS['test']}"
    check_link(test, root, opening.policy)
    return Parts(paths={"test": test}, choices=(Choice(PATHS["test"], str(test), reason),))


def _split_folders(root: Path, config: DataConfig, opening: Opening) -> Parts:
    """Return the splits in folders train, val and test; empty if the folders are classes."""
    shown = _folders(root)
    places = {part: [f for f in shown if f.name.lower() in FOLDERS[part]] for part in FOLDERS}
    train, *others = places.values()
    if len(train) != 1 or len(_folders(train[0])) < 2 or not any(others):
        return Parts()
    if opening.whole(config):
        if not opening.labelled:  # all files at any depth are predicted
            return Parts()
        names = ", ".join(folder.name for folder in shown)
        fix = f"name one of them, such as data.path={train[0]}"
        raise ConfigError("data.path", f"{root} has the folders {names}", fix)
    used = dict[str, Path]()
    for part, folders in places.items():
        if len(folders) > 1:
            names = " and ".join(folder.name for folder in folders)
            raise ConfigError(PATHS[part], f"{root} has {names}", f"name one: {PATHS[part]}=…")
        if folders and _folders(folders[0]):
            used[part] = folders[0]
    reason = f"split folders of {root}; {SPLIT_FOLDERS}=false makes them classes"
    if skipped := [folder.name for folder in shown if folder not in used.values()]:
        reason += f"; not used (no split with class folders): {', '.join(skipped)}"
    return _checked_parts(root, used, SPLIT_FOLDERS, reason, opening)


def _checked_parts(
    root: Path, used: dict[str, Path], key: str, reason: str, opening: Opening
) -> Parts:
    """Return the splits in folders of `root`; raise SecurityError for a symlink out of it."""
    for folder in used.values():
        check_link(folder, root, opening.policy)
    names = ", ".join(folder.name for folder in used.values())
    train = used.pop("train")
    return Parts(train.name, used, (Choice(key, names, reason),))


def _folders(root: Path) -> list[Path]:
    inside = (path for path in root.iterdir() if not path.name.startswith("."))
    return sorted(path for path in inside if path.is_dir())
