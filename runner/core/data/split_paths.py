"""Separate validation and test sets, by config key or in folders train, val and test."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from runner import rooms
from runner.core.data.dataset import Dataset
from runner.core.data.open import open_data
from runner.core.data.paths import check_link, existing_path
from runner.core.data.preprocessing import OpenOptions, Preprocessing, source_of
from runner.core.errors import ConfigError, DataError, UsageError
from runner.core.findings import Choice
from runner.core.schemas.data import DataConfig

T = TypeVar("T")
PATH_KEYS = {"validation": "data.validation_path", "test": "data.test_path"}
SPLIT_FOLDER_NAMES = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
"""Common folder names of each split, case-insensitive."""
SPLIT_FOLDERS_KEY = "data.split_folders"
SAVED_KINDS = ("tabular", "text", "images")
"""Kinds of data that may be a folder written by Hugging Face `datasets`."""
TOKEN_FILES = {"bin": ("tokens",), "txt": ("tokens", "text_lm")}
"""Kinds of data whose folder may have train, val and test files, by their ending."""


@dataclass(frozen=True)
class SplitPaths:
    """Paths of the validation and test samples that are not split off `data.path`."""

    folder: str = ""  # in data.path, of the training samples; "": all of it
    paths: dict[str, Path] = field(default_factory=dict)  # of `validation` and `test`
    choices: tuple[Choice, ...] = ()

    def opening(self, opening: OpenOptions) -> OpenOptions:
        """Return the options to open the other samples with."""
        trains_on_all = "validation" in self.paths
        return replace(opening, folder=self.folder, trains_on_all=trains_on_all)


def find_split_paths(config: DataConfig, opening: OpenOptions) -> SplitPaths:
    """Return the splits that the config or folders name; ConfigError if two share samples."""
    evaluates_all = opening.evaluates_all(config)  # other data than the training data: not split
    keys = {} if evaluates_all else PATH_KEYS
    configured = {s: getattr(config, key.partition(".")[2], None) for s, key in keys.items()}
    paths = {s: existing_path(p, PATH_KEYS[s]) for s, p in configured.items() if p is not None}
    root = Path(os.path.expanduser(getattr(config, "path", "")))
    inner, sources = SplitPaths(), {"": root}
    if config._target_ is None and root.is_dir():
        if config.kind in SAVED_KINDS:
            inner = _saved_splits(root, opening, config) or inner
        if not inner.folder and getattr(config, "split_folders", False):
            inner = _split_folders(root, config, opening)
        sources = {"": root / inner.folder}
        kind = "txt" if (root / "train.txt").is_file() else "bin"
        if config.kind in TOKEN_FILES[kind] and not evaluates_all:
            inner = _token_files(root, kind, paths, opening)
            sources = {"": root / f"train.{kind}"}
            if (validation := root / f"val.{kind}").is_file():
                sources["validation"] = validation
    if "validation" in inner.paths and (config.split is not None or config.folds is not None):
        key = "data.split" if config.folds is None else "data.folds"
        problem = f"{inner.paths['validation']} is the validation set"
        raise ConfigError(key, problem, f"leave it out, or name data.path={root / inner.folder}")
    split_paths = replace(inner, paths={**inner.paths, **paths})
    _check_disjoint({**sources, **split_paths.paths})
    return split_paths


def open_split(
    split: str,
    path: Path,
    config: DataConfig,
    fitted: Preprocessing,
    resolve: Callable[[str, str], Any],
    opening: OpenOptions,
) -> tuple[Dataset, tuple[Choice, ...]]:
    """Open all samples of `split` with the fitted preprocessing; return them and the choices."""
    key = PATH_KEYS[split]
    options: Any = {"path": str(path), **{k.partition(".")[2]: None for k in PATH_KEYS.values()}}
    fitted = replace(fitted, source=source_of(config))
    try:
        split_opening = OpenOptions(opening.policy, fitted, evaluates=True)
        data = open_data(replace(config, **options), resolve, split_opening)
    except UsageError as error:
        text = str(error).removeprefix("data.path: ")
        if isinstance(error, DataError):
            raise DataError(f"{key}: {text}") from None
        if text == str(error):
            raise
        raise ConfigError(key, text) from None
    choices = [choice for choice in data.choices if choice.key != "data.validation"]
    return data, tuple(replace(choice, reason=f"{key}: {choice.reason}") for choice in choices)


def _check_disjoint(sources: dict[str, Path]) -> None:
    """Raise ConfigError if a split's path equals, contains or lies in that of another."""
    for split, other in (("validation", ""), ("test", ""), ("test", "validation")):
        if split not in sources or other not in sources:
            continue
        path, other_path = sources[split].resolve(), sources[other].resolve()
        inside, contains = path.is_relative_to(other_path), other_path.is_relative_to(path)
        if inside or contains:
            relation = "is" if inside and contains else "lies in" if inside else "contains"
            problem = f"{sources[split]} {relation} {PATH_KEYS.get(other, 'data.path')}"
            raise ConfigError(PATH_KEYS[split], problem, "use separate samples")


def _saved_splits(root: Path, opening: OpenOptions, config: DataConfig) -> SplitPaths | None:
    """Return the splits of a folder written by `datasets`; other split names are not used."""
    if not (splits := rooms.find("files", "split_names")(root)):
        return None
    folders = _by_split(splits, str)
    if opening.evaluates_all(config) or len(folders["train"]) != 1:
        problem = f"{root} has the splits {', '.join(splits)}"
        raise ConfigError("data.path", problem, f"name one of them, such as {root / splits[0]}")
    chosen = {split: root / names[0] for split, names in folders.items() if names}
    reason = f"splits of {root}"
    if others := [name for name in splits if root / name not in chosen.values()]:
        reason += f"; not used: {', '.join(others)}"
    return _build_split_paths(root, chosen, "data.path", reason, opening)


def _token_files(root: Path, kind: str, paths: dict[str, Path], opening: OpenOptions) -> SplitPaths:
    """Return a token folder's test file; ConfigError for data.validation_path beside val.bin."""
    if "validation" in paths and (root / f"val.{kind}").is_file():
        fix = f"leave it out, or name data.path={root / f'train.{kind}'}"
        raise ConfigError(PATH_KEYS["validation"], f"{root} has a val.{kind}", fix)
    test = root / f"test.{kind}"
    if not test.is_file() or "test" in paths:
        return SplitPaths()
    reason = f"{test} is next to train.{kind}; to change it: {PATH_KEYS['test']}"
    check_link(test, root, opening.policy)
    return SplitPaths(paths={"test": test}, choices=(Choice(PATH_KEYS["test"], str(test), reason),))


def _split_folders(root: Path, config: DataConfig, opening: OpenOptions) -> SplitPaths:
    """Return the splits in folders train, val and test; empty if the folders are classes."""
    subfolders = _visible_folders(root)
    folders_by_split = _by_split(subfolders, lambda folder: folder.name)
    train, *others = folders_by_split.values()
    if len(train) != 1 or len(_visible_folders(train[0])) < 2 or not any(others):
        return SplitPaths()
    if opening.evaluates_all(config):
        if not opening.labelled:  # all files at any depth are predicted
            return SplitPaths()
        names = ", ".join(folder.name for folder in subfolders)
        fix = f"name one of them, such as data.path={train[0]}"
        raise ConfigError("data.path", f"{root} has the folders {names}", fix)
    chosen = dict[str, Path]()
    for split, folders in folders_by_split.items():
        if len(folders) > 1:
            names = " and ".join(folder.name for folder in folders)
            key = PATH_KEYS[split]
            raise ConfigError(key, f"{root} has {names}", f"name one: {key}=…")
        if folders and _visible_folders(folders[0]):
            chosen[split] = folders[0]
    reason = f"split folders of {root}; {SPLIT_FOLDERS_KEY}=false makes them classes"
    if skipped := [folder.name for folder in subfolders if folder not in chosen.values()]:
        reason += f"; not used (no split with class folders): {', '.join(skipped)}"
    return _build_split_paths(root, chosen, SPLIT_FOLDERS_KEY, reason, opening)


def _build_split_paths(
    root: Path, chosen: dict[str, Path], key: str, reason: str, opening: OpenOptions
) -> SplitPaths:
    """Return the splits in folders of `root`; raise SecurityError for a symlink out of it."""
    for folder in chosen.values():
        check_link(folder, root, opening.policy)
    names = ", ".join(folder.name for folder in chosen.values())
    train = chosen.pop("train")
    return SplitPaths(train.name, chosen, (Choice(key, names, reason),))


def _by_split(items: Sequence[T], name: Callable[[T], str]) -> dict[str, list[T]]:
    """Return the items whose name is common for a split, by split."""
    names = SPLIT_FOLDER_NAMES.items()
    return {split: [x for x in items if name(x).lower() in common] for split, common in names}


def _visible_folders(root: Path) -> list[Path]:
    inside = (path for path in root.iterdir() if not path.name.startswith("."))
    return sorted(path for path in inside if path.is_dir())
