"""Texts that a language model generates at each validation, in TensorBoard's text tab."""

from __future__ import annotations

import logging

import numpy as np
import torch

from runner.core.config.run_config import RunConfig
from runner.core.data.dataset import Dataset
from runner.core.device.device_errors import is_out_of_memory
from runner.core.errors import ConfigError, DataError
from runner.core.execution.generate import Sampling, generate
from runner.core.interfaces.batch import TextCodec
from runner.core.interfaces.hook import Evaluation, Hook
from runner.core.interfaces.run import Run
from runner.core.record.text import summarize_error
from runner.core.schemas.jobs import JobKind

log = logging.getLogger("runner")

TAG = "val/samples"
PROMPT = 16  # tokens at the start of a validation sample
TOKENS = 48  # generated
DEFAULT_COUNT = 3  # with data=text_lm


def text_samples(config: RunConfig, data: Dataset) -> list[Hook]:
    """Return the hook that writes texts of the model, if any are asked for. Raises ConfigError."""
    count, codec = config.monitoring.samples, getattr(data, "codec", None)
    if count is None:
        is_ours = config.data._target_ is None and config.model._target_ is None
        count = DEFAULT_COUNT if is_ours else 0
    if not count or config.job.kind is not JobKind.train:
        return []
    if codec is None:
        problem = f"needs text, which data={config.data.kind} does not have"
        raise ConfigError("monitoring.samples", problem, "use data=text_lm, or leave it out")
    return [TextSamples(count, codec)]


class TextSamples(Hook):
    """Continues the first tokens of the same validation samples, by a generator of its own."""

    monitors = True

    def __init__(self, count: int, codec: TextCodec) -> None:
        self.count, self.codec, self.failed = count, codec, False

    def on_validation(self, run: Run, evaluation: Evaluation) -> None:
        """Write the texts; only in the first process, which needs all of the weights."""
        if run.rank or run.shards is not None or self.failed:
            return
        source = run.validation.fetch.source
        inputs, _ = source.fetch(np.sort(source.validation)[: self.count], None)
        prompts = inputs[:, : min(PROMPT, max(1, inputs.shape[1] // 2))]
        try:
            made = generate(run, prompts, Sampling(TOKENS, seed=run.seed))
        except DataError as error:  # outputs that are not finite
            run.recorder.text(TAG, str(error), evaluation.step)
            return
        except Exception as error:  # of the user's model, which may take no shorter texts
            if is_out_of_memory(error):
                raise
            self.failed = True
            log.warning("monitoring.samples: no texts from now on: %s", summarize_error(error))
            return
        texts = [self._show(row, prompts.shape[1]) for row in made.cpu()]  # host sync: a validation
        run.recorder.text(TAG, "\n\n".join(texts), evaluation.step)

    def _show(self, ids: torch.Tensor, start: int) -> str:
        """Return a code block of the prompt, a mark, and what follows."""
        # host sync: none, ids on the host
        prompt, rest = (self.codec.decode(part.tolist()) for part in (ids[:start], ids[start:]))
        return "\n".join(f"    {line}" for line in f"{prompt} ▸ {rest}".split("\n"))
