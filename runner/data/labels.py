"""Targets: what the task is, which classes there are, and whether each label is one of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from runner.errors import BadSample, ConfigError, DataError

TASKS = ("classification", "language_modelling", "regression")
NO_LOSS = -100  # torch's own default for a target that carries no loss
MOST = 1_000_000  # classes or tokens
FEW = 20  # whole numbers with more different values than this are taken for a quantity


def check_task(task: str, allowed: Sequence[str]) -> None:
    """Refuse a `data.task` that is none."""
    if task not in ("auto", *allowed):
        raise ConfigError("data.task", f"no task {task!r}", f"one of auto, {', '.join(allowed)}")


def guess_task(values: np.ndarray) -> tuple[str, str]:
    """Classification or regression, and why, from a float64 column of targets."""
    distinct = len(np.unique(values))
    if not (values == np.round(values)).all():
        return "regression", "the targets are not whole numbers"
    task = "regression" if distinct > FEW else "classification"
    return task, f"the targets are {distinct} different whole numbers"


def check_classes(names: Sequence[str], what: str) -> None:
    """Refuse a classification with one class."""
    if len(names) < 2:
        problem = f"every sample has the label {names[0][:40]!r}; nothing to tell apart"
        raise DataError(f"{what}: {problem}")


def check_range(target: Tensor, below: int, indices: np.ndarray, what: str, fix: str) -> None:
    """Raise BadSample for numbers outside 0 … below-1; -100 passes: a target without loss.

    On the CPU, so that it costs microseconds and no wait for a device.
    """
    bad = ((target < 0) | (target >= below)) & (target != NO_LOSS)
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        value = target[tuple(where)].item()
        problem = f"{what} {indices[where[0]]}: {value} is not in 0 to {below - 1}"
        raise BadSample(where[0], problem, f"; {fix}")


def class_name(value: object) -> str:
    """A class as people call it: 3 for 3.0."""
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole else str(value)  # type: ignore[call-overload]


def trained_labels(
    names: Sequence[str], labels: np.ndarray, trained: Sequence[str], what: str
) -> np.ndarray:
    """Labels that count in `names`, as places in the `trained` names.

    DataError names the classes that the model was not trained on, and how many samples have them.
    """
    places = {name: place for place, name in enumerate(trained)}
    unknown = [name for name in names if name not in places]
    if unknown:
        at = np.isin(labels, [names.index(name) for name in unknown])
        listed = ", ".join(repr(name[:40]) for name in unknown[:5])
        more = f", … ({len(unknown)} in all)" if len(unknown) > 5 else ""
        classes = ", ".join(name[:40] for name in trained[:10])
        raise DataError(
            f"data.path: {what}: {int(at.sum()):,} of {len(labels):,} samples have a class that "
            f"the model was not trained on: {listed}{more}; its classes are {classes}; remove "
            "those samples, or train with such ones, too"
        )
    trained_places: np.ndarray = np.array([places[name] for name in names], np.int64)[labels]
    return trained_places
