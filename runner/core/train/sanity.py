"""The sanity check: one batch is validated before the first step, without a trace."""

from __future__ import annotations

import logging
import traceback
from contextlib import ExitStack
from functools import partial
from typing import Any

from runner.core.device.device_errors import is_device_error, is_out_of_memory
from runner.core.errors import ConfigError, RunnerError
from runner.core.execution.evaluation import inference
from runner.core.interfaces.batch import batch_size_of, call_model
from runner.core.interfaces.nested import describe
from runner.core.interfaces.objective import unknown_metric
from runner.core.interfaces.run import Run
from runner.core.preserved_state import (
    NotRestorable,
    large_parameters,
    preserve_random_state,
    preserve_state,
)
from runner.core.record.text import summarize_error

log = logging.getLogger("runner")
KEY = "training.sanity"
METRICS = {"classification": "Accuracy", "regression": "MeanSquaredError"}
"""A metric of `objective.metrics` by task, for a model without a loss in evaluation mode."""


def validate_one_batch(run: Run) -> None:
    """Validate the first batch of the validation set before step 1; all state is restored.

    An error of the model is raised as it is. An error of the objective is a ConfigError that says
    what the model returned in evaluation mode. Out of memory is left to the validation, which makes
    smaller parts. If data or model hold a generator or an open file, which cannot be restored,
    nothing is called.
    """
    source: object = run.validation.fetch.source
    dataset = getattr(source, "dataset", source)  # the user's own
    # reading changes none of ours, and no stream, which is opened anew
    ours = type(dataset).__module__.startswith("runner.") or run.validation.is_stream
    data_roots, parts = [] if ours else [source], (run.model, run.objective)
    preserve = partial(preserve_state, device=run.device.torch, complete=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(preserve(*data_roots, is_data=True))
            if run.shards is None:
                stack.enter_context(preserve(*parts, safe=large_parameters(run.model)))
            else:  # the shards' weights do not change in a forward
                run.update.buffers.save()
                stack.callback(run.update.buffers.restore)
                stack.enter_context(preserve_random_state())
        except NotRestorable as reason:
            log.info("%s: skipped: %s", KEY, reason)
            return
        try:
            _validate(run)
        except Exception as error:
            if not is_out_of_memory(error):
                raise


def _validate(run: Run) -> None:
    batch = run.validation.at(0)
    samples = batch_size_of(batch[1])
    with inference(run) as forward:
        outputs: list[Any] = []

        def compute(part: Any) -> Any:
            outputs[:] = [call_model(forward, part[0])]
            return run.objective.all_batch_sums(outputs[0], part[1])

        try:
            if run.shards is None:
                sums = compute(batch)
            else:
                total, own = run.validation.samples(0), 0 if run.validation.empty else samples
                size = run.micro_batch  # the same for all processes, which forward equally often
                parts = run.shards.map_micro_batches(batch, total, size, own, compute)
                sums = parts[0] if parts else {}
            if sums and int(sums.get("count", 1)):  # other batches may have targets
                _check_metrics(run, run.objective.all_metrics(sums), describe(outputs[0]))
        except Exception as error:
            if not outputs or is_out_of_memory(error) or is_device_error(error):
                from runner.core.train.failures import add_error_note  # imported only if used

                add_error_note(run, batch, error)
                raise  # of the model itself
            raise _objective_error(error, describe(outputs[0])) from error


def _check_metrics(run: Run, metrics: dict[str, float], returned: str) -> None:
    """Raise ConfigError if the loss is monitored and missing; others may need more than a batch."""
    available = [f"val/{name}" for name in metrics]
    if run.monitor == "val/loss" and run.monitor not in available:
        problem = f"there is no val/loss: in evaluation mode the model returned {returned}"
        fix = "return the loss in evaluation mode, too"
        if metric := METRICS.get(run.sizes.task):
            fix = f"use objective.metrics=[{metric}] training.monitor=val/{metric}, or {fix}"
        raise ConfigError("training.monitor", problem, fix)
    is_ours = not run.monitor.startswith("user/")
    if is_ours and run.monitor not in available and run.validation.steps_per_epoch == 1:
        raise unknown_metric(run.monitor, sorted(available))


def _objective_error(error: Exception, returned: str) -> Exception:
    where = f"validating one batch before step 1; in evaluation mode the model returned {returned}"
    if isinstance(error, ConfigError):
        text = str(error).removeprefix(f"{error.key}: ")
        return ConfigError(error.key, f"{text} ({where})")
    if isinstance(error, RunnerError):
        return error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    problem = f"{summarize_error(error)} ({frame.filename}:{frame.lineno}), {where}"
    trace = "".join(traceback.format_exception(error))
    return ConfigError(KEY, problem, f"{KEY}=false trains without this check\n{trace}")
