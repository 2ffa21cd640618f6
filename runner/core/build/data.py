"""The data of a run: opening, table checks, and loaders."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from runner import rooms
from runner.core.build.setup import Setup
from runner.core.config.run_config import RunConfig
from runner.core.data.dataset import Dataset, TensorsDataset
from runner.core.data.loader import BatchLoader, make_loader
from runner.core.data.open import open_data
from runner.core.data.order import permutation
from runner.core.data.preprocessing import OpenOptions, Preprocessing, check_predicts
from runner.core.errors import ConfigError
from runner.core.findings import Choice, notice
from runner.core.interfaces.hook import Hook
from runner.core.interfaces.processes import WorldProtocol
from runner.core.interfaces.technique import RunBuilder
from runner.core.objectives.build import adapt_sizes, meaning_of_targets
from runner.core.record.digests import DataFiles, stamp_arguments
from runner.core.schemas.data import LABELS_UNKNOWN, BadSamples, FromFiles
from runner.core.schemas.jobs import EVALUATION_JOBS, JobKind

if TYPE_CHECKING:
    from runner.core.data.split_paths import SplitPaths

log = logging.getLogger("runner")
Resolve = Callable[[str, str], Any]


@dataclass
class RunData:
    """The open data of a run."""

    data: Dataset
    splits: dict[str, Dataset]  # separate validation and test sets
    evaluates_all: bool  # no training, all samples are evaluated
    preprocessing: Preprocessing
    hooks: list[Hook]  # the report on a table
    choices: list[Choice]
    files: DataFiles  # and their digest
    validation_stamp: str = ""  # digest of the files of the validation set
    # training indices of a run with those settings, on the same data; None: unknown
    trained_indices: Callable[[Mapping[str, str]], np.ndarray | None] = lambda settings: None


def load_data(setup: Setup) -> RunData:
    """Open the data, with the preprocessing of the resumed run, if any."""
    config, user_data = setup.config, setup.components.data
    files = DataFiles(config.data)
    stored = fitted = None
    if config.checkpoint.resume != "none" or not setup.trains:
        from runner.core.build import trained_data  # imported only if used

        stored = trained_data.read_preprocessing(config, setup.checkpointer, setup.settings)
        fitted = stored
        if stored is not None and user_data is None:
            fitted = trained_data.check_data_files(config, stored, files)
    # the split rule of the resumed or replayed run; old runs had only `random`
    split_rule = setup.recorded.get("data.split", "random" if setup.resumes else None)
    run_data = open_run_data(setup, files, fitted, split_rule)
    setup.choices += run_data.choices
    preprocessing = run_data.preprocessing
    if fitted is None and setup.folder is not None and user_data is None:
        preprocessing = replace(preprocessing, files=files.describe())
    setup.checkpointer.preprocessing = preprocessing.dump()
    stamp = "sha256" if "validation" in run_data.splits else "own"
    run_data.validation_stamp = str(preprocessing.files.get(stamp, ""))
    if config.data._target_ is not None and user_data is None and setup.folder is not None:
        run_data.validation_stamp = stamp_arguments(config.data.arguments)
    # None for data without files, such as the embedded
    before = None if stored is None else stored.files.get("own")
    is_same = before == preprocessing.files.get("own") and not run_data.data.is_stream
    if user_data is None and stored is not None and is_same:
        opening = OpenOptions(setup.policy, stored, split_rule=stored.split)
        now = config, setup.settings, run_data, opening, setup.resolve_target
        run_data.trained_indices = partial(trained_data.find_trained_indices, *now)
    return run_data


def open_run_data(
    setup: Setup, files: DataFiles, fitted: Preprocessing | None, split_rule: str | None
) -> RunData:
    """Open the data, with `fitted` and `split_rule` of a resumed run, and check tables."""
    config, user_data, resolve = setup.config, setup.components.data, setup.resolve_target
    if fitted is not None and user_data is None:
        fitted.check_kind(config.data)
    predicts = config.job.kind is JobKind.predict
    if predicts and config.predict.prompt is None:
        check_predicts(fitted)
    split_rule = fitted.split if fitted else split_rule
    evaluates = config.job.kind in EVALUATION_JOBS
    targets = meaning_of_targets(config.objective, setup.components.objective is not None)
    options = setup.policy, fitted, evaluates, not predicts, split_rule
    opening = OpenOptions(*options, targets=targets)
    evaluates_all = opening.evaluates_all(config.data)
    split_paths: SplitPaths | None = None
    if user_data is None and "path" in vars(config.data):
        from runner.core.data.split_paths import find_split_paths

        split_paths = find_split_paths(config.data, opening)
        if not evaluates_all:
            opening = split_paths.opening(opening)
    data: Any = open_data(config.data, resolve, opening) if user_data is None else user_data
    if not isinstance(data, Dataset):
        from runner.core.data.stream import adopt_data  # imported only if used

        data = adopt_data(data, setup.components.validation, config.data, opening)
    splits, choices = dict[str, Dataset](), list[Choice]()
    if evaluates_all and opening.labelled and fitted and isinstance(config.data, FromFiles):
        from runner.core.build.trained_data import find_trained_rows

        choices += find_trained_rows(config.data, data, fitted, opening, resolve)
        for choice in choices:
            log.warning("%s: %s %s", choice.key, choice.value, choice.reason)
    if split_paths is not None:
        choices += split_paths.choices
        applied = fitted or Preprocessing.of(config.data, data)
        paths = {} if evaluates_all else split_paths.paths
        splits, more = _open_splits(config, paths, applied, opening, resolve)
        choices += more
    for choice in data.choices:
        if choice.key == "data.path" and choice.reason.startswith("left out"):
            log.info("%s: %s", choice.value, choice.reason)
    hooks = list[Hook]()
    if data.choices or (isinstance(data, TensorsDataset) and data.named_columns()):
        check_data_table = rooms.find("checks", "table")
        enabled = config.checks.table.enabled and not evaluates_all
        table = replace(config.checks.table, enabled=enabled)
        data, hooks = check_data_table(data, table, splits)
    transform = getattr(config.data, "target_transform", None)
    is_own = config.data._target_ is not None
    data.sizes, chosen = adapt_sizes(config.objective, data.sizes, is_own, transform)
    is_unscaled = data.sizes == data.sizes.unscaled()
    has_own_loss = config.objective._target_ is not None
    if has_own_loss and is_unscaled and isinstance(data, TensorsDataset):
        if data.target.dtype is torch.float64:
            reason = f"{config.objective._target_} gets float32, which rounds them visibly"
            choices.append(notice("data.target", "rounded", reason))
            data.target = data.target.float()
    replaced = {c.key for c in chosen} & {"data.target"}  # replaces a standardisation
    data.choices = (*(c for c in data.choices if c.key not in replaced), *chosen)
    preprocessing = fitted or Preprocessing.of(config.data, data)
    return RunData(data, splits, evaluates_all, preprocessing, hooks, choices, files)


def _open_splits(
    config: RunConfig,
    paths: Mapping[str, Any],
    fitted: Preprocessing,
    opening: OpenOptions,
    resolve: Resolve,
) -> tuple[dict[str, Dataset], list[Choice]]:
    """Open separate validation and test sets; the test set only for job=train."""
    from runner.core.data.split_paths import open_split

    splits, choices = dict[str, Dataset](), list[Choice]()
    for split, path in paths.items():
        if split != "test" or config.job.kind is JobKind.train:
            splits[split], more = open_split(split, path, config.data, fitted, resolve, opening)
            choices += more
    return splits, choices


@dataclass
class LoaderFactory:
    """Makes the loaders of a run."""

    config: RunConfig
    run_data: RunData
    batch_size: int
    device: torch.device
    processes: WorldProtocol

    @property
    def rank_slice(self) -> Callable[[int], slice] | None:
        """From the size of a batch, the slice of this process."""
        return self.processes.local_slice if self.processes.is_shared else None

    def sample_batch(self, count: int) -> Any:
        """Return the first `count` training samples as a batch, not augmented."""
        data = self.run_data.data
        chosen = data.train[:count]
        if self.config.data.bad_samples is BadSamples.stop:
            return data.fetch(chosen, None)
        from runner.core.data.usable import fetch_usable

        return fetch_usable(data, chosen, None, data.train).batch

    def training_loader(self, **options: Any) -> BatchLoader:
        """Return the endless loader of the training set."""
        data, labels = self.run_data.data, None
        if self.config.data.sampler is not None:
            labels = data.labels()
            if labels is None:
                raise ConfigError("data.sampler", LABELS_UNKNOWN, "leave it out")
            labels = labels[data.train]
        options |= {"shuffle": self.config.data.shuffle, "repeat": True, "augment": True}
        return self._loader(data, data.train, labels=labels, **options)

    def loaders(self, builder: RunBuilder) -> tuple[BatchLoader, BatchLoader, BatchLoader | None]:
        """Return the loaders of training, validation and test set (or None)."""
        config, splits = self.config.data, self.run_data.splits
        options: dict[str, Any] = {"config": builder.data, "placements": tuple(builder.placements)}
        train = self.training_loader(**options)
        source = splits.get("validation", self.run_data.data)
        held_out = source.validation
        if not self.run_data.evaluates_all:
            # in a fixed random order, so that the first ones are representative
            shuffled = permutation(config.split_seed, 0, len(held_out))
            held_out = held_out[shuffled][: config.validation_samples]
        options |= {"shuffle": False, "repeat": False, "augment": False}
        validation, test = self._loader(source, held_out, **options), splits.get("test")
        test_loader = None if test is None else self._loader(test, test.validation, **options)
        return train, validation, test_loader

    def _loader(self, source: Dataset, indices: np.ndarray, **options: Any) -> BatchLoader:
        seed, device = self.config.seed, self.device
        common: dict[str, Any] = {"batch_size": self.batch_size, "seed": seed, "device": device}
        return make_loader(source, indices, rank_slice=self.rank_slice, **common, **options)
