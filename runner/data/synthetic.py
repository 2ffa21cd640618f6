"""Made-up data that can be learned, of any size: for benchmarks, where nothing should be read."""

from __future__ import annotations

from math import prod

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
    side, images = config.image_size, config.form is SyntheticForm.images
    shape = (config.channels, side, side) if images else (config.features,)
    tokens = config.form is SyntheticForm.tokens
    size = config.samples * (2 * config.sequence if tokens else prod(shape)) * 4
    if size > (available := memory.available_bytes()):
        problem = f"{config.samples:,} of that size take {size / 1e9:,.1f} GB"
        fix = f"use less than the {available / 1e9:,.1f} GB that are available"
        raise ConfigError("data.samples", problem, fix)
    rng, vocab = np.random.default_rng(config.split_seed), config.vocab
    if tokens:
        inputs, target = _markov_chains(config, rng)
        sizes = Sizes("language_modelling", classes=vocab, vocab=vocab, sequence=config.sequence)
    else:
        inputs, target = _noisy_prototypes(config, shape, rng)
        sizes = Sizes("classification", prod(shape), classes=config.classes)
        if images:
            sizes = Sizes("classification", prod(shape), config.channels, side, config.classes)
    parts = split(config.samples, config.validation, config.split_seed, fold=config.validation_fold)
    return Tensors(inputs, target, sizes, parts)


def _noisy_prototypes(
    config: Synthetic, shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Each class is a pattern; noise of the same strength lies over it."""
    prototypes = rng.standard_normal((config.classes, *shape), dtype=np.float32)
    labels = rng.integers(config.classes, size=config.samples)
    samples = rng.standard_normal((config.samples, *shape), dtype=np.float32)
    samples += prototypes[labels]
    return torch.from_numpy(samples), torch.from_numpy(labels)


def _markov_chains(config: Synthetic, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Each token fixes the next one, but for every tenth, which is drawn at random."""
    following = rng.permutation(config.vocab)
    ids = np.empty((config.samples, config.sequence + 1), np.int64)
    ids[:, 0] = rng.integers(config.vocab, size=config.samples)
    for position in range(config.sequence):
        random = rng.random(config.samples) < 0.1
        drawn = rng.integers(config.vocab, size=config.samples)
        ids[:, position + 1] = np.where(random, drawn, following[ids[:, position]])
    tensor = torch.from_numpy(ids)
    return tensor[:, :-1].contiguous(), tensor[:, 1:].contiguous()
