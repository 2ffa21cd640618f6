"""What follows an error of a step or of a state: notes, a capture, a checkpoint; `strict`."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from runner.core.device.device_errors import is_device_error, is_out_of_memory
from runner.core.errors import (
    CheckpointError,
    ConfigError,
    Interrupted,
    OutOfMemory,
    ProcessLost,
    RestartRequired,
    StorageError,
    error_text,
)
from runner.core.interfaces.batch import Batch, Inputs, call_model
from runner.core.interfaces.nested import describe
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import NotNeeded, RunBuilder
from runner.core.record.text import summarize_error
from runner.core.train.changed_settings import changed_settings
from runner.core.train.evidence import collect_evidence, technique_statuses
from runner.core.train.run_state import save

log = logging.getLogger("runner")

SIZE_ERROR = re.compile("shape|size|input|dimension|dtype|should contain")
STATE_GROUPS = ("model.", "optimizer.", "optimization.", "data.")  # config that a state depends on
MAX_KEYS = 4  # in a message


def add_error_note(run: Run | RunBuilder, batch: Batch, error: Exception) -> None:
    """Add a note to torch's error about sizes or a missing gradient.

    ConfigError in its place if the model's forward has no parameters for the inputs.
    """
    text = str(error)
    if isinstance(error, TypeError):
        _check_parameters(run.model, batch[0], error)
    if not isinstance(error, RuntimeError | ValueError) or is_out_of_memory(error):
        return
    if "does not require grad" in text:
        fix = "remove .detach() and torch.no_grad() from the forward of the model and from the loss"
        error.add_note(f"the loss depends on no weight that is trained; {fix}")
    elif SIZE_ERROR.search(text):
        sizes = ", ".join(f"{k}={v}" for k, v in run.sizes.for_constructor().items())
        fix = f"; a model._target_ of your own may take {sizes}" if sizes else ""
        error.add_note(f"data gives the model {describe(batch[0])}{fix}")


def _check_parameters(model: nn.Module, inputs: Inputs, error: TypeError) -> None:
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # it has none, such as one written in C
        return
    try:
        call_model(signature.bind, inputs)
    except TypeError:
        parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        form = inspect.Signature(parameters)
        problem = f"{type(model).__name__}.forward{form} does not take what data gives"
        fix = "change model or data: a dict is passed by name, a tuple by position"
        raise ConfigError("model", f"{problem}, {describe(inputs)}", fix) from error


def name_changed_keys(
    error: CheckpointError, before: Mapping[str, str], settings: Mapping[str, Any]
) -> CheckpointError:
    """Return the error of a state that does not fit, with the keys that have other values now."""
    changed = [
        f"{key}={was}, not {value}"
        for group in STATE_GROUPS
        for key, (was, value) in changed_settings(before, settings).items()
        if key.startswith(group)
    ]
    return CheckpointError(f"{error}: {'; '.join(changed[:MAX_KEYS])}") if changed else error


def capture_failed_step(run: Run, step: int, batch: Batch, error: Exception) -> None:
    """Capture a failed step, unless the cause is memory, disk, config or another process."""
    process_lost = isinstance(error, ProcessLost | RestartRequired)
    process_lost = process_lost or run.world.means_loss(error)
    has_other_cause = isinstance(error, Interrupted | StorageError | OutOfMemory | ConfigError)
    if process_lost or has_other_cause or is_out_of_memory(error) or is_device_error(error):
        return
    run.update.abandon()
    message, capture = error_text(error), None
    if run.captures is not None:
        capture = run.captures.take(run, step, "exception", message, batch)
        run.captures.log_capture()  # before the log line of the fault, which is the last
    run.history.add(
        "exception", message, step=step, category="code", severity="error", action="the run ends",
        error=error, capture=capture or "", say=False,
    )  # fmt: skip


def save_after_exception(
    run: Run, flush: Callable[[], object], resume_hint: Callable[[], str]
) -> None:
    """Save the state after the last update; a failure is logged, as the exception says more."""
    try:
        with suppress(Exception):  # of hooks, perhaps the same as before
            flush()
        # its validation may have been recorded before a hook failed
        best = run.progress.best_step == run.progress.step > 0
        saved_best = str(run.checkpointer.best).endswith(f"{run.progress.step:08d}")
        save(run, best=best and not saved_best, failed=True)
        run.checkpointer.close()
        log.info("stopped%s", resume_hint())
    except Exception as error:
        log.warning("step %d: not saved: %s", run.progress.step, summarize_error(error))


def enforce_strict(run: Run) -> None:
    """Raise ConfigError if a requested technique did not engage."""
    run.strict = False  # once is enough
    collect_evidence(run)
    for row in technique_statuses(run):
        if row.requested and not (row.engaged or isinstance(row.reason, NotNeeded)):
            fix = "switch it off or set optimization.strict=false"
            raise ConfigError(f"optimization.{row.name}", f"did not engage: {row.reason}", fix)
