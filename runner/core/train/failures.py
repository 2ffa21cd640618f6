"""What follows a step that fails, and a technique that does not engage under `strict`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from runner.core.device.device_errors import is_device_error, is_out_of_memory
from runner.core.errors import (
    ConfigError,
    Interrupted,
    OutOfMemory,
    ProcessLost,
    RestartRequired,
    StorageError,
)
from runner.core.interfaces.batch import Batch
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import NotNeeded
from runner.core.record.text import summarize_error
from runner.core.train.evidence import collect_evidence, technique_statuses
from runner.core.train.run_state import save

log = logging.getLogger("runner")


def means_lost_process(run: Run, error: BaseException) -> bool:
    """Whether the error means that another process has ended or does not answer."""
    return run.world.means_loss(error)


def capture_failed_step(run: Run, step: int, batch: Batch, error: Exception) -> None:
    """Capture a failed step, unless the cause is memory, disk, config or another process."""
    process_lost = isinstance(error, ProcessLost | RestartRequired)
    process_lost = process_lost or means_lost_process(run, error)
    has_other_cause = isinstance(error, Interrupted | StorageError | OutOfMemory | ConfigError)
    if process_lost or has_other_cause or is_out_of_memory(error) or is_device_error(error):
        return
    run.update.abandon()
    message, capture = f"{type(error).__name__}: {error}", None
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
