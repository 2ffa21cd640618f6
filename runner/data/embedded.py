"""The real data that is shipped inside the package; files/README.md says where it is from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from runner.data.batch import Column, Sizes
from runner.data.config import Cancer, Digits
from runner.data.order import split
from runner.data.tensors import Tensors, fit_scale, scale

FILES = Path(__file__).parent / "files"
MEASURED = (
    *("radius", "texture", "perimeter", "area", "smoothness", "compactness", "concavity"),
    *("concave points", "symmetry", "fractal dimension"),
)


def digits(config: Digits) -> Tensors:
    """Images float32 [1, 8, 8] of ink from 0 to 1, and which digit each one is."""
    with np.load(FILES / "digits.npz") as file:
        images, labels = file["images"], file["labels"]
    names = tuple(str(digit) for digit in range(10))
    return Tensors(
        torch.from_numpy(images.astype(np.float32)[:, None] / 16),
        torch.from_numpy(labels.astype(np.int64)),
        Sizes("classification", 64, in_channels=1, image_size=8, classes=10, class_names=names),
        split(len(images), config.validation, config.split_seed, fold=config.validation_fold),
    )


def cancer(config: Cancer) -> Tensors:
    """Measurements float32 [30], standardised, and whether the biopsy was benign (1)."""
    with np.load(FILES / "cancer.npz") as file:
        measurements, labels = file["measurements"], file["labels"]
    parts = split(
        len(measurements), config.validation, config.split_seed, fold=config.validation_fold
    )
    means, deviations = fit_scale(measurements, parts[0])
    names = [f"{kind} {what}" for kind in ("mean", "error of", "worst") for what in MEASURED]
    columns = zip(names, means.tolist(), deviations.tolist(), strict=True)
    return Tensors(
        torch.from_numpy(scale(measurements, means, deviations)),
        torch.from_numpy(labels.astype(np.int64)),
        Sizes("classification", 30, classes=2, class_names=("malignant", "benign")),
        parts,
        columns=tuple(Column(name, mean, deviation) for name, mean, deviation in columns),
    )
