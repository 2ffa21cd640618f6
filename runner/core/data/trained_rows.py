"""Evaluated samples that the model was trained on: its data under another name, or equal rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from runner.core.data.dataset import Dataset, TensorsDataset
from runner.core.data.open import open_data
from runner.core.data.order import splitmix
from runner.core.data.preprocessing import OpenOptions, Preprocessing, source_of
from runner.core.data.split_paths import find_split_paths
from runner.core.errors import RunnerError
from runner.core.findings import Choice
from runner.core.record.data_digest import digest_files
from runner.core.schemas.data import FromFiles

TRAINED_ROWS_KEY = "data.trained_rows"
CHUNK = 65_536  # rows that are hashed at a time


def find_trained_rows(
    config: FromFiles,
    data: Dataset,
    fitted: Preprocessing,
    opening: OpenOptions,
    resolve: Callable[[str, str], Any],
) -> tuple[Choice, ...]:
    """Return how many samples of `data`, which are evaluated, were trained on.

    Files are compared by content; rows of a table with those of the training split, if the
    training data are still there or have only another name. None is no choice.
    """
    trained = fitted.files.get("own")
    name = Path(fitted.files.get("paths", {}).get("data.path", "")).name
    digest = digest_files([config.path], name)["sha256"]
    same = trained == digest
    fix = "evaluate others, or leave out data.path for the validation split"
    if same and not isinstance(data, TensorsDataset):
        text = f"samples are the files of {fitted.source}, most of which were trained on; {fix}"
        return (Choice(TRAINED_ROWS_KEY, f"{len(data.validation):,}", text),)
    source = Path(fitted.source)
    unchanged = source.exists() and digest_files([fitted.source], name)["sha256"] == trained
    if not isinstance(data, TensorsDataset) or not (same or unchanged):
        return ()
    own = replace(config, path=config.path if same else fitted.source)
    fitted = replace(fitted, source=source_of(own))
    try:
        options = replace(opening, fitted=fitted, evaluates=True)
        split_paths = find_split_paths(own, options)
        trains_on_all = "validation" in split_paths.paths
        options = replace(options, folder=split_paths.folder, trains_on_all=trains_on_all)
        training = open_data(own, resolve, options)
    except (RunnerError, OSError):  # it is not needed
        return ()
    if not isinstance(training, TensorsDataset):
        return ()
    hashes = row_hashes(training, training.train)
    by_chance = 2 * len(np.unique(hashes)) < len(hashes)  # few distinct rows
    count = int(np.isin(row_hashes(data, data.validation), hashes).sum())
    if not count or (by_chance and not same):
        return ()
    text = f"of {len(data.validation):,} rows are equal to rows that the model was trained on"
    return (Choice(TRAINED_ROWS_KEY, f"{count:,}", f"{text}: the metrics are too good; {fix}"),)


def row_hashes(data: TensorsDataset, rows: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of inputs and target of each row."""
    hashes = np.zeros(len(rows), np.uint64)
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK]
        total = np.zeros(len(chunk), np.uint64)
        for number, tensor in enumerate((data.inputs, data.target)):
            values = np.ascontiguousarray(tensor.numpy()[chunk].reshape(len(chunk), -1), np.float64)
            weights = splitmix(np.arange(values.shape[1]) + (number << 32)) | np.uint64(1)
            total += (splitmix((values + 0.0).view(np.uint64)) * weights).sum(axis=1)  # wraps
        hashes[start : start + CHUNK] = total
    return hashes
