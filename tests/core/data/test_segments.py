"""Which samples a step takes after the batch size was changed, against a plain loop."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from runner.core.data.dataset import Dataset
from runner.core.data.loader import BatchLoader, make_loader
from runner.core.data.order import Segment
from runner.core.interfaces.batch import Batch
from runner.core.schemas.data import DataConfig


class Numbers(Dataset):
    """Samples that are their indices."""

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        return torch.from_numpy(indices)[:, None], torch.from_numpy(indices)


def loader(samples: int, batch_size: int, drop_last: bool = False, workers: int = 0) -> BatchLoader:
    config = DataConfig(kind="x", drop_last=drop_last, workers=workers)
    return make_loader(
        Numbers(), np.arange(samples), batch_size=batch_size, seed=3, device=torch.device("cpu"),
        config=config, shuffle=True, repeat=True, augment=False,
    )  # fmt: skip


def plain_steps(
    samples: int, sizes: list[tuple[int, int]], drop_last: bool, epochs: int
) -> list[tuple[int, int, int]]:
    """Epoch, first sample and size of each step; `sizes` has the step at which each begins."""
    steps, epoch, sample, changes = list[tuple[int, int, int]](), 0, 0, dict(sizes)
    size = changes[0]
    while epoch < epochs:
        size = changes.get(len(steps), size)
        left = samples - sample
        if left < (size if drop_last else 1):
            epoch, sample = epoch + 1, 0
            continue
        steps.append((epoch, sample, min(size, left)))
        sample += min(size, left)
    return steps


CHANGES = [
    (240, [(0, 32), (32, 16)]), (240, [(0, 32), (37, 50)]), (25, [(0, 4), (9, 7), (11, 2)]),
    (10, [(0, 10), (3, 3)]), (10, [(0, 3), (5, 10)]), (12, [(0, 4), (4, 4), (5, 1), (9, 4)]),
]  # fmt: skip


@pytest.mark.parametrize(("samples", "changes"), CHANGES)
@pytest.mark.parametrize("drop_last", [False, True])
def test_each_batch_size_continues_at_the_sample_that_the_one_before_it_reached(
    samples: int, changes: list[tuple[int, int]], drop_last: bool
) -> None:
    expected = plain_steps(samples, changes, drop_last, epochs=6)
    current = loader(samples, changes[0][1], drop_last)
    for number, (step, size) in enumerate(changes[1:]):
        saved = [Segment.from_list(list(segment)) for segment in current.segments]
        current = loader(samples, size, drop_last)
        assert current.continue_segments(saved, step) is (size != changes[number][1])
    segments = current.segments
    whole: dict[int, list[int]] = {epoch: [] for epoch in range(6)}
    for step, (epoch, first, size) in enumerate(expected):
        indices = current.indices(step)
        assert current.samples(step) == size == len(indices)
        segment = next(s for s in reversed(segments) if s.step <= step)
        assert segment.position(step) == (epoch, first)
        whole[epoch] += indices
    one_batch = loader(samples, samples).fetch.order
    for epoch, indices in whole.items():
        assert indices == one_batch.batch(epoch, 0)[0][: len(indices)].tolist()
        assert drop_last or len(indices) == samples
    last = changes[-1][0]
    batches = current.batches(last)
    for step in range(last, len(expected)):
        assert next(batches)[1].tolist() == current.indices(step)
    column = [current.epochs_before(step) for step in range(len(expected) + 1)]
    assert column == sorted(column) and column[-1] == 6.0
    ends = {e: sum(epoch < e for epoch, *_ in expected) for e in range(1, 7)}
    assert all(current.epochs_before(step) == e for e, step in ends.items() if step >= last)
    assert all(segments[-1].steps_until(e) == step for e, step in ends.items() if step >= last)


def test_workers_take_the_samples_that_this_process_would_take() -> None:
    own, with_workers = loader(50, 8), loader(50, 8, workers=2)
    for each in (own, with_workers):
        assert each.continue_segments([Segment(0, 0, 0, 20, 3, 3, 0.0)], 4)
    try:
        batches = with_workers.batches(4)
        for step in range(4, 20):
            assert next(batches)[1].tolist() == own.indices(step)
    finally:
        with_workers.close()


def test_the_share_of_an_epoch_that_is_over_is_that_of_its_samples() -> None:
    current = loader(250, 50)
    assert current.continue_segments([Segment(0, 0, 0, 100, 3, 3, 0.0)], 1)
    assert [current.epochs_before(step) for step in (1, 2, 4)] == pytest.approx([0.4, 0.6, 1.0])
    assert current.segments[-1].steps_until(0.8) == 3
    assert Counter(i for step in range(4) for i in current.indices(step)) == Counter(range(250))


@pytest.mark.parametrize(
    "values", [[0, 0, 0, 0, 1, 1, 0.0], [0, 0, 0, 4, 1, 1, 1.0], [0, 0, -1, 4, 1, 1, 0.0], [0, 0]]
)
def test_a_malformed_segment_of_a_checkpoint_is_an_error(values: list[float]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Segment.from_list(values)
