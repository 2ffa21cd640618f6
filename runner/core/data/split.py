"""Training and validation splits by class, by group or by time.

Pure functions of the samples and `data.split_seed`, on the hash of `runner.core.data.order`.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heapreplace

import numpy as np

from runner.core.data.order import Fold, split, split_hash, take_fold
from runner.core.data.preprocessing import OpenOptions
from runner.core.errors import ConfigError, DataError
from runner.core.findings import Choice
from runner.core.schemas.data import DataConfig

KEY = "data.split"
SplitIndices = tuple[np.ndarray, np.ndarray]
"""Indices of the training and of the validation part, each ascending."""


def split_samples(
    opening: OpenOptions,
    samples: int,
    config: DataConfig,
    what: str,
    labels: np.ndarray | None = None,  # of classes
    split_column: np.ndarray | None = None,  # the column of data.split=group or time, as numbers
) -> tuple[np.ndarray, np.ndarray, tuple[Choice, ...]]:
    """Return training and validation samples of `what`; untrained data are evaluated whole."""
    fitted, all_samples = opening.fitted, np.arange(samples)
    if opening.evaluates_all(config):  # both splits are all samples
        if not samples:
            raise DataError(f"{what}: has no samples")
        verb = "evaluated" if opening.labelled else "predicted"
        source = "" if fitted is None else f"; the model was trained on {fitted.source}"
        reason = f"all {samples:,} are {verb}{source}"
        return all_samples, all_samples, (Choice("data.validation", "all", reason),)
    if opening.trains_on_all:
        return all_samples, all_samples[:0], ()
    rule, choices = _choose_rule(config, opening.split_rule, labels)
    if fitted is not None and fitted.folds and config.folds is None:
        reason = f"as before, with data.fold={fitted.fold}"
        choices.append(Choice("data.folds", fitted.folds, reason))
        config = replace(config, folds=fitted.folds, fold=fitted.fold)
    train, validation = _split_by_rule(rule, samples, config, what, labels, split_column)
    if rule == "time" and config.folds is not None:
        earlier = f"{len(train):,} earlier samples are trained on, the next {len(validation):,}"
        later = f"held out, {samples - len(train) - len(validation):,} later ones not used"
        choices.append(Choice("data.folds", "expanding window", f"{earlier} {later}"))
    return train, validation, tuple(choices)


def _choose_rule(
    config: DataConfig, resumed: str | None, labels: np.ndarray | None
) -> tuple[str, list[Choice]]:
    """Return the rule of the config, else of the resumed run, else one that fits the labels."""
    if config.split is not None:
        if config.split.name == "stratified" and labels is None:
            fix = "use random; your own data set: give it an attribute `targets`, the classes"
            raise ConfigError(KEY, "stratified needs classes, but there are none", fix)
        return config.split.name, []
    if resumed is not None:
        return resumed, [Choice(KEY, resumed, "kept from the resumed run")]
    if labels is None:
        return "random", []
    return "stratified", [Choice(KEY, "stratified", "same class shares in both parts")]


def _split_by_rule(
    rule: str,
    samples: int,
    config: DataConfig,
    what: str,
    labels: np.ndarray | None,
    split_column: np.ndarray | None,
) -> SplitIndices:
    """Split the samples by `rule`."""
    share, seed, fold = config.validation, config.split_seed, config.validation_fold
    if split_column is not None:
        what = f"{what}: column {getattr(config, 'split_by', '')!r}"
        if rule == "group":
            return split_groups(split_column, share, seed, what, fold)
        if fold is None:
            return split_times(split_column, share, what)
        return fold_times(split_column, fold, what)
    if rule == "stratified" and labels is not None and samples > 1:
        if fold is not None:  # sorted by class, so each fold gets its share of each class
            ranked = np.lexsort((split_hash(seed, np.arange(samples)), labels))
            return take_fold(ranked, fold, what)
        return split_classes(labels, share, seed)
    return split(samples, share, seed, what, fold)


def split_classes(labels: np.ndarray, validation: float, split_seed: int) -> SplitIndices:
    """Split with the same share of each class in both parts, sized as by `order.split`.

    The samples of a class with the smallest hashes are held out. A class of two or more samples is
    in both parts; classes of one sample count together as one class.
    """
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    classes[sizes[classes] == 1] = len(sizes)
    sizes = np.bincount(classes)
    # differences of rounded cumulative sums, so that the sizes add up to that of the whole
    held_out = np.diff(np.rint(np.cumsum(sizes) * validation), prepend=0)
    held_out = np.clip(held_out, sizes >= 2, np.maximum(sizes - 1, 0))
    positions = np.arange(len(labels))
    ranked = np.lexsort((split_hash(split_seed, positions), classes))
    rank = positions - (np.cumsum(sizes) - sizes)[classes[ranked]]
    is_held_out = rank < held_out[classes[ranked]]
    return np.sort(ranked[~is_held_out]), np.sort(ranked[is_held_out])


def split_groups(
    groups: np.ndarray, share: float, seed: int, what: str = "the data", fold: Fold | None = None
) -> SplitIndices:
    """Split by group: groups with the smallest hashes, of first samples, are held out.

    With `fold`, groups go to folds largest first, each to the smallest. DataError for too few.
    """
    _, first, codes, sizes = np.unique(
        groups, return_index=True, return_inverse=True, return_counts=True
    )
    if len(sizes) < 2:
        raise DataError(f"{what}: has one value; training and validation need at least one each")
    if fold is not None:
        return _fold_groups(codes, np.lexsort((split_hash(seed, first), -sizes)), fold, what)
    remaining, held_out = len(groups) * share, np.zeros(len(sizes), bool)
    # all but the last, so that training keeps a group
    for group in np.argsort(split_hash(seed, first), kind="stable")[:-1].tolist():
        if sizes[group] < 2 * remaining:  # with it the size is nearer to the share
            held_out[group] = True
            remaining -= sizes[group]
    if not held_out.any():
        held_out[sizes.argmin()] = True
    return np.flatnonzero(~held_out[codes]), np.flatnonzero(held_out[codes])


def _fold_groups(codes: np.ndarray, largest: np.ndarray, fold: Fold, what: str) -> SplitIndices:
    number, folds = fold
    if len(largest) < folds:
        raise DataError(f"{what}: {len(largest)} values are too few for data.folds={folds}")
    sizes, fold_of = np.bincount(codes), np.empty(len(largest), np.int64)
    smallest = [(0, fold_number) for fold_number in range(folds)]
    for group in largest.tolist():
        samples, fold_of[group] = smallest[0]
        heapreplace(smallest, (samples + int(sizes[group]), int(fold_of[group])))
    in_fold = fold_of[codes] == number
    return np.flatnonzero(~in_fold), np.flatnonzero(in_fold)


def split_times(times: np.ndarray, validation: float, what: str = "the data") -> SplitIndices:
    """Split by time: the last share is held out; samples of equal time stay together."""
    n = len(times)
    start = np.sort(times)[n - min(max(round(n * validation), 1), n - 1)] if n > 1 else times.max()
    late = times >= start
    if late.all():  # the earliest time has more samples than the training part
        late = times > start
    if not late.any():
        raise DataError(f"{what}: has one value; training and validation need at least one each")
    return np.flatnonzero(~late), np.flatnonzero(late)


def fold_times(times: np.ndarray, fold: Fold, what: str = "the data") -> SplitIndices:
    """Split by expanding window: of k + 1 periods one is held out, earlier ones are trained on.

    Later periods are not used, so training never sees samples after its validation period.
    """
    number, folds = fold
    ordered = np.sort(times)
    starts = ordered[[len(times) * period // (folds + 1) for period in range(folds + 1)]]
    late = times >= starts[number + 1]
    if number + 2 <= folds:
        late &= times < starts[number + 2]
    early = times < starts[number + 1]
    if not early.any() or not late.any():
        raise DataError(f"{what}: has too few values for data.folds={folds}")
    return np.flatnonzero(early), np.flatnonzero(late)
