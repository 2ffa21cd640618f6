"""Prefetching of batches: worker processes, and copies on a separate stream on a GPU.

The number of workers follows from the times of a fetch and a step. The batches are the same with
any number.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from time import perf_counter
from typing import Any

from runner.models.preserved_state import NotRestorable
from runner.techniques.base import Evidence, RunBuilder
from runner.techniques.config import Pipeline
from runner.training.run import Run

MOST = 4  # workers
BUDGET_S = 0.5  # of timed fetching
CLEARLY = 0.05  # share of a step: faster fetching stays in the loop


def apply(knobs: Pipeline, draft: RunBuilder) -> str | None:
    """Decide the loader settings that the `data` group leaves open."""
    open_to_us = draft.data.device_prefetch is None and draft.data.pin_memory is not False
    if aside := draft.device.kind == "cuda" and open_to_us:
        draft.data = replace(draft.data, device_prefetch=True)
    if draft.data.workers is not None:
        reason = f"data.workers={draft.data.workers} decides"
    elif draft.in_memory:
        reason = "the data is in memory, and workers would only copy it"
    else:
        workers = draft.choose("data.workers", lambda: _choose_workers(draft))
        draft.data = replace(draft.data, workers=workers)
        return None
    if not aside:
        return reason
    draft.remarks["pipeline"] = {"workers_left_alone": reason}
    return None


def _choose_workers(draft: RunBuilder) -> tuple[int, str]:
    """Return the workers that fetch a batch per step, or 0 if fetching is fast, and the reason."""
    from runner.techniques.cost import step_seconds

    fetch = _fetch_seconds(draft)
    try:
        step = step_seconds(draft)
    except NotRestorable:
        step = 0.0
    draft.remarks["pipeline"] = {"wait_share_without_workers": round(fetch / (fetch + step), 4)}
    most = min(MOST, draft.device.cores)
    workers = 0 if fetch < CLEARLY * step else min(most, ceil(fetch / step) if step else most)
    return workers, f"a batch takes {1e3 * fetch:.1f} ms; a step computes about {1e3 * step:.1f} ms"


def _fetch_seconds(draft: RunBuilder) -> float:
    """Return the seconds per batch, fetched in this process without any step."""
    loader = draft.loader(replace(draft.data, workers=0))
    try:
        batches = loader.batches(0)
        next(batches)  # opens files
        start, fetched = perf_counter(), 0
        while not fetched or perf_counter() - start < BUDGET_S:
            next(batches)
            fetched += 1
        draft.device.synchronize()
        return (perf_counter() - start) / fetched
    finally:
        loader.close()


def engaged(knobs: Pipeline, run: Run) -> Evidence:
    """Return the share of batches that were ready when requested, and the share of time waited.

    Workers that are slower than the step still engage if the loop waits a smaller share of its
    time than without them.
    """
    choices = {choice.key: choice.value for choice in run.choices}
    facts: dict[str, Any] = {
        "workers": choices.get("data.workers", run.settings["data.workers"]),
        "wait_share": round(run.watch.throughput(None).split.get("data", 0.0), 4),
        **run.remarks.get("pipeline", {}),
    }
    ready, asked = run.train.ready()
    if asked:
        shown = Evidence.of_share(ready, asked, "batches ready when requested", **facts)
        alone = facts.get("wait_share_without_workers", 1.0)
        return replace(shown, engaged=ready > 0 or facts["wait_share"] < alone)
    refused = any(c.key == "data.device_prefetch" and not c.value for c in run.choices)
    off = run.settings.get("data.device_prefetch") is False
    facts["copied_aside"] = aside = run.device.kind == "cuda" and not refused and not off
    reason = "" if aside else "no prefetching workers: they cost more than they save"
    return Evidence(aside, reason, facts)
