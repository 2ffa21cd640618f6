"""The summary of a run as it stands, gathered from its parts."""

from __future__ import annotations

import time
from collections import Counter

from runner.device import memory
from runner.record import provenance
from runner.run import Run
from runner.summary import CheckpointPaths, MemoryPeaks, Summary
from runner.technique import Engagement, Evidence


def summarise(run: Run, status: str, reason: str = "") -> Summary:
    """How the run stands; written to its folder as `summary.json`."""
    progress = run.progress
    faults = Counter(run.history.counts)
    faults.update(run.recorder.faults)
    faults.update(run.checkpointer.faults)
    summary = Summary(
        status=status,
        reason=reason,
        steps=progress.step,
        epochs=run.epoch,
        metrics=dict(progress.metrics),
        monitor=run.monitor,
        best=progress.best,
        best_step=progress.best_step,
        throughput=run.watch.throughput(
            run.sizes.sequence if run.objective.unit == "tokens" else None
        ),
        memory=MemoryPeaks(
            memory.peak_process_bytes(),
            memory.peak_device_bytes(run.device),
            run.predicted_bytes,
        ),
        techniques=engagements(run),
        tools=[cost for hook in run.hooks if (cost := hook.cost(run)) is not None],
        skipped_steps=progress.skipped,
        faults=dict(faults),
        checkpoint=CheckpointPaths(run.checkpointer.last, run.checkpointer.best),
        device=run.device.describe(),
        versions=provenance.versions(),
        config_hash=run.config_hash,
        command=provenance.command(),
        name=run.name,
        wall_seconds=time.monotonic() - run.started,
        choices=list(run.choices),
        git=provenance.git_state() or {},
    )
    run.history.write()
    if run.folder is not None:
        summary.write(run.folder)
    return summary


def look(run: Run) -> None:
    """Gather the evidence of every technique; some run the model once, so not after a failure."""
    for name, technique in run.techniques:
        try:
            run.evidence[name] = technique.engaged(run)
        except Exception as error:  # a look must not end a run
            run.evidence[name] = Evidence(False, f"could not be looked at: {error}")


def engagements(run: Run) -> list[Engagement]:
    """Every technique: asked for or not, taken hold or not, and the evidence gathered so far."""
    rows = {row.name: row for row in run.engagements}
    unseen = Evidence(False, "the run ended before it was looked at")
    for name, _ in run.techniques:
        evidence = run.evidence.get(name, unseen)
        rows[name] = Engagement(name, True, evidence.engaged, evidence.reason, evidence.facts)
    return list(rows.values())
