"""A long run collects no descriptors, threads or files, and hardly any memory."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
import pytest
import torch

from runner import train
from runner.core.device import memory
from runner.core.interfaces.hook import Hook, Step
from runner.core.interfaces.run import Run
from tests.runs import opened

STEPS, EVERY, BLOCKS = 20_000, 20, 16
T_99 = 2.62  # one-sided, of Student's distribution with BLOCKS - 2 degrees of freedom
KIB_A_STEP = 0.03  # measured: 0.014, of which 0.004 are the step's time, which is kept


class Samples(Hook):
    """Memory, descriptors, threads and the length of metrics.jsonl, now and then."""

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.rows = torch.zeros(STEPS // EVERY, 5, dtype=torch.float64)  # now: it is not to grow

    def on_step(self, run: Run, step: Step) -> None:
        if step.number % EVERY == 0 and run.folder is not None:
            resident = memory.anonymous_bytes() / 1024  # pages of files come and go with the cache
            length = (run.folder / "metrics.jsonl").stat().st_size
            counts = self.process.num_fds(), threading.active_count()
            row = (step.number, resident, *counts, length)
            self.rows[step.number // EVERY - 1] = torch.tensor(row, dtype=torch.float64)


def slope(steps: torch.Tensor, values: torch.Tensor) -> tuple[float, float]:
    """Of the medians of blocks, with its standard error; by least squares."""
    x = torch.stack([block.mean() for block in steps.chunk(BLOCKS)])
    y = torch.stack([block.median() for block in values.chunk(BLOCKS)])
    x, y = x - x.mean(), y - y.mean()
    rate = (x * y).sum() / (x * x).sum()
    variance = ((y - rate * x) ** 2).sum() / (len(x) - 2) / (x * x).sum()
    return float(rate), float(variance.sqrt())


@pytest.mark.slow
def test_20_000_steps_add_less_than_31_bytes_each_and_no_descriptor_or_thread(
    tmp_path: Path,
) -> None:
    typed = [f"training.steps={STEPS}", "training.validate_every=500", "monitoring.every=20"]
    with opened("data=cancer", "model=mlp", "device.threads=1", *typed, folder=tmp_path) as run:
        samples = Samples()
        run.hooks.append(samples)
        assert train(run).steps == STEPS
    table = samples.rows[len(samples.rows) // 4 :]  # until then caches fill
    steps, resident, descriptors, threads, length = table.unbind(1)
    rate, error = slope(steps, resident)
    print(f"resident: {rate:+.5f} KiB a step, standard error {error:.5f}")  # noqa: T201
    assert rate + T_99 * error < KIB_A_STEP
    # one is open while a checkpoint is written, by a thread of its own
    assert descriptors.median() == descriptors.min() and descriptors.max() <= descriptors.min() + 4
    assert threads.max() <= threads.min() + 1
    bytes_a_step, _ = slope(steps, length)
    assert abs(float(length[-1] - length[0]) / float(steps[-1] - steps[0]) / bytes_a_step - 1) < 0.1
    assert len(list((tmp_path / "checkpoints").glob("step_*"))) <= 4
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1
