"""The evidence of a run's techniques, and its summary, which is built from its parts."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from runner.core.device import memory
from runner.core.device.device_errors import is_out_of_memory
from runner.core.errors import StorageError
from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, TechniqueStatus
from runner.core.masking import mask_secrets
from runner.core.record import provenance
from runner.core.record.summary import ENDS, CheckpointPaths, MemoryPeaks, Summary

log = logging.getLogger("runner")
UNKNOWN = "unknown"  # status of evidence that was not looked at


def build_summary(
    run: Run,
    status: str,
    reason: str = "",
    required: bool = False,
    job: str = "train",
    ended_by: str = "",
) -> Summary:
    """Build the summary and write it to the run's folder as `summary.json`.

    `ended_by` is what ended the run; "" takes it from the status. If the summary cannot be written,
    raise StorageError with `required`, else log and keep the earlier file.
    """
    progress = run.progress
    tokens = run.sizes.sequence if run.objective.unit == "tokens" else None  # a sample
    summary = Summary(
        status=status,
        reason=mask_secrets(reason),
        ended_by=None if status == "running" else ended_by or ENDS.get(status, "error"),
        steps=progress.step,
        resumed_step=run.resumed_step,
        epochs=run.epoch,
        metrics={**progress.metrics, **run.test_metrics},
        tested=dict(run.tested),
        baseline=dict(run.baseline),
        job=job,
        monitor=run.monitor,
        best=progress.best,
        best_step=progress.best_step,
        throughput=run.stopwatch.throughput(tokens),
        memory=MemoryPeaks(memory.peak_process_bytes(), memory.peak_device_bytes(run.device)),
        techniques=technique_statuses(run),
        tools=[cost for hook in run.hooks if (cost := hook.cost(run)) is not None],
        skipped_steps=progress.skipped,
        faults=run.count_faults(),
        checkpoint=CheckpointPaths(run.checkpointer.last, run.checkpointer.best),
        device=run.device.describe(),
        versions=provenance.versions(),
        config_hash=run.config_hash,
        command=provenance.command(),
        name=run.name,
        wall_seconds=time.monotonic() - run.started,
        choices=[*run.choices, *([] if run.bad_samples is None else run.bad_samples.choices())],
        git=provenance.git_state() or {},
        model_check=run.model_check,
        columns=run.columns,
        distributed=run.distributed,
    )
    if run.is_shared:  # the other processes of the run are not told apart
        summary.throughput.other_cpu_share = None
    run.history.write()
    if run.folder is not None and run.writes:
        try:
            summary.write(run.folder)
        except StorageError as error:
            if required:
                raise
            log.warning("%s; the previous one is kept", error)
            if status != "running":
                summary.write_status(run.folder)
    return summary


def record_failure(run: Run, reason: str) -> None:
    """Write `failed` into the last summary, from host memory alone: a lost device would raise."""
    run.history.write()
    if run.folder is not None and run.writes:
        with suppress(StorageError):
            summary = Summary.read(run.folder)
            summary.set_end("failed", mask_secrets(reason))
            summary.steps, summary.faults = run.progress.step, run.count_faults()
            summary.write(run.folder)


def collect_evidence(run: Run) -> None:
    """Collect the evidence of every technique; restores the model, its attributes included."""
    from runner.core.preserved_state import large_parameters, preserve_state

    if not run.techniques:
        return
    if run.stopped_by == "memory":  # copies of what the model holds could end the process
        _skip_evidence(run, "the run was stopped for memory")
        return
    roots, safe = (run.model, run.forward, run.objective), large_parameters(run.model)
    try:
        with preserve_state(*roots, device=run.device.torch, safe=safe):
            for name, technique in run.techniques:
                if run.is_rejected(name):
                    continue
                try:
                    run.evidence[name] = technique.engaged(run)
                except Exception as error:  # must not end the run
                    reason = f"evidence could not be collected: {error}"
                    run.evidence[name] = Evidence(False, reason)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        _skip_evidence(run, "too little memory for a copy of the model")


def _skip_evidence(run: Run, reason: str) -> None:
    for name, _ in run.techniques:
        run.evidence.setdefault(name, Evidence(False, f"not looked at: {reason}", status=UNKNOWN))


def technique_statuses(run: Run) -> list[TechniqueStatus]:
    """A row per technique: requested, engaged, and the evidence collected so far."""
    rows = {row.name: row for row in run.unapplied_techniques}
    for name, _ in run.techniques:
        evidence = run.measured_evidence(name)
        fallback_reason = run.fallback_reasons.get(name, "")
        if evidence is None:
            reason = fallback_reason or "the run ended before evidence was collected"
            status = "fell back" if fallback_reason else ""
            known = bool(fallback_reason)
            rows[name] = TechniqueStatus(name, True, False, reason, known=known, status=status)
            continue
        status = "fell back" if fallback_reason else evidence.status or "failed"
        status = "engaged" if evidence.engaged else status
        is_known = status != UNKNOWN
        status = "skipped" if run.is_rejected(name) else status
        rows[name] = TechniqueStatus(
            name, True, evidence.engaged, evidence.reason, evidence.facts, known=is_known,
            status=status if is_known else "",
        )  # fmt: skip
    return list(rows.values())
