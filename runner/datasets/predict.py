"""job=predict: write a trained model's predictions for each sample to a file."""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runner.core.config.run_config import RunConfig
from runner.core.data.dataset import Dataset
from runner.core.data.loader import BatchLoader
from runner.core.errors import StorageError
from runner.core.execution.evaluation import apply_in_parts, inference
from runner.core.format import count_noun
from runner.core.interfaces.batch import Sizes, call_model
from runner.core.interfaces.run import Run
from runner.core.jobs import run_report as report
from runner.core.jobs.evaluate import build_trained
from runner.core.objectives.model_output import class_logits, logits
from runner.core.record.console import console, supports_live_display
from runner.core.record.storage import remove_file, rename, safe_opener
from runner.core.record.summary import Summary
from runner.core.schemas.jobs import PredictFormat
from runner.core.train.evidence import build_summary

log = logging.getLogger("runner")

PredictionColumns = dict[str, Any]  # name → numpy or Arrow array


def main(config: RunConfig, folder: Path) -> Summary:
    """Predict with the weights of `checkpoint.resume` or `model.weights` into `folder`."""
    if config.predict.prompt is not None:
        from runner.datasets.continued_text import continue_prompt

        return continue_prompt(config, folder)
    with build_trained(config, folder) as run:
        run.history.load({"counts": {}, "faults": []})  # drop the faults of the training
        kind = config.predict.format
        path = folder / f"predictions.{kind.name}"
        try:
            rows = write_predictions(run, path, kind)
            size = path.stat().st_size
        except OSError as error:
            raise StorageError(f"{path}: not written: {error.strerror or error}") from error
        run.progress.metrics, run.techniques = {}, []  # they concern training
        run.choices[:] = [choice for choice in run.choices if choice.key.startswith("data.")]
        summary = build_summary(run, "done", job="predict")
        summary.export = {"file": path.name, "rows": rows, "bytes": size}
        summary.write(folder)
        report.write_report(summary, folder)
    return summary


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
        values = sizes.in_target_unit(output.double())
        values = values.reshape(len(values), -1)
        # float32 outputs are precise to about 1e-7 of the targets' deviation
        if sizes == sizes.unscaled() or sizes.log_target:  # … or of the smaller one of value and 1
            size = values.abs().clamp(1e-30, 1.0)
            factor = 10.0 ** (7 - size.log10().floor())
            values = (values * factor).round() / factor
        else:
            values = values.round(decimals=7 - math.floor(math.log10(sizes.target_deviation)))
        if values.shape[1] == 1:
            return {"prediction": values[:, 0].numpy()}
        return {f"prediction {i}": values[:, i].numpy() for i in range(values.shape[1])}
    output = class_logits(output, sizes.classes)
    names = sizes.class_names or tuple(map(str, range(output.shape[1])))
    probability = output.double().softmax(1).float()
    predicted = np.array(names, dtype=object)[probability.argmax(1).numpy()]
    each = {f"probability {name}": probability[:, i].numpy() for i, name in enumerate(names)}
    return {"prediction": predicted, **each}
