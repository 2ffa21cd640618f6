"""job=predict: predictions for each sample, or the text that a language model continues."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runner.core.build.arguments import check_whole_number
from runner.core.build.trained_data import read_preprocessing
from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.config.run_config import RunConfig
from runner.core.data.dataset import Dataset, TensorsDataset
from runner.core.data.loader import BatchLoader
from runner.core.data.preprocessing import Preprocessing
from runner.core.data.target_scale import in_target_unit
from runner.core.errors import ConfigError, StorageError, UsageError
from runner.core.execution.evaluation import apply_in_parts, inference
from runner.core.execution.generate import Sampling, generate
from runner.core.format import count_noun
from runner.core.interfaces.batch import Sizes, TextCodec, call_model
from runner.core.interfaces.run import Run
from runner.core.jobs import run_report as report
from runner.core.jobs.evaluate import build_trained
from runner.core.objectives.model_output import class_logits, logits
from runner.core.record.console import console, supports_live_display
from runner.core.record.storage import remove_file, rename, replace_text, safe_opener
from runner.core.record.summary import Summary
from runner.core.record.text import escape_control_chars
from runner.core.schemas.jobs import PredictFormat
from runner.core.security.files.policy import FilePolicy
from runner.core.security.paths import run_tree_folders
from runner.core.standard_streams import write_stream
from runner.core.train.evidence import build_summary
from runner.datasets.tokens import find_codec

log = logging.getLogger("runner")

PredictionColumns = dict[str, Any]  # name → numpy or Arrow array


def main(config: RunConfig, folder: Path) -> Summary:
    """Predict with the weights of `checkpoint.resume` or `model.weights` into `folder`."""
    if config.predict.prompt is not None:
        return _continue_prompt(config, folder)
    kind = config.predict.format
    path = folder / f"predictions.{kind.name}"
    with build_trained(config, folder) as run:
        run.history.load({"counts": {}, "faults": []})  # drop the faults of the training
        with _named_storage_errors(path):
            rows = write_predictions(run, path, kind)
            entry = {"file": path.name, "rows": rows, "bytes": path.stat().st_size}
        run.choices[:] = [choice for choice in run.choices if choice.key.startswith("data.")]
        return _write_summary(run, folder, entry)


def _write_summary(run: Run, folder: Path, entry: dict[str, Any]) -> Summary:
    run.progress.metrics, run.techniques = {}, []  # they concern training
    summary = build_summary(run, "done", job="predict")
    summary.export = entry
    summary.write(folder)
    report.write_report(summary, folder)
    return summary


@contextmanager
def _named_storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: not written: {error.strerror or error}") from error


def predict_batches(run: Run, loader: BatchLoader | None = None) -> Iterator[PredictionColumns]:
    """Yield, for each batch, sample names, predictions and probabilities.

    Of the run's own data, or of `loader`.

    Columns by name, [samples] each: names and ids of the samples, `prediction`, and for
    classification `probability <class>` per class.
    """
    loader = loader or run.validation
    with inference(run) as forward:
        for number, batch in enumerate(loader.batches(0)):
            if run.bad_samples is not None:
                run.bad_samples.record_batch(loader)
            if loader.empty:
                continue
            parts = apply_in_parts(run, batch, lambda p: logits(call_model(forward, p[0])).cpu())
            samples = np.array(loader.indices(number))
            columns = _prediction_columns(torch.cat(parts), run.sizes)
            yield {**_sample_columns(loader.fetch.source, samples, columns), **columns}


def write_predictions(run: Run, path: Path, kind: PredictFormat) -> int:
    """Write predictions batch by batch, and return their number; the file appears when complete."""
    import pyarrow
    from pyarrow import csv, parquet
    from rich.progress import track

    temporary, writer = path.with_name(f".{path.name}.tmp"), None
    rows, screen = 0, console()
    batches = track(
        predict_batches(run),
        "predicting",
        total=run.validation.steps_per_epoch,
        console=screen,
        transient=True,
        disable=not supports_live_display(screen),
    )
    writer_class: Any = csv.CSVWriter if kind is PredictFormat.csv else parquet.ParquetWriter
    try:
        with open(temporary, "wb", opener=safe_opener) as file, ExitStack() as scope:
            for columns in batches:
                table = pyarrow.table(columns)
                writer = writer or scope.enter_context(writer_class(file, table.schema))
                writer.write_table(table)
                rows += len(table)
        rename(temporary, path)
    finally:
        remove_file(temporary)
    log.info("%s: %s", path.name, count_noun(rows, "row"))
    return rows


def _sample_columns(
    source: Dataset, samples: np.ndarray, columns: Container[str]
) -> PredictionColumns:
    """Return the samples' names and ids; an id is renamed if it conflicts with another column."""
    rows = source.rows
    if rows.names:
        names = {"file": np.array([rows.names[i] for i in samples.tolist()], dtype=object)}
    else:
        names = {rows.word: samples if rows.numbers is None else rows.numbers[samples]}
    for name, ids in source.ids.items():
        names[f"id {name}" if name in names or name in columns else name] = ids.take(samples)
    return names


def _prediction_columns(output: torch.Tensor, sizes: Sizes) -> PredictionColumns:
    if sizes.task == "regression":
        values = in_target_unit(sizes, output.double())
        values = values.reshape(len(values), -1)
        # float32 outputs are precise to about 1e-7 of the targets' deviation
        if sizes == sizes.unscaled() or sizes.log_target:  # … or of the smaller one of value and 1
            size = values.abs().clamp(1e-30, 1.0)
            factor = 10.0 ** (7 - size.log10().floor())
            values = (values * factor).round() / factor
        else:
            scales = sizes.target_deviation
            scales = scales if isinstance(scales, tuple) else (scales,)
            digits = [7 - math.floor(math.log10(scale)) for scale in scales]
            for column, decimals in zip(values.T, cycle(digits), strict=False):
                column.copy_(column.round(decimals=decimals))
        if values.shape[1] == 1:
            return {"prediction": values[:, 0].numpy()}
        return {f"prediction {i}": values[:, i].numpy() for i in range(values.shape[1])}
    output = class_logits(output, sizes.classes)
    names = sizes.class_names or tuple(map(str, range(output.shape[1])))
    probability = output.double().softmax(1).float()
    predicted = np.array(names, dtype=object)[probability.argmax(1).numpy()]
    each = {f"probability {name}": probability[:, i].numpy() for i, name in enumerate(names)}
    return {"prediction": predicted, **each}


# -- the text of a language model: `predict.prompt` and `Trained.generate` ------------------------


def _continue_prompt(config: RunConfig, folder: Path) -> Summary:
    """Continue `predict.prompt` with a trained language model: on stdout, in predictions.txt."""
    options = config.predict
    policy = FilePolicy.of(config.security, run_tree_folders(None))
    checkpointer = Checkpointer(folder, 1, policy=policy, best_first=True)
    fitted = read_preprocessing(config, checkpointer, {})
    if fitted is None:
        problem = "needs a trained language model"
        raise ConfigError("predict.prompt", problem, "name a run: checkpoint.resume=RUN")
    fitted.check_kind(config.data)
    sampling = Sampling(options.tokens, options.temperature, options.top_k, config.seed)
    path = folder / "predictions.txt"
    with prompted_run(config, fitted, folder) as run:
        run.history.load({"counts": {}, "faults": []})  # drop the faults of the training
        codec = find_codec(config.data, policy, fitted.tokenizer)
        text = continue_text(run, codec, str(options.prompt), sampling)
        text = text.encode("utf-8", "replace").decode()
        with _named_storage_errors(path):
            replace_text(path, text)
            size = path.stat().st_size
        write_stream(sys.stdout, "\n".join(map(escape_control_chars, text.split("\n"))) + "\n")
        run.choices.clear()
        entry = {"file": path.name, "tokens": sampling.tokens, "bytes": size}
        return _write_summary(run, folder, entry)


@contextmanager
def prompted_run(
    config: RunConfig, fitted: Preprocessing, folder: Path | None = None
) -> Iterator[Run]:
    """Yield the run of a trained language model, without its data. Raises ConfigError."""
    if fitted.sizes.task != "language_modelling":
        problem = f"needs a language model, but this one was trained on data={fitted.kind}"
        raise ConfigError("predict.prompt", problem, "leave it out")
    config = replace(config, predict=replace(config.predict, prompt="…"))
    # a run is built with data: two samples of zeros
    ids = torch.zeros((2, fitted.sizes.sequence or 1), dtype=torch.int64)
    data = TensorsDataset(ids, ids, fitted.sizes, (np.arange(1), np.arange(1, 2)))
    with build_trained(config, folder, data) as run:
        yield run


def continue_text(run: Run, codec: TextCodec, prompt: str, sampling: Sampling) -> str:
    """Return the prompt and what the model continues it with."""
    ids = torch.tensor([codec.encode_text(prompt)], dtype=torch.int64)
    return prompt + codec.decode(generate(run, ids, sampling)[0][ids.shape[1] :].tolist())


def check_sampling(prompt: Any, tokens: Any, temperature: Any, top_k: Any, seed: Any) -> Sampling:
    """Return how to draw a text. Raises UsageError that names the argument."""

    if not isinstance(prompt, str) or not prompt:
        raise UsageError(f"generate: prompt must be a text that is not empty, got {prompt!r}")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise UsageError("generate: prompt has characters that are no Unicode")
    for name, value, minimum in (("tokens", tokens, 1), ("top_k", top_k, 1), ("seed", seed, 0)):
        if name != "top_k" or value is not None:
            check_whole_number("generate", name, value, minimum)
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not is_number or not 0 <= temperature < math.inf:
        raise UsageError(f"generate: temperature must be a number ≥ 0, got {temperature!r}")
    return Sampling(tokens, temperature, top_k, seed)
