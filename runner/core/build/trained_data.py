"""The data of a run that is resumed, or whose weights are evaluated."""

from __future__ import annotations

import logging
import os
from ast import literal_eval
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.config.run_config import RunConfig
from runner.core.data.dataset import Dataset, TensorsDataset
from runner.core.data.open import open_data
from runner.core.data.order import splitmix
from runner.core.data.preprocessing import NAME as PREPROCESSING
from runner.core.data.preprocessing import (
    OpenOptions,
    Preprocessing,
    parse_preprocessing,
    source_of,
)
from runner.core.data.split_paths import find_split_paths
from runner.core.errors import ConfigError, RunnerError
from runner.core.findings import Choice
from runner.core.record.digests import CHANGED_FIX, DataFiles, change_problem, digest_files
from runner.core.record.storage import read_file
from runner.core.schemas.data import LOADING_KEYS, DataChanged, FromFiles, SplitRule
from runner.core.schemas.jobs import EVALUATION_JOBS
from runner.core.train.resume import check_own_data

if TYPE_CHECKING:
    from runner.core.build.data import Resolve, RunData

log = logging.getLogger("runner")

TRAINED_ROWS_KEY = "data.trained_rows"
CHUNK = 65_536  # rows that are hashed at a time


def read_preprocessing(
    config: RunConfig, checkpointer: Checkpointer, settings: Mapping[str, Any]
) -> Preprocessing | None:
    """Read the preprocessing of the resumed run or of the evaluated weights; None without one."""
    resume, weights = config.checkpoint.resume, config.model.weights
    evaluates = config.job.kind in EVALUATION_JOBS
    stored: tuple[Path, bytes] | None = None
    if resume != "none":
        path = None if resume == "auto" else Path(resume)
        stored = checkpointer.read_preprocessing(path)
        if stored is None and evaluates:
            check_own_data(checkpointer.restore(path), settings)
    elif evaluates and weights is not None:
        path = Path(os.path.expanduser(weights))
        sibling = (path if path.is_dir() else path.parent) / PREPROCESSING
        if sibling.is_file():
            stored = sibling, read_file(sibling)
        elif path.is_dir():  # of a run's folder
            stored = checkpointer.read_preprocessing(path)
        if stored is None:
            log.warning("%s: no %s next to it; fitted again on this data", path, PREPROCESSING)
    if stored is None:
        return None
    return parse_preprocessing(stored[1], stored[0])


def check_data_files(config: RunConfig, fitted: Preprocessing, files: DataFiles) -> Preprocessing:
    """Return the preprocessing with today's files.

    ConfigError if a run's own files have changed, unless `data.changed` is accept.
    """
    data, before = config.data, fitted.files
    trains = config.job.kind not in EVALUATION_JOBS
    if not isinstance(data, FromFiles) or not files.paths:
        return fitted
    path = files.paths["data.path"]
    if not before:
        if fitted.source == source_of(data):
            log.warning("%s is not checked for changes: the checkpoint has no digest of it", path)
        return fitted
    earlier, then = before.get("paths", {}), str(before.get("sha256"))
    pairs = {key: (files.paths.get(key), earlier.get(key)) for key in {**earlier, **files.paths}}
    other = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    now = {} if other else files.describe()
    if now.get("sha256", then) != then:
        own = ["data.path"] if now["own"] != before.get("own") else []
        keys = own or [key for key in files.paths if key != "data.path"]
        what = " or ".join(files.paths[key] for key in keys)
        problem = change_problem(files, "the run was trained on it", then, what)
        if data.changed is not DataChanged.accept:
            raise ConfigError(keys[0], problem, CHANGED_FIX)
        log.warning("%s: %s (data.changed=accept)", keys[0], problem)
    elif not other:
        return fitted
    elif trains:
        for key, (new, old) in other.items():
            log.warning("%s: the run was trained on %s, and is now on %s", key, old, new)
    if not trains:
        return fitted
    return replace(fitted, source=source_of(data), files=files.describe())


SPLIT_KEYS = ("validation", "split", "split_by", "split_seed", "folds", "fold", "split_folders")
"""Keys of `data` that determine which samples are trained on."""
PATH_KEYS = ("validation_path", "test_path")


def find_trained_indices(
    config: RunConfig,
    now: Mapping[str, Any],
    run_data: RunData,
    opening: OpenOptions,
    resolve: Resolve,
    settings: Mapping[str, str],
) -> np.ndarray | None:
    """Return the training indices of a run with `settings`; None if they are unknown.

    `now` are this run's, and `run_data` the same files with another split.
    """
    from runner.core.data.split import split_samples
    from runner.core.data.user_dataset import UserDataset
    from runner.core.train.changed_settings import changed_settings

    changed_keys = {
        key.removeprefix("data.")
        for key in changed_settings(settings, now)
        if key.startswith("data.")
    } - {*LOADING_KEYS, "path", "shuffle", "drop_last", "sampler"}
    is_generated = config.data.kind == "synthetic" and "split_seed" in changed_keys
    if is_generated or not changed_keys <= {*SPLIT_KEYS, *PATH_KEYS}:
        return None
    if "validation" in run_data.splits:  # samples of another file, which has its own indices
        return None if changed_keys else np.zeros(0, np.int64)
    data, samples_key = run_data.data, "data.validation_samples"
    same_split = not changed_keys and settings.get(samples_key) == str(now[samples_key])
    if same_split and isinstance(data, UserDataset):
        return None  # its samples have changed
    try:
        keys = [key for key in (*SPLIT_KEYS, *PATH_KEYS) if f"data.{key}" in settings]
        options: dict[str, Any] = {key: _parse_setting(key, settings) for key in keys}
        before = replace(config.data, **options)
        if isinstance(data, UserDataset):
            samples, labels = len(data.dataset), data.stratified_by
            return split_samples(opening, samples, before, data.name, labels)[0]
        if "path" in vars(before):
            opening = find_split_paths(before, opening).opening(opening)
        return open_data(before, resolve, opening).train
    except (RunnerError, OSError, KeyError, ValueError, SyntaxError) as error:
        log.debug("the earlier split is unknown: %s", error)
        return None


def _parse_setting(key: str, settings: Mapping[str, str]) -> Any:
    text = settings[f"data.{key}"]
    if text == "None":
        return None
    if key == "split":
        return SplitRule[text]
    return text if key in ("split_by", *PATH_KEYS) else literal_eval(text)


def find_trained_rows(
    config: FromFiles,
    data: Dataset,
    fitted: Preprocessing,
    opening: OpenOptions,
    resolve: Resolve,
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
        options = find_split_paths(own, options).opening(options)
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
