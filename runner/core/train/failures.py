"""What follows a step that fails, and a technique that does not engage under `strict`."""

from __future__ import annotations

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
from runner.core.train.evidence import collect_evidence, technique_statuses


def capture_failed_step(run: Run, step: int, batch: Batch, error: Exception) -> None:
    """Capture a failed step, unless the cause is memory, disk, config or another process."""
    process_lost = isinstance(error, ProcessLost | RestartRequired)
    process_lost = process_lost or run.world.means_loss(error)
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


def enforce_strict(run: Run) -> None:
    """Raise ConfigError if a requested technique did not engage."""
    run.strict = False  # once is enough
    collect_evidence(run)
    for row in technique_statuses(run):
        if row.requested and not (row.engaged or isinstance(row.reason, NotNeeded)):
            fix = "switch it off or set optimization.strict=false"
            raise ConfigError(f"optimization.{row.name}", f"did not engage: {row.reason}", fix)
