"""Files of a user's folder: a sub-folder for each class, or files without labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from runner.data.batch import RowNames
from runner.data.labels import trained_labels
from runner.data.paths import check_link
from runner.data.preprocessing import Opening
from runner.errors import ConfigError, DataError


def labelled_files(
    root: Path, opening: Opening, takes: Callable[[Path], bool], what: str
) -> tuple[list[Path], np.ndarray, tuple[str, ...]]:
    """The files in `root` that are taken, the label of each, and the names of the classes.

    Sorted by name, at any depth. Raises SecurityError for a link out of `root`, and DataError for a
    class without files; `what` names those that are taken.
    """
    if not opening.labelled:
        found = [root]  # one file
        if root.is_dir():
            found = _inside(root, root.rglob("*"), opening, Path.is_file)
        files = [file for file in found if takes(file)]
        if not files:
            raise DataError(f"{root}: has no {what}")
        return files, np.zeros(len(files), np.int64), ()
    folders = _inside(root, root.iterdir(), opening, Path.is_dir)
    if len(folders) < (2 if opening.fitted is None else 1):
        fix = "put the files of each class into a folder with its name, two or more of them"
        raise ConfigError("data.path", f"{root} has {len(folders)} folders in it", fix)
    files, labels = [], []
    for label, folder in enumerate(folders):
        inside = [
            file for file in _inside(root, folder.rglob("*"), opening, Path.is_file) if takes(file)
        ]
        if not inside:
            raise DataError(f"{folder}: the class has no {what}")
        files += inside
        labels += [label] * len(inside)
    names = tuple(folder.name for folder in folders)
    if opening.fitted is None:
        return files, np.array(labels), names
    trained = opening.fitted.sizes.class_names
    return files, trained_labels(names, np.array(labels), trained, str(root)), trained


def relative_names(root: Path, files: Iterable[Path]) -> RowNames:
    """The files' paths within `root`, or the name of the one file that `root` is."""
    folder = root if root.is_dir() else root.parent
    return RowNames(names=[str(file.relative_to(folder)) for file in files])


def _inside(
    root: Path, paths: Iterable[Path], opening: Opening, kind: Callable[[Path], bool]
) -> list[Path]:
    shown = (path for path in paths if kind(path) and not path.name.startswith("."))
    return sorted(check_link(path, root, opening.policy) for path in shown)
