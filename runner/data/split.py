"""Which samples are held out for validation: by class, by group or by time.

Pure functions of the samples and `data.split_seed`, on the hash of `runner.data.order`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from runner.data.order import split, split_hash
from runner.errors import ConfigError, DataError
from runner.techniques.base import Choice

if TYPE_CHECKING:
    from runner.data.config import DataConfig
    from runner.data.preprocessing import Opening

KEY = "data.split"
Parts = tuple[np.ndarray, np.ndarray]
"""Indices of the training and of the validation part, each ascending."""


def choose_rule(
    config: DataConfig, resumed: str | None, labels: np.ndarray | None
) -> tuple[str, tuple[Choice, ...]]:
    """How the data are divided: what the config says, the resumed run did, or fits the labels."""
    if config.split is not None:
        if config.split.name == "stratified" and labels is None:
            problem = "stratified keeps the shares of classes, and there are none"
            raise ConfigError(KEY, problem, "use random")
        return config.split.name, ()
    if resumed is not None:
        return resumed, (Choice(KEY, resumed, "as before the run was resumed"),)
    if labels is None:
        return "random", ()
    return "stratified", (Choice(KEY, "stratified", "each class has its share in both parts"),)


def divide(
    rule: str,
    samples: int,
    config: DataConfig,
    what: str,
    labels: np.ndarray | None,
    by: np.ndarray | None,
) -> Parts:
    """The two parts by that rule; `what` names the data in a DataError."""
    share, seed = config.validation, config.split_seed
    if by is not None:
        what = f"{what}: column {getattr(config, 'split_by', '')!r}"
        if rule == "group":
            return split_groups(by, share, seed, what)
        return split_times(by, share, what)
    if rule == "stratified" and labels is not None and samples > 1:
        return split_classes(labels, share, seed)
    return split(samples, share, seed, what)


def take_all(
    samples: int, opening: Opening, what: str
) -> tuple[np.ndarray, np.ndarray, tuple[Choice, ...]]:
    """Every sample in both parts: of data that a model was not trained on."""
    if not samples:
        raise DataError(f"{what}: has no samples")
    every = np.arange(samples)
    verb = "evaluated" if opening.labelled else "predicted"
    source = "" if opening.fitted is None else f"; the model was trained on {opening.fitted.source}"
    reason = f"all {samples:,} are {verb}{source}"
    return every, every, (Choice("data.validation", "all", reason),)


def split_classes(labels: np.ndarray, validation: float, split_seed: int) -> Parts:
    """Two parts with the same share of each class, and as large as those of `order.split`.

    The samples of a class with the smallest hashes are held out. A class of two or more samples is
    in both parts; those of one sample count as one class.
    """
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    classes[sizes[classes] == 1] = len(sizes)
    sizes = np.bincount(classes)
    # of the rounded sums, so that the sizes of the parts add up to that of the whole
    held_out = np.diff(np.rint(np.cumsum(sizes) * validation), prepend=0)
    held_out = np.clip(held_out, sizes >= 2, np.maximum(sizes - 1, 0))
    every = np.arange(len(labels))
    ranked = np.lexsort((split_hash(split_seed, every), classes))
    place = every - (np.cumsum(sizes) - sizes)[classes[ranked]]
    within = place < held_out[classes[ranked]]
    return np.sort(ranked[~within]), np.sort(ranked[within])


def split_groups(
    groups: np.ndarray, validation: float, split_seed: int, what: str = "the data"
) -> Parts:
    """Two parts that share no group: groups with small hashes, as near to the share as they fit.

    A group's hash is that of its first sample. DataError for fewer than two groups.
    """
    _, first, codes, sizes = np.unique(
        groups, return_index=True, return_inverse=True, return_counts=True
    )
    if len(sizes) < 2:
        raise DataError(f"{what}: has one value; training and validation need at least one each")
    missing, held_out = len(groups) * validation, np.zeros(len(sizes), bool)
    # all but the last, so that training has one
    for group in np.argsort(split_hash(split_seed, first), kind="stable")[:-1].tolist():
        if sizes[group] < 2 * missing:  # with it, the size is nearer to the share than without
            held_out[group] = True
            missing -= sizes[group]
    if not held_out.any():
        held_out[sizes.argmin()] = True
    return np.flatnonzero(~held_out[codes]), np.flatnonzero(held_out[codes])


def split_times(times: np.ndarray, validation: float, what: str = "the data") -> Parts:
    """The earlier samples and the last share of them; those of one time are in the same part."""
    n = len(times)
    start = np.sort(times)[n - min(max(round(n * validation), 1), n - 1)] if n > 1 else times.max()
    late = times >= start
    if late.all():  # the first time of all has more samples than the training part
        late = times > start
    if not late.any():
        raise DataError(f"{what}: has one value; training and validation need at least one each")
    return np.flatnonzero(~late), np.flatnonzero(late)
