"""Batches that are there when the step wants them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from runner.data.batch import call
from runner.errors import ConfigError
from runner.models import modes
from runner.techniques.base import Evidence, RunBuilder, Technique
from runner.training.run import Run

TRIED = (0, 1, 2, 4)  # workers
CLEARLY = 0.95  # of the time of a step: more workers have to be worth at least that
BACKWARD = 2  # times as long as a forward


@dataclass
class Pipeline(Technique):
    """Fetches ahead of the step, by as many workers as it pays for; copies aside on a GPU.

    Helps where samples are read or decoded one by one. How many workers, and whether any, is
    measured with the run's own batches. The batches are the same, whoever fetches them.
    """

    budget_s: float = 1.0  # what the measuring may take, in all

    def __post_init__(self) -> None:
        if not self.budget_s > 0:
            raise ConfigError("optimization.pipeline.budget_s", "measures nothing", "use > 0")

    def apply(self, draft: RunBuilder) -> str | None:
        """Decide what the data's own knobs leave open."""
        open_to_us = draft.data.device_prefetch is None and draft.data.pin_memory is not False
        if aside := draft.device.kind == "cuda" and open_to_us:
            draft.data = replace(draft.data, device_prefetch=True)
        if draft.data.workers is not None:
            reason = f"data.workers={draft.data.workers} decides"
        elif draft.in_memory:
            reason = "the data is in memory, and workers would only copy it"
        else:
            workers = draft.choose("data.workers", lambda: self._race(draft))
            draft.data = replace(draft.data, workers=workers)
            return None
        if not aside:
            return reason
        draft.remarks["pipeline"] = {"workers_left_alone": reason}
        return None

    def _race(self, draft: RunBuilder) -> tuple[int, str]:
        """How long a step takes with so many workers: its wait for a batch, and its computing.

        Workers fetch while the step computes, so with them the longer of the two counts.
        """
        tried = [count for count in TRIED if count <= draft.device.cores]
        share = self.budget_s / (len(tried) + 1)
        step, once = _step_seconds(draft)
        if once > share:
            return tried[-1], f"a batch takes {once:.1f} s, too long to try others"
        fetch = {n: _fetch_seconds(draft, n, share) for n in tried}
        took = {n: max(fetch[n], step) if n else fetch[n] + step for n in tried}
        best = 0
        for count in tried[1:]:
            if took[count] < CLEARLY * took[best]:
                best = count
        rates = {n: round(1 / seconds, 1) for n, seconds in fetch.items()}
        draft.remarks["pipeline"] = {
            "batches_per_second": rates,
            "wait_share_without_workers": round(fetch[0] / took[0], 4),
        }
        said = ", ".join(f"{1e3 * seconds:.1f} ms with {n}" for n, seconds in fetch.items())
        return best, f"a batch takes {said}; a step computes about {1e3 * step:.1f} ms"

    def engaged(self, run: Run) -> Evidence:
        """Batches that were fetched when the loop asked for them; the time it waited for others.

        Workers that are slower than the step help, too: then the loop waits a smaller share of
        its time than it would without them.
        """
        values = {choice.key: choice.value for choice in run.choices}
        facts: dict[str, Any] = {
            "workers": values.get("data.workers", run.settings["data.workers"]),
            "wait_share": round(run.watch.throughput(None).split.get("data", 0.0), 4),
        }
        facts |= run.remarks.get("pipeline", {})
        ready, asked = run.train.ready()
        if asked:
            shown = Evidence.of_share(
                ready, asked, "batches ready when they were asked for", **facts
            )
            alone = facts.get("wait_share_without_workers", 1.0)
            return replace(shown, engaged=ready > 0 or facts["wait_share"] < alone)
        if facts.setdefault("copied_aside", _copies_aside(run)):
            return Evidence(True, "", facts)
        return Evidence(False, "no worker fetches ahead: they would not pay for themselves", facts)


def _copies_aside(run: Run) -> bool:
    """Whether the loader copies beside the step, which `apply` asks for."""
    refused = any(c.key == "data.device_prefetch" and not c.value for c in run.choices)
    off = run.settings.get("data.device_prefetch") is False
    return run.device.kind == "cuda" and not refused and not off


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


def _step_seconds(draft: RunBuilder) -> tuple[float, float]:
    """About what a step takes to compute, and what its batch took to fetch.

    That is a forward of a copy, without a compiler, and twice as long for the backward; 0 where
    there can be no copy.
    """
    import torch

    from runner.techniques import trial

    loader = draft.loader(replace(draft.data, workers=0))
    asked = perf_counter()
    inputs = next(loader.batches(0))[0]
    fetched = perf_counter() - asked
    try:
        with trial.model_copy(draft) as copy, modes.evaluation_mode(copy.model), torch.no_grad():
            call(copy.model, inputs)  # allocations, choice of kernels
            draft.device.synchronize()
            start = perf_counter()
            call(copy.model, inputs)
            draft.device.synchronize()
            return (1 + BACKWARD) * (perf_counter() - start), fetched
    except trial.NotRestorable:
        return 0.0, fetched
