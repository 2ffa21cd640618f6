"""Texts that a trained language model continues: `predict.prompt` and `Trained.generate`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from runner.core.build.trained_data import read_preprocessing
from runner.core.checkpoint.checkpointer import Checkpointer
from runner.core.config.run_config import RunConfig
from runner.core.data.dataset import Dataset, TensorsDataset
from runner.core.data.preprocessing import Preprocessing
from runner.core.errors import ConfigError, StorageError, UsageError
from runner.core.execution.generate import Sampling, generate
from runner.core.interfaces.batch import TextCodec
from runner.core.interfaces.run import Run
from runner.core.jobs import run_report as report
from runner.core.jobs.evaluate import build_trained
from runner.core.record.storage import replace_text
from runner.core.record.summary import Summary
from runner.core.record.text import escape_control_chars
from runner.core.security.files.policy import FilePolicy
from runner.core.security.paths import run_tree_folders
from runner.core.standard_streams import write_stream
from runner.core.train.evidence import build_summary
from runner.datasets.text_lm import find_codec


def continue_prompt(config: RunConfig, folder: Path) -> Summary:
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
        try:
            replace_text(path, text.encode("utf-8", "replace").decode())
            size = path.stat().st_size
        except OSError as error:
            raise StorageError(f"{path}: not written: {error.strerror or error}") from error
        lines = map(escape_control_chars, text.encode("utf-8", "replace").decode().split("\n"))
        write_stream(sys.stdout, "\n".join(lines) + "\n")
        run.progress.metrics, run.techniques = {}, []  # they concern training
        run.choices.clear()
        summary = build_summary(run, "done", job="predict")
        summary.export = {"file": path.name, "tokens": sampling.tokens, "bytes": size}
        summary.write(folder)
        report.write_report(summary, folder)
    return summary


@contextmanager
def prompted_run(
    config: RunConfig, fitted: Preprocessing, folder: Path | None = None
) -> Iterator[Run]:
    """Yield the run of a trained language model, without its data. Raises ConfigError."""
    if fitted.sizes.task != "language_modelling":
        problem = f"needs a language model, but this one was trained on data={fitted.kind}"
        raise ConfigError("predict.prompt", problem, "leave it out")
    config = replace(config, predict=replace(config.predict, prompt="…"))
    with build_trained(config, folder, _stand_in(fitted)) as run:
        yield run


def continue_text(run: Run, codec: TextCodec, prompt: str, sampling: Sampling) -> str:
    """Return the prompt and what the model continues it with."""
    ids = torch.tensor([codec.encode_text(prompt)], dtype=torch.int64)
    made = generate(run, ids, sampling)[0]
    return prompt + codec.decode(made[ids.shape[1] :].tolist())


def check_sampling(
    prompt: object, tokens: object, temperature: object, top_k: object, seed: object
) -> Sampling:
    """Return how to draw a text. Raises UsageError that names the argument."""

    def is_int(value: object, least: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    problems = {
        f"prompt must be a text that is not empty, got {prompt!r}": not (
            isinstance(prompt, str) and prompt
        ),
        "prompt has characters that are no Unicode": isinstance(prompt, str)
        and any("\ud800" <= letter <= "\udfff" for letter in prompt),
        f"tokens must be an int ≥ 1, got {tokens!r}": not is_int(tokens, 1),
        f"temperature must be a number ≥ 0, got {temperature!r}": not (
            is_number and 0 <= float(temperature) < math.inf  # type: ignore[arg-type]
        ),
        f"top_k must be None or an int ≥ 1, got {top_k!r}": not (top_k is None or is_int(top_k, 1)),
        f"seed must be an int ≥ 0, got {seed!r}": not is_int(seed, 0),
    }
    for problem, is_wrong in problems.items():
        if is_wrong:
            raise UsageError(f"generate: {problem}")
    return Sampling(tokens, temperature, top_k, seed)  # type: ignore[arg-type]


def _stand_in(fitted: Preprocessing) -> Dataset:
    """Return two samples of zeros, since a run is built with data."""
    ids = torch.zeros((2, fitted.sizes.sequence or 1), dtype=torch.int64)
    return TensorsDataset(ids, ids, fitted.sizes, (np.arange(1), np.arange(1, 2)))
