"""The data that needs no download: shipped, found on every machine, or made up."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from runner.core.data.embedded import cancer, digits, synthetic
from runner.core.data.order import sample_seeds
from runner.core.errors import ConfigError
from runner.core.schemas.data import Cancer, Digits, StdlibParts, StdlibText, Synthetic
from runner.core.schemas.data import SyntheticForm as Form
from runner.datasets.text import read_stdlib, stdlib_parts, stdlib_text


def test_digits_are_ink_from_0_to_1_and_ten_classes() -> None:
    source = digits(Digits())
    x, y = source.fetch(np.arange(1797), None)
    assert (x.shape, x.dtype, y.dtype) == ((1797, 1, 8, 8), torch.float32, torch.int64)
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)
    assert torch.bincount(y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (len(source.train), len(source.validation)) == (1438, 359)
    assert source.sizes.for_constructor() == {
        "in_features": 64, "in_channels": 1, "image_size": 8, "classes": 10,
    }  # fmt: skip


def test_cancer_is_standardised_by_what_is_trained_on() -> None:
    source = cancer(Cancer())
    x, y = source.fetch(source.train, None)
    assert torch.allclose(x.mean(dim=0), torch.zeros(30), atol=1e-5)
    assert torch.allclose(x.std(dim=0, correction=0), torch.ones(30), atol=1e-5)
    held_out, _ = source.fetch(source.validation, None)
    assert not torch.allclose(held_out.mean(dim=0), torch.zeros(30), atol=1e-5)
    assert source.sizes.class_names == ("malignant", "benign")
    assert torch.bincount(source.target).tolist() == [212, 357]


def test_a_stdlib_file_is_wholly_in_one_part() -> None:
    source = stdlib_text(StdlibText())
    train, validation = (stream.ids.tobytes() for stream in source.streams)
    texts = [text for _, text in read_stdlib() if len(text) > 2000]
    held_out = sum(text in validation for text in texts[:40])
    assert 0 < held_out < 40
    assert all((text in train) != (text in validation) for text in texts[:40])
    assert len(train) + len(validation) > 5_000_000


def test_an_epoch_of_text_is_consecutive_windows_from_an_offset_of_its_own() -> None:
    source = stdlib_text(StdlibText())
    ids = source.streams[0].ids
    offsets = set()
    for epoch in range(5):
        chosen = source.train[:200]
        read = source.fetch(chosen, sample_seeds(0, epoch, chosen))[0].flatten().numpy()
        offset = next(o for o in range(128) if np.array_equal(ids[o : o + len(read)], read))
        offsets.add(offset)
    assert len(offsets) > 2
    held_out = source.validation[:5]
    plain = source.fetch(held_out, None)[0]
    assert torch.equal(source.fetch(held_out, sample_seeds(0, 7, held_out))[0], plain)


def test_passages_carry_their_part_and_a_mask() -> None:
    source = stdlib_parts(StdlibParts(sequence=64))
    inputs, labels = source.fetch(np.concatenate([source.train, source.validation]), None)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    assert ids.dtype == mask.dtype == labels.dtype == torch.int64
    assert torch.equal(ids == 256, mask == 0)
    assert (mask.sum(dim=1) > 0).all()
    assert (mask.sum(dim=1) < 64).any()
    assert set(labels.tolist()) == set(range(6))
    assert (source.sizes.vocab, source.sizes.classes) == (257, 6)
    assert source.sizes.class_names[0] == "asyncio"
    assert set(source.target[torch.from_numpy(source.validation)].tolist()) == set(range(6))


def test_an_unknown_part_of_the_library_brings_up_the_nearest() -> None:
    for parts, says in ((["asynci", "email"], "'asynci'.*did you mean 'asyncio'"), (["email"], "")):
        with pytest.raises(ConfigError, match=f"data.parts.*{says}"):
            stdlib_parts(StdlibParts(parts=parts))


@pytest.mark.parametrize("form", list(Form))
def test_synthetic_data_is_made_from_its_seed_alone(form: Form) -> None:
    def digest(seed: int) -> str:
        source = synthetic(Synthetic(form=form, samples=50, image_size=8, split_seed=seed))
        return hashlib.sha256(source.inputs.numpy().tobytes()).hexdigest()

    assert digest(0) == digest(0) != digest(1)


def test_synthetic_tokens_can_be_learned() -> None:
    source = synthetic(Synthetic(form=Form.tokens, samples=200, vocab=16, sequence=32))
    x, y = source.fetch(source.train, None)
    assert torch.equal(x[:, 1:], y[:, :-1])
    counts = torch.zeros(16, 16).index_put_((x, y), torch.ones(()), accumulate=True)
    held_out, following = source.fetch(source.validation, None)
    assert (counts.argmax(dim=1)[held_out] == following).float().mean() > 0.85
