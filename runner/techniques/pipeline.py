"""Batches that are there when the step wants them: worker processes, and copies aside on a GPU.

How many workers, and whether any, is measured with the run's own batches. The batches are the
same, whoever fetches them.
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import Any

from runner.models.preserved_state import NotRestorable
from runner.techniques.base import Evidence, RunBuilder
from runner.techniques.config import Pipeline
from runner.training.run import Run

TRIED = (0, 1, 2, 4)  # workers
CLEARLY = 0.95  # of the time of a step: more workers have to be worth at least that


def apply(knobs: Pipeline, draft: RunBuilder) -> str | None:
    """Decide what the data's own knobs leave open."""
    open_to_us = draft.data.device_prefetch is None and draft.data.pin_memory is not False
    if aside := draft.device.kind == "cuda" and open_to_us:
        draft.data = replace(draft.data, device_prefetch=True)
    if draft.data.workers is not None:
        reason = f"data.workers={draft.data.workers} decides"
    elif draft.in_memory:
        reason = "the data is in memory, and workers would only copy it"
    else:
        workers = draft.choose("data.workers", lambda: _choose_workers(knobs, draft))
        draft.data = replace(draft.data, workers=workers)
        return None
    if not aside:
        return reason
    draft.remarks["pipeline"] = {"workers_left_alone": reason}
    return None


def _choose_workers(knobs: Pipeline, draft: RunBuilder) -> tuple[int, str]:
    """The fewest workers with which a step takes about the least: its wait and its computing.

    Workers fetch while the step computes, so with them the longer of the two counts.
    """
    from runner.techniques.cost import step_seconds

    tried = [count for count in TRIED if count <= draft.device.cores]
    share = knobs.budget_s / (len(tried) + 1)
    first = _fetch_seconds(draft, 0, 0.0)
    if first > share:
        return tried[-1], f"a batch takes {first:.1f} s, too long to try others"
    try:
        step = step_seconds(draft)
    except NotRestorable:
        step = 0.0
    fetch = {n: _fetch_seconds(draft, n, share) for n in tried}
    took = {n: max(fetch[n], step) if n else fetch[n] + step for n in tried}
    best = 0
    for count in tried[1:]:
        if took[count] < CLEARLY * took[best]:
            best = count
    draft.remarks["pipeline"] = {
        "batches_per_second": {n: round(1 / seconds, 1) for n, seconds in fetch.items()},
        "wait_share_without_workers": round(fetch[0] / took[0], 4),
    }
    times = ", ".join(f"{1e3 * seconds:.1f} ms with {n}" for n, seconds in fetch.items())
    return best, f"a batch takes {times}; a step computes about {1e3 * step:.1f} ms"


def _fetch_seconds(draft: RunBuilder, workers: int, budget_s: float) -> float:
    """Seconds a batch, fetched by so many workers and nothing else going on."""
    loader = draft.loader(replace(draft.data, workers=workers))
    try:
        batches = loader.batches(0)
        next(batches)  # workers start, files are opened
        start, fetched = perf_counter(), 0
        while fetched < max(1, workers) or perf_counter() - start < budget_s:
            next(batches)
            fetched += 1
        draft.device.synchronize()
        return (perf_counter() - start) / fetched
    finally:
        loader.close()


def engaged(knobs: Pipeline, run: Run) -> Evidence:
    """Batches that were fetched when the loop asked for them; the time it waited for others.

    Workers that are slower than the step help, too: then the loop waits a smaller share of
    its time than it would without them.
    """
    choices = {choice.key: choice.value for choice in run.choices}
    facts: dict[str, Any] = {
        "workers": choices.get("data.workers", run.settings["data.workers"]),
        "wait_share": round(run.watch.throughput(None).split.get("data", 0.0), 4),
        **run.remarks.get("pipeline", {}),
    }
    ready, asked = run.train.ready()
    if asked:
        shown = Evidence.of_share(ready, asked, "batches ready when they were asked for", **facts)
        alone = facts.get("wait_share_without_workers", 1.0)
        return replace(shown, engaged=ready > 0 or facts["wait_share"] < alone)
    refused = any(c.key == "data.device_prefetch" and not c.value for c in run.choices)
    off = run.settings.get("data.device_prefetch") is False
    facts["copied_aside"] = aside = run.device.kind == "cuda" and not refused and not off
    reason = "" if aside else "no worker fetches ahead: they would not pay for themselves"
    return Evidence(aside, reason, facts)
