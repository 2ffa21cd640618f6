"""Load a trained run for predictions, equal to those of job=predict."""

from __future__ import annotations

import datetime
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.core.build.arguments import (
    Closeable,
    InMemoryDataset,
    count_samples,
    translate_model_errors,
)
from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.config.composing import compose
from runner.core.config.recorded import merge_recorded_overrides, read_config_sources
from runner.core.config.run_config import RunConfig
from runner.core.data.dataset import Dataset
from runner.core.data.loader import make_loader
from runner.core.data.open import open_data
from runner.core.data.preprocessing import (
    OpenOptions,
    Preprocessing,
    check_predicts,
    parse_preprocessing,
)
from runner.core.errors import CheckpointError, DataError, RunnerError, UsageError
from runner.core.interfaces.batch import Inputs, TextCodec
from runner.core.interfaces.nested import describe, tensors, tree_map
from runner.core.interfaces.run import Run
from runner.core.jobs.evaluate import build_trained
from runner.core.record.text import quote_for_hydra
from runner.core.schemas.data import DataConfig
from runner.core.security.files.policy import FilePolicy
from runner.core.security.paths import run_tree_folders
from runner.core.security.registry import resolve
from runner.datasets.predict import (
    PredictionColumns,
    check_sampling,
    continue_text,
    predict_batches,
    prompted_run,
)
from runner.datasets.tabular import UNKNOWN_CATEGORIES_KEY
from runner.datasets.tokens import find_codec

log = logging.getLogger(__name__)

TABLES = ("tabular", "text")
ARGUMENTS = {  # of `load`, for the keys that they set
    r"security\.trusted=\[([\w.]+)\]": r"trusted=['\1']",
    r"security\.trusted\b": "trusted",
    r"checkpoint\.resume\b": "run",
}


def load(run: str | Path, *, trusted: Sequence[str] = (), overrides: Sequence[str] = ()) -> Trained:
    """Load the trained model of a run's folder (best checkpoint), or of one checkpoint.

    The recorded overrides apply, then `overrides`; a run built with `Components` recorded none. The
    folder is untrusted: it is checked as for checkpoint.resume, and a user's classes need their
    packages in `trusted`. Raises CheckpointError, ConfigError, SecurityError.
    """
    if not isinstance(run, str | os.PathLike):
        raise UsageError(f"load: run must be the folder of a run, got {run!r}")
    for name, items in (("trusted", trusted), ("overrides", overrides)):
        if isinstance(items, str) or not isinstance(items, Sequence):
            raise UsageError(f"load: {name} must be a list of texts, got {items!r}")
    load_overrides = [f"checkpoint.resume={quote_for_hydra(str(run))}", "job=predict"]
    load_overrides += ["monitoring.progress=false", f"security.trusted=[{','.join(trusted)}]"]
    with _name_arguments():
        merged = merge_recorded_overrides([*overrides, *load_overrides], sweeps=False)
        name = read_config_sources(merged.run)[0] if merged.run is not None else ""
        if name not in ("", "config") and not overrides:
            problem = f"{run} was run with the config {name}, which is not composed here"
            raise UsageError(f"load: {problem}; give what it sets: overrides=[…]")
        config = compose(merged.overrides)
    policy = FilePolicy.of(config.security, run_tree_folders(None))
    stored = Checkpointer(None, 1, policy=policy, best_first=True).read_preprocessing(Path(run))
    if stored is None:
        problem = "was written before preprocessing was kept"
        raise CheckpointError(f"{run}: {problem}; train again or evaluate on its own data")
    preprocessing = parse_preprocessing(stored[1], stored[0])
    preprocessing.check_kind(config.data)
    if preprocessing.sizes.task != "language_modelling":  # of which `generate` is the prediction
        check_predicts(preprocessing)
    return Trained(config, preprocessing, policy)


class Trained(Closeable):
    """A model with its preprocessing, ready to predict.

    Use as a context manager: `predict` builds the model, `close` undoes global switches.
    """

    def __init__(self, config: RunConfig, preprocessing: Preprocessing, policy: FilePolicy) -> None:
        self.config, self.preprocessing = config, preprocessing
        self._policy, self._scope = policy, ExitStack()
        self._run: Run | None = None
        self._codec: TextCodec | None = None

    def __repr__(self) -> str:
        fitted = self.preprocessing
        source = f", {fitted.source}" if fitted.source else ""
        return f"<Trained {fitted.sizes.task} model of data={fitted.kind}{source}>"

    def close(self) -> None:
        """Release the run; a later `predict` builds it again."""
        self._run = None
        self._scope.close()

    def predict(self, data: Any) -> PredictionColumns:
        """Return a dict of arrays [samples], the columns of job=predict's file.

        Keys: `prediction` (several targets: `prediction 0`, …), for classes `probability <class>`
        each, and `row`, or `line` or `file`, of the samples, with their ids, if any.

        `data` is a path as in `data.path`, a table (dict of columns, list of row dicts, one row's
        dict, or a table of pyarrow, pandas or polars), a list of texts for a model of texts, a
        tensor of a table's columns as numbers, or a batch of model inputs: a tensor, or a dict or
        tuple of tensors, as the samples have them. Cells that are texts are read as those of a
        csv. Unknown categories are logged.
        """
        if self.preprocessing.sizes.task == "language_modelling":
            raise UsageError("predict: a language model continues a text: use generate(text)")
        check_predicts(self.preprocessing)
        with self._open_data(data) as source:
            if self._run is None:  # techniques inspect samples of the first data
                with _name_arguments():
                    run = build_trained(self.config, None, source)
                self._run = self._scope.enter_context(run)
            parts = list(predict_batches(self._run, self._loader(self._run, source)))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def generate(
        self,
        prompt: str,
        *,
        tokens: int = 200,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> str:
        """Return the prompt and `tokens` tokens that the language model continues it with.

        They are drawn one by one from the distribution at `temperature` (0: the likeliest), from
        the `top_k` likeliest, by a generator with the `seed`. Raises UsageError, ConfigError.
        """
        sampling = check_sampling(prompt, tokens, temperature, top_k, seed)
        if (task := self.preprocessing.sizes.task) != "language_modelling":
            raise UsageError(f"generate: needs a language model, but this one is for {task}")
        if self._run is None:
            with _name_arguments():
                self._run = self._scope.enter_context(prompted_run(self.config, self.preprocessing))
        if self._codec is None:
            fitted = self.preprocessing
            self._codec = find_codec(self.config.data, self._policy, fitted.tokenizer)
        return continue_text(self._run, self._codec, prompt, sampling)

    def _loader(self, run: Run, source: Dataset) -> Any:
        loader = make_loader(
            source,
            source.validation,
            batch_size=run.validation.fetch.order.batch_size,
            seed=run.seed,
            device=run.device.torch,
            config=replace(self.config.data, workers=0),
            shuffle=False,
            repeat=False,
            augment=False,
        )
        loader.placements = run.validation.placements
        return loader

    @contextmanager
    def _open_data(self, data: Any) -> Iterator[Dataset]:
        """Yield the data set, preprocessed as in training."""
        kind = self.preprocessing.kind
        in_memory = not isinstance(data, str | Path)
        if in_memory and kind not in TABLES:
            inputs = self._input_dataset(data)
            sizes = self.preprocessing.sizes
            image = [sizes.in_channels, sizes.image_size, sizes.image_size]
            shape = image if all(image) else [sizes.in_features]
            has_shape = all(shape) and isinstance(data, Tensor)
            fix = f"; a training sample had the shape {shape}" if has_shape else ""
            with translate_model_errors("predict", data, fix):
                yield inputs
            return
        with ExitStack() as stack:
            if in_memory:
                columns = self._columns(data) if isinstance(data, Tensor) else data
                is_texts = isinstance(data, list) and all(isinstance(text, str) for text in data)
                if kind == "text" and is_texts and data:
                    columns = {getattr(self.config.data, "text", "text"): data}
                data = _write_table(columns, Path(stack.enter_context(TemporaryDirectory())))
            resolve_class = partial(resolve, trusted=self.config.security.trusted_packages)
            config = self._config_of_path(str(data))
            opening = OpenOptions(self._policy, self.preprocessing, evaluates=True, labelled=False)
            try:
                source = open_data(config, resolve_class, opening)
            except DataError as error:
                if not in_memory:
                    raise
                text = str(error).removeprefix("data.path: ")
                raise DataError(f"predict: {text.replace(str(data), 'the table')}") from None
            for choice in source.choices:
                if choice.key == UNKNOWN_CATEGORIES_KEY:
                    log.warning("%s: %s: %s", choice.key, choice.value, choice.reason)
            yield source

    def _columns(self, data: Tensor) -> dict[str, np.ndarray]:
        names = list(dict.fromkeys(column.name for column in self.preprocessing.columns))
        if data.ndim != 2 or data.shape[1] != len(names):
            problem = f"a tensor of shape {list(data.shape)}, but the model was trained on"
            raise UsageError(f"predict: {problem} the columns {', '.join(names)}")
        return dict(zip(names, data.double().cpu().numpy().T, strict=True))

    def _config_of_path(self, path: str) -> DataConfig:
        """Return the config of the data at `path`, an argument of the user's class."""
        config = self.config.data
        if config._target_ is None and "path" in vars(config):
            return replace(config, path=path)  # type: ignore[call-arg]
        if config._target_ is None or "path" not in config.arguments:
            name = config._target_ or f"data={config.kind}"
            problem = f"{name}, on which it was trained, takes no path"
            raise UsageError(f"predict: {problem}; give a batch of the model's inputs, as tensors")
        return replace(config, arguments={**config.arguments, "path": path})

    def _input_dataset(self, inputs: Inputs) -> Dataset:
        leaves, kind = tensors(inputs), self.preprocessing.kind
        if not leaves or not isinstance(inputs, Tensor | dict | tuple):
            problem = f"{type(inputs).__name__} for a model of data={kind}"
            raise UsageError(f"predict: {problem}; give a path, or the model's inputs as tensors")
        if leaves[0].shape[:1] == (0,):
            raise DataError("predict: the data has no rows")
        count = count_samples(inputs, "predict: data")
        if any(leaf.shape[:1] != (count,) for leaf in leaves):
            problem = "the first dimension must be the sample in all tensors"
            raise UsageError(f"predict: {problem}, got {describe(inputs)}")

        def convert(tensor: Tensor) -> Tensor:
            if tensor.dtype == torch.uint8 and kind != "own":  # whose samples are not scaled
                return tensor.cpu().float() / 255
            if tensor.is_floating_point() and self.config.model._target_ is None:
                return tensor.cpu().float()  # as its weights
            return tensor.cpu()

        indices, labels = np.arange(count), torch.zeros(count, dtype=torch.int64)
        sizes = self.preprocessing.sizes
        return InMemoryDataset(tree_map(inputs, convert), labels, sizes, (indices, indices))


@contextmanager
def _name_arguments() -> Iterator[None]:
    """Name the arguments of `load` in errors that name the config keys which they set."""
    try:
        yield
    except RunnerError as error:
        text = str(error)
        for key, argument in ARGUMENTS.items():
            text = re.sub(key, argument, text)
        if text != str(error):
            error.args = (f"load: {text}",)
        raise


def _write_table(table: Any, folder: Path) -> Path:
    """Write a table in memory to a Parquet file, to use the file pipeline."""
    import pyarrow
    from pyarrow import parquet

    if isinstance(table, Mapping) and table and all(map(_is_cell, table.values())):
        table = [table]
    rows = table if isinstance(table, list) else []
    if any(isinstance(row, Mapping) for row in rows):
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):
                problem = f"item {number} of the list is {row!r}, not a dict, as others are"
                raise UsageError(f"predict: {problem}")
        names = dict.fromkeys(name for row in table for name in row)
        table = {name: [row.get(name) for row in table] for name in names}
    if isinstance(table, Mapping):
        columns, what = {}, "the table"
        try:
            for name, cells in table.items():
                what = f"the column {name!r}"
                if _is_cell(cells):
                    problem = f"{what} is {cells!r}, not a list of cells"
                    raise UsageError(f"predict: {problem}, as others are; for one row give no list")
                columns[name] = pyarrow.table({name: _plain_column(cells)}).column(0)
            what = "the columns"
            table = pyarrow.table(columns)
        except (pyarrow.ArrowException, ValueError, TypeError) as error:
            fix = "give all its cells as numbers, or all as texts, and columns of one length"
            raise UsageError(f"predict: {what}: {error}; {fix}") from None
    if hasattr(table, "__arrow_c_stream__"):  # pandas, polars and others
        table = pyarrow.table(table)
    if not isinstance(table, pyarrow.Table):
        what = type(table).__name__
        fix = "give a path, a dict of columns, a list of dicts, a table or a tensor"
        raise UsageError(f"predict: {what} is not a table; {fix}")
    parquet.write_table(table, folder / "table.parquet")
    return folder / "table.parquet"


def _plain_column(cells: Any) -> Any:
    """Return the values of a tensor, also of those in a list; other cells are kept."""
    if isinstance(cells, Tensor):
        return cells.detach().cpu().numpy() if cells.ndim else cells.item()
    return [_plain_column(c) for c in cells] if isinstance(cells, list) else cells


def _is_cell(value: Any) -> bool:
    kinds = str | bytes | float | int | datetime.date | np.generic
    is_number = isinstance(value, Tensor) and not value.ndim
    return value is None or is_number or isinstance(value, kinds)
