"""Files of a user's folder: a sub-folder for each class, or files without labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from runner.data.batch import RowNames
from runner.data.labels import trained_labels
from runner.data.open import Opening
from runner.data.paths import check_link
from runner.errors import ConfigError, DataError
from runner.techniques.base import Choice


def labelled_files(
    root: Path, opening: Opening, takes: Callable[[Path], bool], what: str
) -> tuple[list[Path], np.ndarray, tuple[str, ...], tuple[Choice, ...]]:
    """The files in `root` that are taken, the label of each, the classes, and what was skipped.

    Sorted by name, at any depth; folders that are hidden or have no files are no classes. Raises
    SecurityError for a link out of `root`; `what` names the files that are taken.
    """
    if not opening.labelled:
        files_inside = [root]  # one file
        if root.is_dir():
            files_inside = _inside(root, root.rglob("*"), opening, Path.is_file)
        files = [file for file in files_inside if takes(file)]
        if not files:
            raise DataError(f"{root}: has no {what}")
        return files, np.zeros(len(files), np.int64), (), ()
    classes = dict[str, list[Path]]()
    skipped = [f"{f.name} (hidden)" for f in sorted(root.glob(".*/"))]
    for folder in _inside(root, root.iterdir(), opening, Path.is_dir):
        inside = _inside(root, folder.rglob("*"), opening, Path.is_file)
        if taken := [file for file in inside if takes(file)]:
            classes[folder.name] = taken
        else:
            skipped.append(f"{folder.name} (has no {what})")
    choices: tuple[Choice, ...] = ()
    note = f"folders that are no classes: {', '.join(skipped)}" if skipped else ""
    if len(classes) < (2 if opening.fitted is None else 1):
        fix = "put the files of each class into a folder with its name, two or more of them"
        problem = f"{root} has {len(classes)} folders with {what} in it"
        raise ConfigError("data.path", f"{problem}; {note}" if note else problem, fix)
    if note:
        choices = (Choice("data.path", str(root), f"left out: {note}"),)
    names, files = tuple(classes), [file for taken in classes.values() for file in taken]
    labels = np.repeat(np.arange(len(names)), [len(taken) for taken in classes.values()])
    if opening.fitted is None:
        return files, labels, names, choices
    trained = opening.fitted.sizes.class_names
    return files, trained_labels(names, labels, trained, str(root)), trained, choices


def relative_names(root: Path, files: Iterable[Path]) -> RowNames:
    """The files' paths within `root`, or the name of the one file that `root` is."""
    folder = root if root.is_dir() else root.parent
    return RowNames(names=[str(file.relative_to(folder)) for file in files])


def _inside(
    root: Path, paths: Iterable[Path], opening: Opening, kind: Callable[[Path], bool]
) -> list[Path]:
    shown = (path for path in paths if kind(path) and not path.name.startswith("."))
    return sorted(check_link(path, root, opening.policy) for path in shown)
