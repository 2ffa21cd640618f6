"""Micro-batches that fit the memory, and add up to the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from runner import build, compose, train
from runner.data.batch import largest_part, rows, split
from runner.data.seeds import mix
from runner.device import memory
from runner.errors import ConfigError
from runner.techniques import accumulation
from runner.techniques.base import RunBuilder
from runner.techniques.memory_prediction import predict
from runner.training.step import forward_backward

BASE = ["monitoring.progress=false", "device=cpu", "device.threads=1"]
QUICK = [
    "training.steps=2",
    "monitoring.progress=false",
    "device=cpu",
    "device.threads=2",
    "optimization=none",
    "data=synthetic",
    "data.form=tokens",
    "data.sequence=64",
    "data.vocab=64",
    "data.samples=256",
    "model=gpt",
    "model.width=32",
]
AUTO = ["optimization.accumulation.enabled=true"]
MIB = 2**20


def gradients(overrides: list[str]) -> dict[str, Tensor]:
    with build(compose(overrides)) as run:
        forward_backward(run, next(run.train.batches(0)))
        return {n: p.grad for n, p in run.model.named_parameters() if p.grad is not None}


def short_of(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(memory, "room", lambda device: free)


def test_a_batch_that_fits_is_not_cut_and_the_reason_says_the_numbers() -> None:
    with build(compose([*QUICK, *AUTO])) as run:
        assert run.micro_batch == 32
        summary = train(run)
    row = next(row for row in summary.techniques if row.name == "accumulation")
    assert row.requested and not row.engaged
    assert "already fits" in row.reason and "MiB predicted" in row.reason
    assert "MiB free" in row.reason
    assert summary.memory.predicted_bytes and summary.memory.predicted_bytes > 0


def test_the_batch_is_cut_into_the_fewest_parts_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 20 * MIB
    short_of(monkeypatch, free)
    drafts: list[RunBuilder] = []
    monkeypatch.setattr(
        accumulation, "fitting", lambda d, s, f=accumulation.fitting: drafts.append(d) or f(d, s)
    )
    with build(compose([*QUICK, *AUTO, "training.batch_size=48"])) as run:
        size = run.micro_batch
        parts = -(-48 // size)
        assert 1 < parts <= 48
        assert predict(drafts[0], size).fits(run.device, free, 0.8)
        assert not predict(drafts[0], -(-48 // (parts - 1))).fits(run.device, free, 0.8)
        choice = next(c for c in run.choices if c.key == "training.micro_batch")
        assert choice.value == size and f"{free // MIB} MiB free" in choice.reason


def test_the_gradient_is_that_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gradients(QUICK)
    short_of(monkeypatch, 20 * MIB)
    parts = gradients([*QUICK, *AUTO])
    for name, gradient in whole.items():
        assert torch.allclose(gradient, parts[name], atol=1e-6, rtol=1e-4), name


def test_a_size_that_is_named_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    short_of(monkeypatch, MIB)
    with build(compose([*QUICK, *AUTO, "training.micro_batch=16"])) as run:
        assert run.micro_batch == 16
    with build(compose([*QUICK, *AUTO, "optimization.accumulation.micro_batch=8"])) as run:
        assert run.micro_batch == 8


def test_a_resumed_run_keeps_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    short_of(monkeypatch, 20 * MIB)
    overrides = [*QUICK, *AUTO, "checkpoint.resume=auto"]
    with build(compose(overrides), tmp_path) as run:
        train(run)
        size = run.micro_batch
    assert size < 32
    short_of(monkeypatch, 2**40)
    with build(compose([*overrides, "training.steps=3"]), tmp_path) as run:
        assert run.micro_batch == size


@pytest.mark.parametrize("most", [1, 3, 7])
def test_a_split_is_even_complete_and_of_the_fewest_parts(most: int) -> None:
    for samples in range(1, 40):
        parts = [range(samples)[part] for part in split(samples, most)]
        sizes = [len(part) for part in parts]
        assert [i for part in parts for i in part] == list(range(samples))
        assert len(parts) == -(-samples // most)
        assert max(sizes) == sizes[0] == largest_part(samples, most) <= most
        assert max(sizes) - min(sizes) <= 1


NORMED = [
    *BASE,
    "data=digits",
    "model._target_=my_package.Net",
    "security.trusted=[my_package]",
    "optimization=none",
    "training.batch_size=8",
]


@pytest.mark.usefixtures("my_package")
def test_a_batch_of_five_is_three_and_two_for_batchnorm_with_their_exact_gradient() -> None:
    asked = [*NORMED, "training.micro_batch=4", "training.steps=2"]
    with build(compose(asked)) as run:
        five = rows(run.train.at(0), slice(5))
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
            x, y = rows(five, part)
            losses.append(nn.functional.cross_entropy(run.model(x), y) * share)
        torch.stack(losses).sum().backward()
        assert torch.allclose(step.loss, torch.stack(losses).sum())
        plain = [p.grad for p in run.model.parameters() if p.grad is not None]
        for a, b in zip(ours, plain, strict=True):
            assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.usefixtures("my_package")
def test_an_epoch_with_a_last_batch_of_one_more_is_trained_to_its_end() -> None:
    asked = [*NORMED, "training.micro_batch=34", "training.epochs=1", "training.batch_size=61"]
    with build(compose(asked)) as run:
        assert run.train.samples(run.train.steps_per_epoch - 1) == 35  # 18 + 17
        assert run.micro_batch == 31  # of a full batch: 31 + 30
        assert train(run).status == "done"


@pytest.mark.parametrize(
    ("sizes", "key"),
    [
        (["training.micro_batch=1"], "training.micro_batch: step 1 has a micro-batch of one"),
        (["training.batch_size=1"], "training.batch_size: step 1 has a batch of one"),
    ],
)
@pytest.mark.usefixtures("my_package")
def test_batchnorm_on_one_sample_is_an_error_that_names_the_key(sizes: list[str], key: str) -> None:
    with build(compose([*NORMED, "training.steps=2", *sizes])) as run:
        with pytest.raises(ConfigError, match=f"{key}.*BatchNorm needs 2 or more"):
            train(run)
