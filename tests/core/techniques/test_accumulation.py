"""Micro-batches that fit the memory, and add up to the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from runner import train
from runner.core.data.order import mix
from runner.core.device import memory
from runner.core.errors import ConfigError
from runner.core.interfaces.batch import largest_slice, slice_rows, split_batch
from runner.core.train.step import forward_backward
from tests import runs

AUTO = "optimization.accumulation.enabled=true"
QUICK = [
    *["training.steps=2", "optimization=none", "data=synthetic", "data.form=tokens", AUTO],
    *["data.sequence=64", "data.vocab=64", "data.samples=256", "model=gpt", "model.width=32"],
]
NORMED = [
    *["data=digits", "model._target_=my_package.Net", *runs.OURS],
    *["optimization=none", "training.batch_size=8"],
]
MIB = 2**20


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The bytes that runs take for free memory."""
    room = {"bytes": 20 * MIB}
    monkeypatch.setattr(memory, "allocatable_bytes", lambda device: room["bytes"])
    return room


def test_the_batch_is_cut_into_fewer_parts_the_more_memory_is_free_unless_a_size_is_named(
    free: dict[str, int],
) -> None:
    sizes = []
    for mib in (16, 24, 40, 4000):
        free["bytes"] = mib * MIB
        with runs.opened(*QUICK, "training.batch_size=48") as run:
            sizes.append(run.micro_batch)
            choice = next(c for c in run.choices if c.key == "training.micro_batch")
            assert choice.value == run.micro_batch and f"{mib:,} MiB free" in choice.reason
    row = next(row for row in run.unapplied_techniques if row.name == "accumulation")
    assert row.requested and "already fits" in row.reason and "MiB estimated" in row.reason
    assert sizes == sorted(sizes) and sizes[0] < sizes[1] < sizes[-1] == 48
    for key, size in (("training", 16), ("optimization.accumulation", 8)):
        with runs.opened(*QUICK, f"{key}.micro_batch={size}") as run:
            assert run.micro_batch == size


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["cnn", "gpt"])
def test_the_micro_batch_that_is_chosen_fits_what_the_gpu_has_free(
    model: str, free: dict[str, int]
) -> None:
    free["bytes"] = 512 * MIB
    data = ["data.form=tokens", "data.sequence=512"] if model == "gpt" else []
    sizes = ["training.batch_size=256", "training.steps=3", "data.validation_samples=1"]
    asked = ["device=cuda", "data=synthetic", *data, f"model={model}", *sizes, AUTO]
    with runs.opened("optimization=none", *asked) as run:
        assert run.micro_batch < 256
        memory.reset_peak(run.device)
        base = torch.cuda.memory_allocated()
        peaks = train(run).memory
    assert peaks.peak_device_bytes - base <= free["bytes"]


def test_a_resumed_run_keeps_what_was_chosen(free: dict[str, int], tmp_path: Path) -> None:
    overrides = [*QUICK, "checkpoint.resume=auto"]
    with runs.opened(*overrides, folder=tmp_path) as run:
        train(run)
        size = run.micro_batch
    assert size < 32
    free["bytes"] = 2**40
    with runs.opened(*overrides, "training.steps=3", folder=tmp_path) as run:
        assert run.micro_batch == size


@pytest.mark.parametrize("most", [1, 3, 7])
def test_a_split_is_even_complete_and_of_the_fewest_parts(most: int) -> None:
    for samples in range(1, 40):
        parts = [range(samples)[part] for part in split_batch(samples, most)]
        sizes = [len(part) for part in parts]
        assert [i for part in parts for i in part] == list(range(samples))
        assert len(parts) == -(-samples // most)
        assert max(sizes) == sizes[0] == largest_slice(samples, most) <= most
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.usefixtures("my_package")
def test_a_batch_of_five_is_three_and_two_for_batchnorm_with_their_exact_gradient() -> None:
    with runs.opened(*NORMED, "training.micro_batch=4", "training.steps=2") as run:
        five = slice_rows(run.train.at(0), slice(5))
        sizes: list[int] = []
        counting = run.model.register_forward_hook(lambda _, x, out: sizes.append(len(out)))
        run.model.train()
        step = forward_backward(run, five)
        counting.remove()
        assert sizes == [3, 2]
        ours = [p.grad.clone() for p in run.model.parameters() if p.grad is not None]
        run.update.begin()
        run.device.reseed(mix(run.seed, 1))
        losses = []
        for part, share in ((slice(0, 3), 3 / 5), (slice(3, 5), 2 / 5)):
            x, y = slice_rows(five, part)
            losses.append(nn.functional.cross_entropy(run.model(x), y) * share)
        torch.stack(losses).sum().backward()
        assert torch.allclose(step.loss, torch.stack(losses).sum())
        plain = [p.grad for p in run.model.parameters() if p.grad is not None]
        for a, b in zip(ours, plain, strict=True):
            assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(
    ("key", "what"), [("micro_batch", "micro-batch of one"), ("batch_size", "batch of one")]
)
@pytest.mark.usefixtures("my_package")
def test_batchnorm_on_one_sample_is_an_error_that_names_the_key(key: str, what: str) -> None:
    message = rf"training\.{key}: step 1 has a {what}.*BatchNorm needs 2 or more"
    with pytest.raises(ConfigError, match=message):
        runs.trained(*NORMED, "training.steps=2", f"training.{key}=1")
