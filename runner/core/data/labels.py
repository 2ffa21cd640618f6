"""Targets: task, class names, label checks, and files by class folder."""

from __future__ import annotations

import logging
import os
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from runner.core.data.paths import check_link
from runner.core.data.preprocessing import OpenOptions
from runner.core.errors import BadSample, ConfigError, DataError
from runner.core.findings import Choice
from runner.core.format import join_names
from runner.core.interfaces.batch import RowNames

log = logging.getLogger("runner")

TASKS = ("classification", "language_modelling", "regression")
NO_LOSS = -100  # torch's own default for a target that carries no loss
MAX_CLASSES = 1_000_000  # classes or tokens
MAX_INTEGER_CLASSES = 20  # integer targets with more distinct values than this are a regression


def check_task(task: str, allowed: Sequence[str]) -> None:
    """Raise ConfigError if `data.task` is unknown."""
    if task not in ("auto", *allowed):
        raise ConfigError("data.task", f"unknown task {task!r}", f"use auto, {', '.join(allowed)}")


def guess_task(values: np.ndarray) -> tuple[str, str]:
    """Return the task that a float64 column of targets suggests, and the reason."""
    distinct = len(np.unique(values))
    if not (values == np.round(values)).all():
        return "regression", "the targets are not whole numbers"
    task = "regression" if distinct > MAX_INTEGER_CLASSES else "classification"
    return task, f"the targets are {distinct} different whole numbers"


def check_classes(names: Sequence[str], what: str) -> None:
    """Raise DataError for a classification with one class."""
    if len(names) < 2:
        problem = f"every sample has the label {names[0][:40]!r}; use two or more classes"
        raise DataError(f"{what}: {problem}")


def check_id_range(
    target: Tensor, below: int, indices: Sequence[int] | np.ndarray, what: str, fix: str
) -> None:
    """Raise BadSample for numbers outside 0 … below-1, except -100 (no loss). For the CPU."""
    bad = ((target < 0) | (target >= below)) & (target != NO_LOSS)
    if bool(bad.any()):
        position = bad.nonzero()[0].tolist()
        value = target[tuple(position)].item()
        problem = f"{what} {indices[position[0]]}: {value} is not in 0 to {below - 1}"
        raise BadSample(position[0], problem, f"; {fix}")


def class_name(value: object) -> str:
    """Return the display name of a class: 3 for 3.0."""
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole else str(value)  # type: ignore[call-overload]


def similar_labels(names: Sequence[str]) -> str:
    """Return which class names differ only in case, Unicode form or spaces; "" if none do."""
    groups = defaultdict[str, list[str]](list)
    for name in names:
        words = unicodedata.normalize("NFKC", name).casefold().split()
        groups[unicodedata.normalize("NFKC", " ".join(words))].append(name)
    similar = [" and ".join(map(ascii_repr, group)) for group in groups.values() if group[1:]]
    if not similar:
        return ""
    what = "differ only in case, Unicode form or spaces, and are classes of their own"
    return f"{join_names(similar)} {what}; if they are one, write them alike"


def ascii_repr(text: str) -> str:
    """Return a quoted text; one with combining marks shows them escaped."""
    shown = text[:40]
    return ascii(shown) if any(map(unicodedata.combining, shown)) else repr(shown)


def remap_labels(
    names: Sequence[str], labels: np.ndarray, trained: Sequence[str], what: str
) -> np.ndarray:
    """Map labels that index `names` to indices into `trained`; DataError for untrained classes."""
    index_of = {name: index for index, name in enumerate(trained)}
    unknown = [name for name in names if name not in index_of]
    if unknown:
        affected = np.isin(labels, [names.index(name) for name in unknown])
        unknown_names = join_names(repr(name[:40]) for name in unknown)
        classes = ", ".join(name[:40] for name in trained[:10])
        raise DataError(
            f"data.path: {what}: {int(affected.sum()):,} of {len(labels):,} samples have a class "
            f"that the model was not trained on: {unknown_names}; its classes are {classes}; "
            "remove these samples, or add their classes to the training set"
        )
    remapped: np.ndarray = np.array([index_of[name] for name in names], np.int64)[labels]
    return remapped


def labelled_files(
    root: Path, opening: OpenOptions, accepts: Callable[[Path], bool], what: str
) -> tuple[list[Path], np.ndarray, tuple[str, ...], tuple[Choice, ...]]:
    """Return the files in `root` that `accepts` selects, their labels, class names, and choices.

    Files are sorted by name, at any depth; hidden files and folders, and those without files, are
    left out. `what` names the files. Raises SecurityError for a symlink out of `root`.
    """
    others: list[Path] = []  # neither hidden nor files
    if not opening.labelled:
        files_inside, notes = [root], tuple[Choice, ...]()  # one file
        if root.is_dir():
            paths = list(root.rglob("*"))
            files_inside = _list_visible(root, paths, opening, Path.is_file, others)
            _warn_left_out(root, others)
            notes = _hidden_note(root, paths)
        files = [file for file in files_inside if accepts(file)]
        if not files:
            raise DataError(f"{root}: has no {what}")
        return files, np.zeros(len(files), np.int64), (), notes
    classes = dict[str, list[Path]]()
    skipped = [f"{utf8_name(f.name)} (hidden)" for f in sorted(root.glob(".*/"))]
    hidden: list[Path] = []
    for folder in _list_visible(root, root.iterdir(), opening, Path.is_dir, others):
        paths = list(folder.rglob("*"))
        hidden += paths
        files_inside = _list_visible(root, paths, opening, Path.is_file, others)
        if class_files := [file for file in files_inside if accepts(file)]:
            classes[folder.name] = class_files
        else:
            skipped.append(f"{utf8_name(folder.name)} (has no {what})")
    _warn_left_out(root, others)
    choices = _hidden_note(root, hidden)
    note = f"folders that are not classes: {', '.join(skipped)}" if skipped else ""
    if len(classes) < (2 if opening.fitted is None else 1):
        fix = "use two or more folders, one per class, named like it"
        problem = f"{root} has {len(classes)} folders with {what}"
        raise ConfigError("data.path", f"{problem}; {note}" if note else problem, fix)
    if note:
        choices = (Choice("data.path", str(root), f"left out: {note}"), *choices)
    names = tuple(map(utf8_name, classes))
    files = [file for class_files in classes.values() for file in class_files]
    labels = np.repeat(np.arange(len(names)), [len(paths) for paths in classes.values()])
    if opening.fitted is None:
        return files, labels, names, choices
    trained = opening.fitted.sizes.class_names
    return files, remap_labels(names, labels, trained, str(root)), trained, choices


def relative_names(root: Path, files: Iterable[Path]) -> RowNames:
    """Return the files' paths relative to `root`, or the name of the file `root`."""
    folder = root if root.is_dir() else root.parent
    return RowNames(names=[utf8_name(str(file.relative_to(folder))) for file in files])


def utf8_name(name: str) -> str:
    """Return a file's name with bytes that are not UTF-8 escaped, as in `caf\\xe9`."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _list_visible(
    root: Path,
    paths: Iterable[Path],
    opening: OpenOptions,
    kind: Callable[[Path], bool],
    others: list[Path],
) -> list[Path]:
    """Return the paths of a kind that are not hidden, sorted; add those of no kind to `others`."""
    visible = list[Path]()
    for path in paths:
        if not _hidden_part(path, root):
            (visible if kind(path) else others).append(path)
    return sorted(check_link(path, root, opening.policy) for path in visible)


def _warn_left_out(root: Path, paths: Iterable[Path]) -> None:
    """Log those that are neither files nor folders: pipes, links in a circle or to a folder."""
    names = []
    for path in paths:
        is_link, is_folder = path.is_symlink(), path.is_dir()
        if not path.is_file() and (is_link or not is_folder):
            kind = "a link to a folder" if is_folder else "a broken link" if is_link else "no file"
            names.append(f"{utf8_name(str(path.relative_to(root)))} ({kind})")
    if names:
        log.warning("data.path: %s: left out: %s", root, join_names(sorted(names)))


def _hidden_part(path: Path, root: Path) -> int:
    """Return which part of the path below `root`, from 1, is hidden; 0 if none is."""
    parts = path.relative_to(root).parts
    return next((n for n, part in enumerate(parts, 1) if part.startswith(".")), 0)


def _hidden_note(root: Path, paths: Iterable[Path]) -> tuple[Choice, ...]:
    """Return a note about hidden folders that have files, such as `.ipynb_checkpoints`."""
    hidden = ((path.relative_to(root).parts, _hidden_part(path, root)) for path in paths)
    folders = {"/".join(parts[:end]) for parts, end in hidden if 0 < end < len(parts)}
    if not folders:
        return ()
    names = join_names(map(utf8_name, sorted(folders)))
    return (Choice("data.path", str(root), f"left out: hidden folders: {names}"),)
