"""A user's images: a folder per class, decoded as they are fetched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from runner.data.batch import Batch, Sizes
from runner.data.config import BadSamples, Images
from runner.data.dataset import Dataset
from runner.data.folders import labelled_files, relative_names
from runner.data.preprocessing import PLAIN, Opening
from runner.data.usable import FIX, lacks_resources
from runner.errors import BadSample, ConfigError
from runner.techniques.base import Choice

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are decoded, under any name: others contain programs, such as PostScript's."""
HEADS = 500  # files that are opened before training: 0.1 s
MARGIN = 1.125  # the shorter side over the side of a random crop


class ImageFolder(Dataset):
    """Batches of float32 [batch, channels, size, size] from 0 to 1, and labels.

    The centre of an image is cut out and scaled. Augmentation
    cuts elsewhere and mirrors every other image, as the sample's seed says.
    """

    in_memory = False

    def __init__(self, config: Images, opening: Opening = PLAIN) -> None:
        root = opening.root(config)
        if opening.labelled and not root.is_dir():
            raise ConfigError("data.path", f"{root} is a file", "name the folder of the classes")
        fitted = opening.fitted
        self.size, channels = config.image_size, config.channels
        if fitted is not None:
            self.size = fitted.sizes.image_size or self.size
            channels = fitted.sizes.in_channels or channels
        self.mode, self.augments = "RGB" if channels == 3 else "L", config.augment
        others = []

        def takes(file: Path) -> bool:
            image = file.suffix.lower() in SUFFIXES
            others.extend([] if image else [file])
            return image

        kinds = ", ".join(sorted(SUFFIXES))
        files, labels, names, skipped = labelled_files(root, opening, takes, f"images ({kinds})")
        self.files, self.target = files, torch.from_numpy(labels)
        self.rows = relative_names(root, files)
        heads = min(HEADS, len(files)) if config.bad_samples is BadSamples.stop else 0
        for number in np.linspace(0, len(files) - 1, heads).astype(int):
            with self._named_errors(files[number]):
                _open(files[number]).close()
        self.train, self.validation, self.choices = opening.split(
            len(files), config, str(root), labels if opening.labelled else None
        )
        self.choices = (*skipped, *self.choices)
        if others:
            reason = f"left out: files that are no images: {len(others):,}"
            self.choices = (Choice("data.path", str(root), reason), *self.choices)
        features = channels * self.size**2
        shape = {"in_channels": channels, "image_size": self.size}
        known = Sizes("classification", features, **shape, classes=len(names), class_names=names)
        self.sizes = known if fitted is None else fitted.sizes

    @staticmethod
    @contextmanager
    def _named_errors(path: Path, place: int = 0) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a decoder may raise anything on bytes that are wrong
            if lacks_resources(error):
                raise
            problem = f"{path}: cannot be decoded as an image ({type(error).__name__}: {error})"
            raise BadSample(place, problem, f"; replace or remove the file, or {FIX}") from None

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Read, decode and crop; a file that cannot be decoded is a BadSample with its name."""
        from PIL import ImageOps

        channels = self.sizes.in_channels or 1
        batch = np.empty((len(indices), self.size, self.size, channels), np.uint8)
        for row, index in enumerate(indices.tolist()):
            rng = None
            if seeds is not None and self.augments:
                rng = np.random.Generator(np.random.PCG64(int(seeds[row])))
            with self._named_errors(self.files[index], row), _open(self.files[index]) as file:
                image = ImageOps.exif_transpose(file).convert(self.mode)
            batch[row] = np.asarray(self._crop(image, rng)).reshape(batch.shape[1:])
        images = torch.from_numpy(batch).permute(0, 3, 1, 2).contiguous().float().div_(255)
        return images, self.target[torch.from_numpy(indices)]

    def labels(self) -> np.ndarray:
        """The folders' numbers."""
        return self.target.numpy()

    def _crop(self, image: Image, rng: np.random.Generator | None) -> Image:
        from PIL.Image import Resampling, Transpose

        side = min(image.size) / (1 if rng is None else MARGIN)
        left, top = (
            (length - side) * (0.5 if rng is None else rng.random()) for length in image.size
        )
        # cropping and scaling in one go: a long thin image never becomes a huge one
        image = image.resize(
            (self.size, self.size), Resampling.BILINEAR, (left, top, left + side, top + side)
        )
        if rng is not None and rng.random() < 0.5:
            image = image.transpose(Transpose.FLIP_LEFT_RIGHT)
        return image


def _open(path: Path) -> Image:
    """The file with its head read; nothing is decoded yet."""
    from PIL import Image

    file = Image.open(path, formats=FORMATS)
    most = Image.MAX_IMAGE_PIXELS
    if most is not None and file.width * file.height > most:  # where PIL would only warn
        file.close()
        raise Image.DecompressionBombError(f"{file.width} by {file.height} pixels")
    return file
