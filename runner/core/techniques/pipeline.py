"""Prefetching of batches: worker processes, and copies on a separate stream on a GPU.

The number of workers follows from the times of a fetch and a step. The batches are the same with
any number.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from time import perf_counter
from typing import Any

from runner.core.interfaces.run import Run
from runner.core.interfaces.technique import Evidence, RunBuilder
from runner.core.preserved_state import NotRestorable
from runner.core.schemas.optimization import Pipeline

MAX_WORKERS = 4  # workers
TIMING_BUDGET_S = 0.5  # of timed fetching
NEGLIGIBLE_SHARE = 0.05  # share of a step: faster fetching stays in the loop


def apply(config: Pipeline, builder: RunBuilder) -> str | None:
    """Decide the loader settings that the `data` group leaves open."""
    is_undecided = builder.data.device_prefetch is None and builder.data.pin_memory is not False
    if uses_stream := builder.device.kind == "cuda" and is_undecided:
        builder.data = replace(builder.data, device_prefetch=True)
    if builder.data.workers is not None:
        reason = f"data.workers={builder.data.workers} decides"
    elif builder.in_memory:
        reason = "the data is in memory, and workers would only copy it"
    elif builder.is_stream:
        reason = "a stream's order depends on its workers; data.workers decides"
    else:
        workers = builder.choose("data.workers", lambda: _choose_workers(builder))
        builder.data = replace(builder.data, workers=workers)
        return None
    if not uses_stream:
        return reason
    builder.technique_facts["pipeline"] = {"workers_left_alone": reason}
    return None


def _choose_workers(builder: RunBuilder) -> tuple[int, str]:
    """Return the workers that fetch a batch per step, or 0 if fetching is fast, and the reason."""
    from runner.core.techniques.cost import step_seconds

    fetch = _fetch_seconds(builder)
    try:
        step = step_seconds(builder)
    except NotRestorable:
        step = 0.0
    share = round(fetch / (fetch + step), 4)
    builder.technique_facts["pipeline"] = {"wait_share_without_workers": share}
    limit = min(MAX_WORKERS, builder.device.cores)
    needed = ceil(fetch / step) if step else limit
    workers = 0 if fetch < NEGLIGIBLE_SHARE * step else min(limit, needed)
    return workers, f"a batch takes {1e3 * fetch:.1f} ms; a step computes about {1e3 * step:.1f} ms"


def _fetch_seconds(builder: RunBuilder) -> float:
    """Return the seconds per batch, fetched in this process without any step."""
    loader = builder.loader(replace(builder.data, workers=0))
    try:
        batches = loader.batches(0)
        next(batches)  # opens files
        start, fetched = perf_counter(), 0
        while not fetched or perf_counter() - start < TIMING_BUDGET_S:
            next(batches)
            fetched += 1
        return (builder.device.clock() - start) / fetched
    finally:
        loader.close()


def engaged(config: Pipeline, run: Run) -> Evidence:
    """Return the share of batches that were ready when requested, and the share of time waited.

    Workers that are slower than the step still engage if the loop waits a smaller share of its
    time than without them.
    """
    choices = {choice.key: choice.value for choice in run.choices}
    facts: dict[str, Any] = {
        "workers": choices.get("data.workers", run.settings["data.workers"]),
        "wait_share": round(run.stopwatch.throughput(None).split.get("data", 0.0), 4),
        **run.technique_facts.get("pipeline", {}),
    }
    ready, requested = run.train.ready()
    if requested:
        evidence = Evidence.of_share(ready, requested, "batches ready when requested", **facts)
        wait_without_workers = facts.get("wait_share_without_workers", 1.0)
        return replace(evidence, engaged=ready > 0 or facts["wait_share"] < wait_without_workers)
    refused = any(c.key == "data.device_prefetch" and not c.value for c in run.choices)
    is_off = run.settings.get("data.device_prefetch") is False
    facts["copied_aside"] = uses_stream = run.device.kind == "cuda" and not refused and not is_off
    reason = "" if uses_stream else "no prefetching workers: they cost more than they save"
    return Evidence(uses_stream, reason, facts)
