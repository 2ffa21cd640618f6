"""Built-in data sets: shipped in the package (see files/README.md), or synthetic."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from runner.core.data.dataset import TensorsDataset, fit_scale, scale
from runner.core.data.order import split
from runner.core.device import memory
from runner.core.errors import ConfigError
from runner.core.interfaces.batch import Column, Sizes
from runner.core.schemas.data import Cancer, DataConfig, Digits, Synthetic, SyntheticForm

FILES = Path(__file__).parent / "files"
MEASUREMENTS = (
    *("radius", "texture", "perimeter", "area", "smoothness", "compactness", "concavity"),
    *("concave points", "symmetry", "fractal dimension"),
)


def digits(config: Digits) -> TensorsDataset:
    """Open digits: images float32 [1, 8, 8] from 0 to 1 (ink), and the digit as label."""
    with np.load(FILES / "digits.npz") as file:
        images, labels = file["images"].astype(np.float32)[:, None] / 16, file["labels"]
    sizes = Sizes("classification", 64, 1, 8, 10, class_names=tuple("0123456789"))
    target = torch.from_numpy(labels.astype(np.int64))
    return TensorsDataset(torch.from_numpy(images), target, sizes, _split(len(images), config))


def cancer(config: Cancer) -> TensorsDataset:
    """Open biopsies: standardised measurements float32 [30]; label 1 is benign."""
    with np.load(FILES / "cancer.npz") as file:
        measurements, labels = file["measurements"], file["labels"]
    parts = _split(len(measurements), config)
    means, deviations = fit_scale(measurements, parts[0])
    names = [f"{kind} {m}" for kind in ("mean", "error of", "worst") for m in MEASUREMENTS]
    columns = map(Column, names, means.tolist(), deviations.tolist())
    sizes = Sizes("classification", 30, classes=2, class_names=("malignant", "benign"))
    inputs = torch.from_numpy(scale(measurements, means, deviations))
    target = torch.from_numpy(labels.astype(np.int64))
    return TensorsDataset(inputs, target, sizes, parts, columns=tuple(columns))


def synthetic(config: Synthetic) -> TensorsDataset:
    """Generate learnable images, tokens or tables from the seed `data.split_seed`."""
    side, images = config.image_size, config.form is SyntheticForm.images
    shape = (config.channels, side, side) if images else (config.features,)
    tokens = config.form is SyntheticForm.tokens
    size = config.samples * (2 * config.sequence if tokens else prod(shape)) * 4
    if size > (available := memory.available_bytes()):
        problem = f"{config.samples:,} samples of this size need {size / 1e9:,.1f} GB"
        fix = f"use less than the {available / 1e9:,.1f} GB available"
        raise ConfigError("data.samples", problem, fix)
    rng, vocab = np.random.default_rng(config.split_seed), config.vocab
    if tokens:
        inputs, target = _markov_chains(config, rng)
        sizes = Sizes("language_modelling", classes=vocab, vocab=vocab, sequence=config.sequence)
    else:
        # each class is a pattern; noise of the same strength lies over it
        prototypes = rng.standard_normal((config.classes, *shape), dtype=np.float32)
        labels = rng.integers(config.classes, size=config.samples)
        samples = rng.standard_normal((config.samples, *shape), dtype=np.float32)
        samples += prototypes[labels]
        inputs, target = torch.from_numpy(samples), torch.from_numpy(labels)
        sizes = Sizes("classification", prod(shape), classes=config.classes)
        if images:
            sizes = Sizes("classification", prod(shape), config.channels, side, config.classes)
    return TensorsDataset(inputs, target, sizes, _split(config.samples, config))


def _split(samples: int, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    return split(samples, config.validation, config.split_seed, fold=config.validation_fold)


def _markov_chains(config: Synthetic, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Return (ids, next ids): each token determines the next, except for 10 % random ones."""
    successors = rng.permutation(config.vocab)
    ids = np.empty((config.samples, config.sequence + 1), np.int64)
    ids[:, 0] = rng.integers(config.vocab, size=config.samples)
    for position in range(config.sequence):
        random = rng.random(config.samples) < 0.1
        drawn = rng.integers(config.vocab, size=config.samples)
        ids[:, position + 1] = np.where(random, drawn, successors[ids[:, position]])
    tensor = torch.from_numpy(ids)
    return tensor[:, :-1].contiguous(), tensor[:, 1:].contiguous()
