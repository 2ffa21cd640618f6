"""The pipeline: workers where they pay, chosen from measured times; the batches stay the same."""

from __future__ import annotations

from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch

from runner import train
from runner.core.interfaces.batch import Batch
from runner.core.interfaces.hook import Step
from runner.core.interfaces.run import Run
from runner.core.schemas.optimization import Pipeline
from runner.core.techniques import pipeline
from tests import runs

PIPELINE = [
    *["optimization=custom", "optimization.pipeline.enabled=true", "training.batch_size=16"],
    *["training.steps=6", "data.validation=0.1", "model=mlp", "model.width=8"],
]
SLOW = [*PIPELINE, *runs.OURS, "data._target_=my_package.Noisy", "+data.seconds=0.002"]
pytestmark = pytest.mark.usefixtures("my_package")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "TIMING_BUDGET_S", 0.05)


def wait_for_workers(run: Run, step: Step) -> None:
    """Until every worker has the batch that it owes."""
    assert all(wait([pipe], 30) for pipe in run.train.pool.sockets)  # type: ignore[attr-defined]


def test_workers_are_chosen_from_times_recorded_and_kept_and_ready_batches_are_counted(
    tmp_path: Path,
) -> None:
    with runs.opened(*SLOW, folder=tmp_path) as run:
        (choice,) = [c for c in run.choices if c.key == "data.workers"]
        run.hooks.append(runs.hook(on_step=wait_for_workers))
        row = runs.status(train(run), "pipeline")
    assert choice.value > 0 and "ms; a step computes about" in choice.reason
    assert row.engaged and row.evidence["workers"] == choice.value
    assert 0.5 < row.evidence["wait_share_without_workers"] <= 1
    ready, asked = map(int, row.evidence["batches"].split(" of "))
    assert asked == 6 and ready >= 5
    again = [*SLOW, "checkpoint.resume=auto", "training.steps=8"]
    with runs.opened(*again, folder=tmp_path) as run:
        (kept,) = [c for c in run.choices if c.key == "data.workers"]
    assert (kept.value, kept.reason) == (choice.value, "kept from the resumed run")


def test_a_loop_that_waits_as_long_as_without_workers_is_not_engaged() -> None:
    with runs.opened(*SLOW, "data.workers=1", "training.steps=4") as run:
        row = runs.status(train(run), "pipeline")
        assert not row.engaged and "data.workers=1 decides" in row.reason
        waited = Pipeline(True).engaged(run).facts["wait_share"]
        run.train.pool.ready = 0  # type: ignore[attr-defined]
        run.technique_facts["pipeline"] = {"wait_share_without_workers": waited}
        evidence = Pipeline(True).engaged(run)
    assert not evidence.engaged
    assert evidence.reason == "0 of 4 batches ready when requested"


def test_data_in_memory_needs_no_worker_and_the_reason_is_given() -> None:
    with runs.opened("optimization=custom", "training.steps=2", PIPELINE[1]) as run:
        row = runs.status(train(run), "pipeline")
        evidence = Pipeline(True).engaged(run)
    assert not row.engaged and "in memory" in row.reason
    assert evidence.reason == "no prefetching workers: they cost more than they save"
    assert not evidence.engaged


def test_a_stream_whose_order_depends_on_workers_keeps_its_order_and_the_reason_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "NEGLIGIBLE_SHARE", 0.0)  # workers would always pay
    stream = [*runs.OURS, "data._target_=my_package.Counted", "model._target_=my_package.Net"]
    inputs, rows = [], []
    for enabled in ("false", "true"):
        piped = f"optimization.pipeline.enabled={enabled}"
        with runs.opened(PIPELINE[0], *PIPELINE[2:4], *stream, piped) as run:
            inputs.append(list(islice(run.train.batches(0), 6))[-1][0])
            rows.append(runs.status(train(run), "pipeline"))
    assert torch.equal(*inputs)
    assert not rows[1].engaged and "data.workers decides" in rows[1].reason


@pytest.mark.gpu
def test_batches_copied_aside_are_those_copied_in_line() -> None:
    def some(run: Run) -> list[Batch]:
        batches = list(islice(run.train.batches(0), 40))
        run.train.close()
        return batches

    cuda = [*PIPELINE, "device=cuda", "data=synthetic", "data.samples=256"]
    with runs.opened(*cuda) as run:
        assert runs.status(train(run), "pipeline").engaged
        aside = some(run)
    with runs.opened(*cuda, "data.device_prefetch=false") as run:
        in_line = some(run)
    torch.cuda.synchronize()
    for (x, y), (a, b) in zip(aside, in_line, strict=True):
        assert x.is_cuda
        assert torch.equal(x, a) and torch.equal(y, b)
