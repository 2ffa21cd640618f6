"""A user's images: a folder per class, decoded as they are fetched."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from runner.data.batch import Batch, Sizes
from runner.data.config import Images
from runner.data.dataset import Dataset, drops_bad_samples, report_bad_samples
from runner.data.order import split
from runner.data.paths import class_files, class_folders, existing
from runner.errors import ConfigError, DataError
from runner.security.files.policy import Policy
from runner.techniques.base import Choice

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""What is decoded, whatever a name says: others bring programs along, such as PostScript's."""
THREADS = 4  # that decode at once where every file is looked at; decoders leave Python alone
GLANCED_AT = 500  # files that are opened before training: 0.1 s
MARGIN = 1.125  # the shorter side over the side of a random crop


class ImageFolder(Dataset):
    """Batches of float32 [batch, channels, size, size] from 0 to 1, and labels.

    The centre of an image is cut out and scaled. Augmentation
    cuts elsewhere and mirrors every other image, as the sample's seed says.
    """

    in_memory = False

    def __init__(self, config: Images, policy: Policy | None = None) -> None:
        if config.channels not in (1, 3):
            raise ConfigError(
                "data.channels", f"{config.channels} is neither grey nor colour", "1 or 3"
            )
        if config.image_size < 1:
            raise ConfigError("data.image_size", f"{config.image_size} is no size", "use 1 or more")
        root = existing(config.path)
        if not root.is_dir():
            raise ConfigError("data.path", f"{root} is a file", "name the folder of the classes")
        self.size, self.mode = config.image_size, "RGB" if config.channels == 3 else "L"
        self.augments = config.augment
        self.files: list[Path] = []
        labels: list[int] = []
        others = 0
        folders = class_folders(root, policy)
        for label, folder in enumerate(folders):
            files = class_files(folder, root, policy)
            images = [p for p in files if p.suffix.lower() in SUFFIXES]
            others += len(files) - len(images)
            if not images:
                raise DataError(
                    f"{folder}: the class has no images ({', '.join(sorted(SUFFIXES))})"
                )
            self.files += images
            labels += [label] * len(images)
        if drops_bad_samples(config):
            labels = self._leave_out(labels, config, root)
            for label, folder in enumerate(folders):
                if label not in labels:
                    raise DataError(f"{folder}: no image of the class can be decoded")
        else:
            self._glance()
        self.labels = torch.tensor(labels)
        if others:
            said = "1 file is no image" if others == 1 else f"{others:,} files are no images"
            told = Choice("data.path", str(root), f"{said}: left out")
            self.choices = (*self.choices, told)
        self.train, self.validation = split(
            len(labels), config.validation, config.split_seed, str(root)
        )
        self.sizes = Sizes(
            "classification",
            in_features=config.channels * self.size**2,
            in_channels=config.channels,
            image_size=self.size,
            classes=len(folders),
            class_names=tuple(folder.name for folder in folders),
        )

    def _leave_out(self, labels: list[int], config: Images, root: Path) -> list[int]:
        """The labels of the files that can be decoded, which stay.

        Every file is decoded, since only that shows what is broken: as long as an epoch takes
        on four cores. A file that goes bad later is an error, as ever.
        """
        problems = {}
        with ThreadPoolExecutor(THREADS) as pool:
            for number, wrong in enumerate(pool.map(self._problem, self.files)):
                if wrong is not None:
                    problems[number] = wrong
        told = [f"{self.files[number]}: {problems[number]}" for number in problems]
        self.choices = report_bad_samples(told, len(self.files), config, str(root))
        stay = [number for number in range(len(self.files)) if number not in problems]
        self.files = [self.files[number] for number in stay]
        return [labels[number] for number in stay]

    def _glance(self) -> None:
        """Open files, all where they are few, so that what is no image is known before a step.

        Their heads are read and nothing is decoded; what breaks further on shows in its batch.
        """
        spread = np.linspace(0, len(self.files) - 1, min(GLANCED_AT, len(self.files)))
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(_open_head, [self.files[number] for number in spread.astype(int)]))

    def _problem(self, path: Path) -> str | None:
        """Why a file cannot be decoded."""
        try:
            self._decoded(path)
        except Exception as error:  # a decoder may raise anything on bytes that are wrong
            return f"{type(error).__name__}: {error}"
        return None

    def _decoded(self, path: Path) -> Image:
        from PIL import ImageOps

        with _opened(path) as file:
            return ImageOps.exif_transpose(file).convert(self.mode)

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Read, decode and crop; a file that cannot be decoded is a DataError with its name."""
        channels = self.sizes.in_channels or 1
        batch = np.empty((len(indices), self.size, self.size, channels), np.uint8)
        for row, index in enumerate(indices.tolist()):
            rng = None
            if seeds is not None and self.augments:
                rng = np.random.Generator(np.random.PCG64(int(seeds[row])))
            batch[row] = self._pixels(self.files[index], rng).reshape(batch.shape[1:])
        images = torch.from_numpy(batch).permute(0, 3, 1, 2).contiguous().float().div_(255)
        return images, self.labels[torch.from_numpy(indices)]

    def _pixels(self, path: Path, rng: np.random.Generator | None) -> np.ndarray:
        try:
            image = self._decoded(path)
        except Exception as error:  # a decoder may raise anything on bytes that are wrong
            raise _broken(path, error) from None
        return np.asarray(self._crop(image, rng))

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


@contextmanager
def _opened(path: Path) -> Iterator[ImageFile]:
    """The file with its head read; nothing is decoded yet."""
    from PIL import Image

    with Image.open(path, formats=FORMATS) as file:
        most = Image.MAX_IMAGE_PIXELS
        if most is not None and file.width * file.height > most:  # where PIL would only warn
            raise Image.DecompressionBombError(f"{file.width} by {file.height} pixels")
        yield file


def _open_head(path: Path) -> None:
    try:
        with _opened(path):
            return
    except Exception as error:  # a decoder may raise anything on bytes that are wrong
        raise _broken(path, error) from None


def _broken(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path}: cannot be decoded as an image ({type(error).__name__}: {error}); replace or "
        "remove the file, or leave such files out with data.bad_samples=drop"
    )
