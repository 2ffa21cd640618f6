"""Made-up data that can be learned, of any size: for benchmarks, where nothing should be read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from runner.data.batch import Sizes
from runner.data.config import Synthetic, SyntheticForm
from runner.data.order import split
from runner.data.tensors import Tensors
from runner.device import memory
from runner.errors import ConfigError


def synthetic(config: Synthetic) -> Tensors:
    """Images, tokens or tables, generated from `data.split_seed`."""
    values = {"images": config.channels * config.image_size**2, "tabular": config.features}
    size = config.samples * values.get(config.form.name, 2 * config.sequence) * 4
    if size > (available := memory.available_bytes()):
        raise ConfigError(
            "data.samples",
            f"{config.samples:,} of that size take {size / 1e9:,.1f} GB",
            f"use less than the {available / 1e9:,.1f} GB that are available",
        )
    return _FORMS[config.form](config, np.random.default_rng(config.split_seed))


def _images(config: Synthetic, rng: np.random.Generator) -> Tensors:
    """Each class is a pattern; noise of the same strength lies over it."""
    shape = (config.channels, config.image_size, config.image_size)
    images, labels = _noisy_prototypes(config, shape, rng)
    sizes = Sizes(
        "classification",
        in_features=int(np.prod(shape)),
        in_channels=config.channels,
        image_size=config.image_size,
        classes=config.classes,
    )
    return _source(config, images, labels, sizes)


def _tabular(config: Synthetic, rng: np.random.Generator) -> Tensors:
    """Each class is a point; its samples scatter around it."""
    rows, labels = _noisy_prototypes(config, (config.features,), rng)
    sizes = Sizes("classification", config.features, classes=config.classes)
    return _source(config, rows, labels, sizes)


def _source(config: Synthetic, inputs: Tensor, target: Tensor, sizes: Sizes) -> Tensors:
    parts = split(config.samples, config.validation, config.split_seed)
    return Tensors(inputs, target, sizes, parts)


def _noisy_prototypes(
    config: Synthetic, shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    prototypes = rng.standard_normal((config.classes, *shape), dtype=np.float32)
    labels = rng.integers(config.classes, size=config.samples)
    samples = rng.standard_normal((config.samples, *shape), dtype=np.float32)
    samples += prototypes[labels]
    return torch.from_numpy(samples), torch.from_numpy(labels)


def _tokens(config: Synthetic, rng: np.random.Generator) -> Tensors:
    """Each token fixes the next one, but for every tenth, which is drawn anew."""
    following = rng.permutation(config.vocab)
    ids = np.empty((config.samples, config.sequence + 1), np.int64)
    ids[:, 0] = rng.integers(config.vocab, size=config.samples)
    for position in range(config.sequence):
        anew = rng.random(config.samples) < 0.1
        drawn = rng.integers(config.vocab, size=config.samples)
        ids[:, position + 1] = np.where(anew, drawn, following[ids[:, position]])
    tensor, vocab = torch.from_numpy(ids), config.vocab
    sizes = Sizes("language_modelling", classes=vocab, vocab=vocab, sequence=config.sequence)
    return _source(config, tensor[:, :-1].contiguous(), tensor[:, 1:].contiguous(), sizes)


_FORMS: dict[SyntheticForm, Callable[[Synthetic, np.random.Generator], Tensors]] = {
    SyntheticForm.images: _images,
    SyntheticForm.tokens: _tokens,
    SyntheticForm.tabular: _tabular,
}
