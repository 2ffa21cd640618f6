"""A user's images: a folder per class, decoded as they are fetched."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from runner.data.batch import Batch, Sizes
from runner.data.config import Images
from runner.data.dataset import Dataset, drops_bad_samples, usable_samples
from runner.data.order import split
from runner.data.paths import class_files, existing
from runner.errors import ConfigError, DataError
from runner.security.files.policy import FilePolicy
from runner.techniques.base import Choice

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are decoded, under any name: others contain programs, such as PostScript's."""
THREADS = 4  # that decode at once where every file is examined; decoders release Python's lock
HEADS = 500  # files that are opened before training: 0.1 s
MARGIN = 1.125  # the shorter side over the side of a random crop


class ImageFolder(Dataset):
    """Batches of float32 [batch, channels, size, size] from 0 to 1, and labels.

    The centre of an image is cut out and scaled. Augmentation
    cuts elsewhere and mirrors every other image, as the sample's seed says.
    """

    in_memory = False

    def __init__(self, config: Images, policy: FilePolicy | None = None) -> None:
        root = existing(config.path)
        if not root.is_dir():
            raise ConfigError("data.path", f"{root} is a file", "name the folder of the classes")
        self.size, self.mode = config.image_size, "RGB" if config.channels == 3 else "L"
        self.augments = config.augment
        classes = class_files(root, policy)
        files = [(file, label) for label, inside in enumerate(classes.values()) for file in inside]
        images = [(file, label) for file, label in files if file.suffix.lower() in SUFFIXES]
        problems = self._examine([file for file, _ in images], drops_bad_samples(config))
        self.choices = usable_samples(problems, len(images), config, str(root))
        images = [image for number, image in enumerate(images) if number not in problems]
        labels = {label for _, label in images}
        for label, folder in enumerate(classes):
            if label not in labels:
                kinds = ", ".join(sorted(SUFFIXES))
                raise DataError(f"{folder}: the class has no images that can be decoded ({kinds})")
        self.files, self.labels = [f for f, _ in images], torch.tensor([n for _, n in images])
        if others := sum(file.suffix.lower() not in SUFFIXES for file, _ in files):
            reason = f"left out: files that are no images: {others:,}"
            self.choices = (*self.choices, Choice("data.path", str(root), reason))
        self.train, self.validation = split(
            len(images), config.validation, config.split_seed, str(root)
        )
        self.sizes = Sizes(
            "classification",
            in_features=config.channels * self.size**2,
            in_channels=config.channels,
            image_size=self.size,
            classes=len(classes),
            class_names=tuple(folder.name for folder in classes),
        )

    def _examine(self, files: list[Path], decode: bool) -> dict[int, str]:
        """What is wrong with each file that is no image.

        With `decode` every file is decoded, as only that shows what is broken: as long as an
        epoch takes on four cores. Else the heads of some are read, of all where they are few.
        """
        most = len(files) if decode else min(HEADS, len(files))
        numbers = np.linspace(0, len(files) - 1, most).astype(int).tolist()

        def problem(number: int) -> str | None:
            try:
                self._decode(files[number]) if decode else _open(files[number]).close()
            except Exception as error:  # a decoder may raise anything on bytes that are wrong
                return str(_broken(files[number], error))
            return None

        with ThreadPoolExecutor(THREADS) as pool:
            found = zip(numbers, pool.map(problem, numbers), strict=True)
            return {number: wrong for number, wrong in found if wrong is not None}

    def _decode(self, path: Path) -> Image:
        from PIL import ImageOps

        with _open(path) as file:
            return ImageOps.exif_transpose(file).convert(self.mode)

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Read, decode and crop; a file that cannot be decoded is a DataError with its name."""
        channels = self.sizes.in_channels or 1
        batch = np.empty((len(indices), self.size, self.size, channels), np.uint8)
        for row, index in enumerate(indices.tolist()):
            rng = None
            if seeds is not None and self.augments:
                rng = np.random.Generator(np.random.PCG64(int(seeds[row])))
            try:
                image = self._decode(self.files[index])
            except Exception as error:  # a decoder may raise anything on bytes that are wrong
                raise _broken(self.files[index], error) from None
            batch[row] = np.asarray(self._crop(image, rng)).reshape(batch.shape[1:])
        images = torch.from_numpy(batch).permute(0, 3, 1, 2).contiguous().float().div_(255)
        return images, self.labels[torch.from_numpy(indices)]

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


def _broken(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path}: cannot be decoded as an image ({type(error).__name__}: {error}); replace or "
        "remove the file"
    )
