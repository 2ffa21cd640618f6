"""The data of a run: opening, table checks, and loaders."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from runner.checkpoint.checkpointer import Checkpointer
from runner.config import RunConfig
from runner.data.config import UNCOUNTED, BadSamples
from runner.data.dataset import Dataset, Tensors
from runner.data.loader import BatchLoader, make_loader
from runner.data.open import Opening, open_data
from runner.data.order import permutation
from runner.data.preprocessing import NAME as PREPROCESSING
from runner.data.preprocessing import Preprocessing, check_predicts, parse_preprocessing
from runner.errors import ConfigError
from runner.jobs.config import EVALUATING, JobKind
from runner.objectives.build import adapt_sizes
from runner.record.storage import read_file
from runner.security.files.policy import FilePolicy
from runner.techniques.base import Choice, RunBuilder
from runner.training.hook import Hook
from runner.training.resume import check_own_data

if TYPE_CHECKING:
    from runner.data.parts import Parts

log = logging.getLogger("runner")
Resolve = Callable[[str, str], Any]


@dataclass
class RunData:
    """The open data of a run."""

    data: Dataset
    parts: dict[str, Dataset]  # separate validation and test sets
    whole: bool  # no training, all samples are evaluated
    preprocessing: Preprocessing
    hooks: list[Hook]  # the report on a table
    choices: list[Choice]


def open_run_data(
    config: RunConfig,
    given: Dataset | None,
    policy: FilePolicy,
    fitted: Preprocessing | None,
    rule: str | None,
    resolve: Resolve,
) -> RunData:
    """Open the data; check tables, which may leave out columns and rows.

    `fitted` and `rule` are the preprocessing and split rule of a resumed run.
    """
    if fitted is not None and given is None:
        fitted.check_kind(config.data)
    predicts = config.job.kind is JobKind.predict
    if predicts:
        check_predicts(fitted)
    rule = fitted.split if fitted else rule
    evaluates = config.job.kind in EVALUATING
    opening = Opening(policy, fitted, evaluates, labelled=not predicts, rule=rule)
    whole = opening.whole(config.data)
    found: Parts | None = None
    if given is None and "path" in vars(config.data):
        from runner.data.parts import find_parts

        found = find_parts(config.data, opening)
        if not whole:
            opening = replace(opening, folder=found.folder, trains="validation" in found.paths)
    data = given or open_data(config.data, resolve, opening)
    parts, choices = dict[str, Dataset](), list[Choice]()
    if found is not None:
        choices += found.choices
        applied = fitted or Preprocessing.of(config.data, data)
        parts, more = _open_parts(config, {} if whole else found.paths, applied, opening, resolve)
        choices += more
    hooks = list[Hook]()
    if data.choices or (isinstance(data, Tensors) and data.named_columns()):
        from runner.tables import check_data_table

        table = replace(config.checks.table, enabled=config.checks.table.enabled and not whole)
        data, hooks = check_data_table(data, table, parts)
    data.sizes, chosen = adapt_sizes(
        config.objective, data.sizes, own=config.data._target_ is not None
    )
    replaced = {c.key for c in chosen} & {"data.target"}  # replaces a standardisation
    data.choices = (*(c for c in data.choices if c.key not in replaced), *chosen)
    preprocessing = fitted or Preprocessing.of(config.data, data)
    return RunData(data, parts, whole, preprocessing, hooks, choices)


def _open_parts(
    config: RunConfig,
    paths: Mapping[str, Any],
    fitted: Preprocessing,
    opening: Opening,
    resolve: Resolve,
) -> tuple[dict[str, Dataset], list[Choice]]:
    """Open separate validation and test sets; the test set only for job=train."""
    from runner.data.parts import open_part

    parts, choices = dict[str, Dataset](), list[Choice]()
    for part, path in paths.items():
        if part != "test" or config.job.kind is JobKind.train:
            parts[part], more = open_part(part, path, config.data, fitted, resolve, opening)
            choices += more
    return parts, choices


def read_preprocessing(
    config: RunConfig, checkpointer: Checkpointer, settings: Mapping[str, Any]
) -> Preprocessing | None:
    """Read the preprocessing of the resumed run or of the evaluated weights; None without one."""
    where, weights = config.checkpoint.resume, config.model.weights
    evaluates = config.job.kind in EVALUATING
    stored: tuple[Path, bytes] | None = None
    if where != "none":
        path = None if where == "auto" else Path(where)
        stored = checkpointer.read_preprocessing(path)
        if stored is None and evaluates:
            check_own_data(checkpointer.restore(path), settings)
    elif evaluates and weights is not None:
        path = Path(weights).expanduser()
        beside = (path if path.is_dir() else path.parent) / PREPROCESSING
        if beside.is_file():
            stored = beside, read_file(beside)
        elif path.is_dir():  # of a run's folder
            stored = checkpointer.read_preprocessing(path)
        if stored is None:
            log.warning("%s: no %s next to it; fitted again on this data", path, PREPROCESSING)
    if stored is None:
        return None
    return parse_preprocessing(stored[1], stored[0])


@dataclass
class Batches:
    """Makes the loaders of a run."""

    config: RunConfig
    opened: RunData
    batch_size: int
    device: torch.device
    part: Callable[[int], slice] | None  # batch size -> the slice of this process

    def samples(self, count: int) -> Any:
        """Return the first `count` training samples as a batch, not augmented."""
        data = self.opened.data
        chosen = data.train[:count]
        if self.config.data.bad_samples is BadSamples.stop:
            return data.fetch(chosen, None)
        from runner.data.usable import fetch_usable

        return fetch_usable(data, chosen, None, data.train).batch

    def training_set(self, **how: Any) -> BatchLoader:
        """Return the endless loader of the training set."""
        data, labels = self.opened.data, None
        if self.config.data.sampler is not None:
            labels = data.labels()
            if labels is None:
                raise ConfigError("data.sampler", UNCOUNTED, "leave it out")
            labels = labels[data.train]
        how |= {"shuffle": self.config.data.shuffle, "repeat": True, "augment": True}
        return self._loader(data, data.train, labels=labels, **how)

    def loaders(self, draft: RunBuilder) -> tuple[BatchLoader, BatchLoader, BatchLoader | None]:
        """Return the loaders of training, validation and test set (or None)."""
        config, parts = self.config.data, self.opened.parts
        how: dict[str, Any] = {"config": draft.data, "placements": tuple(draft.placements)}
        train = self.training_set(**how)
        source = parts.get("validation", self.opened.data)
        held_out = source.validation
        if not self.opened.whole:
            # in a fixed random order, so that the first ones are representative
            shuffled = permutation(config.split_seed, 0, len(held_out))
            held_out = held_out[shuffled][: config.validation_samples]
        how |= {"shuffle": False, "repeat": False, "augment": False}
        validation, test = self._loader(source, held_out, **how), parts.get("test")
        tests = None if test is None else self._loader(test, test.validation, **how)
        return train, validation, tests

    def _loader(self, source: Dataset, indices: np.ndarray, **how: Any) -> BatchLoader:
        seed, device = self.config.seed, self.device
        common: dict[str, Any] = {"batch_size": self.batch_size, "seed": seed, "device": device}
        return make_loader(source, indices, part=self.part, **common, **how)
