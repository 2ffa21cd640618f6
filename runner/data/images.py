"""Images in a folder per class or a saved `datasets` folder, decoded when first fetched."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch

from runner.data.augment import blend, rand_augment
from runner.data.batch import Batch, RowNames, Sizes
from runner.data.config import BadSamples, Images
from runner.data.dataset import Dataset
from runner.data.labels import labelled_files, relative_names, remap_labels
from runner.data.open import DEFAULT_OPENING, OpenOptions
from runner.data.paths import existing_path
from runner.data.saved_dataset import SavedImages, is_saved
from runner.data.split import split_samples
from runner.data.usable import DROP_FIX, lacks_resources
from runner.device import memory
from runner.errors import BadSample, ConfigError, DataError
from runner.techniques.base import Choice

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are decoded, whatever the suffix: others, such as PostScript, run programs."""
MAX_HEADERS = 500  # files that are opened before training: 0.1 s
MARGIN = 1.125  # ratio of the shorter side to the side of a random crop
HEADER = np.dtype([("crc", np.uint32), ("height", np.uint32), ("width", np.uint32)])


class ImageCache:
    """Decoded pixels (uint8 [height, width, channels]) in memory shared by all processes.

    The memory is mapped before workers are forked. An entry is valid only if its checksum matches,
    so no lock is needed, and a process that dies while writing leaves no entry. The first images
    are cached, as many as fit into `limit` bytes.
    """

    def __init__(self, sizes: np.ndarray, channels: int, limit: int) -> None:
        """Map memory for images of at most `sizes[i]` pixels each."""
        ends = np.cumsum(sizes.astype(np.int64) * channels + HEADER.itemsize)
        self.capacity = int(np.searchsorted(ends, limit, "right"))  # images
        self.bytes = int(ends[self.capacity - 1]) if self.capacity else 0
        self.starts, self.channels = np.concatenate([[0], ends]), channels
        # all at once: memory that grew with the steps would look like a leak
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
        self.memory = mmap.mmap(-1, self.bytes, flags=flags) if self.bytes else b""
        self.pixels = np.frombuffer(self.memory, np.uint8)

    def get(self, index: int) -> np.ndarray | None:
        """Return a view of the image's pixels, or None if it is not cached."""
        if index >= self.capacity:
            return None
        start = int(self.starts[index])
        head = self.pixels[start : start + HEADER.itemsize].view(HEADER)[0]
        height, width = int(head["height"]), int(head["width"])
        size = height * width * self.channels
        start += HEADER.itemsize
        if not size or start + size > self.starts[index + 1]:
            return None
        pixels = self.pixels[start : start + size]
        if crc32(pixels.data) != head["crc"]:
            return None
        return pixels.reshape(height, width, self.channels)

    def store(self, index: int, pixels: np.ndarray) -> None:
        """Cache the pixels, if the image has room."""
        start = int(self.starts[index]) if index < self.capacity else 0
        if index >= self.capacity or start + HEADER.itemsize + pixels.size > self.starts[index + 1]:
            return
        flat = np.ascontiguousarray(pixels).reshape(-1)
        self.pixels[start + HEADER.itemsize :][: flat.size] = flat
        head = np.array([(crc32(flat.data), *pixels.shape[:2])], HEADER)
        self.pixels[start : start + HEADER.itemsize] = head.view(np.uint8)


class ImageFolder(Dataset):
    """Batches of float32 [batch, channels, size, size] from 0 to 1, and labels.

    Images are centre-cropped and resized. Augmentation crops at random, flips half of the images
    and applies RandAugment, driven by the sample's seed. With mixup or CutMix, training labels are
    class shares, float32 [batch, classes].
    """

    in_memory = False

    def __init__(self, config: Images, opening: OpenOptions = DEFAULT_OPENING) -> None:
        root = existing_path(config.path) / opening.folder
        if opening.labelled and not root.is_dir():
            raise ConfigError("data.path", f"{root} is a file", "name the folder of the classes")
        fitted = opening.fitted
        self.size, channels = config.image_size, config.channels
        if fitted is not None:
            self.size = fitted.sizes.image_size or self.size
            channels = fitted.sizes.in_channels or channels
        self.mode, self.config = "RGB" if channels == 3 else "L", config
        self.distorts = config.augment or config.randaugment > 0
        self.blends = config.mixup > 0 or config.cutmix > 0
        self.augments = self.distorts or self.blends
        self.sources: Sequence[Any]
        read = self._read_saved if is_saved(root) else self._read_folders
        labels, class_names, choices = read(root, opening)
        self.target, count = torch.from_numpy(labels), len(self.sources)
        header_count = min(MAX_HEADERS, count) if config.bad_samples is BadSamples.stop else 0
        for number in np.linspace(0, count - 1, header_count).astype(int).tolist():
            with self._named_errors(number):
                _open(self.sources[number]).close()
        strata = labels if opening.labelled else None
        *parts, rule = split_samples(opening, count, config, str(root), strata)
        self.train, self.validation = parts
        features = channels * self.size**2
        shape = {"in_channels": channels, "image_size": self.size}
        sizes = Sizes(
            "classification", features, **shape, classes=len(class_names), class_names=class_names
        )
        self.sizes = sizes if fitted is None else fitted.sizes
        self.cache, cache_choices = self._make_cache(channels)
        self.choices = (*choices, *rule, *cache_choices)

    def _read_folders(
        self, root: Path, opening: OpenOptions
    ) -> tuple[np.ndarray, tuple[str, ...], tuple[Choice, ...]]:
        """Read a folder per class; return labels, class names and choices."""
        other_files = []

        def is_image(file: Path) -> bool:
            matches = file.suffix.lower() in SUFFIXES
            other_files.extend([] if matches else [file])
            return matches

        kinds = ", ".join(sorted(SUFFIXES))
        files, labels, names, notes = labelled_files(root, opening, is_image, f"images ({kinds})")
        self.sources, self.rows = files, relative_names(root, files)
        if other_files:
            reason = f"left out: files that are not images: {len(other_files):,}"
            notes = (Choice("data.path", str(root), reason), *notes)
        return labels, names, notes

    def _read_saved(
        self, root: Path, opening: OpenOptions
    ) -> tuple[np.ndarray, tuple[str, ...], tuple[Choice, ...]]:
        """Read a folder written by `datasets`; return labels, class names and choices."""
        saved = SavedImages(root, opening.policy)
        self.sources, self.rows, names = saved, RowNames("row"), saved.class_names
        if not opening.labelled:
            return np.zeros(len(saved), np.int64), (), ()
        if saved.labels is None:
            raise DataError(f"data.path: {root} has no ClassLabel column")
        if opening.fitted is None:
            return saved.labels, names, ()
        trained = opening.fitted.sizes.class_names
        return remap_labels(names, saved.labels, trained, str(root)), trained, ()

    def _make_cache(self, channels: int) -> tuple[ImageCache, tuple[Choice, ...]]:
        """Make a cache of the images before augmentation; uncropped ones with random crops."""
        count, max_bytes = len(self.sources), self.config.cache_mb << 20
        max_bytes = min(max_bytes, memory.available_bytes() // 4)
        sizes = np.full(count, self.size**2)
        if self.config.augment and max_bytes:
            sizes = self._pixel_counts(max_bytes // channels)
        cache = ImageCache(sizes, channels, max_bytes)
        reason = (
            f"{cache.capacity:,} of {count:,} images are decoded once, {cache.bytes / 1e6:,.0f} MB"
        )
        choice = Choice("data.cache_mb", self.config.cache_mb, reason)
        return cache, (choice,) if self.config.cache_mb else ()

    def _pixel_counts(self, max_pixels: int) -> np.ndarray:
        """Read pixel counts from headers, until `max_pixels` in all; 0 for a bad image."""
        sizes = np.full(len(self.sources), max_pixels + 1)
        for number in range(len(self.sources)):
            sizes[number] = 0
            with suppress(DataError), self._named_errors(number):
                with _open(self.sources[number]) as file:
                    sizes[number] = file.width * file.height
            if (max_pixels := max_pixels - int(sizes[number])) < 0:
                break
        return sizes

    @contextmanager
    def _named_errors(self, index: int, batch_index: int = 0) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a decoder may raise anything on malformed bytes
            if lacks_resources(error):
                raise
            source = self.sources[index]
            where = source if isinstance(source, Path) else f"{self.config.path}: row {index}"
            problem = f"{where}: cannot be decoded as an image ({type(error).__name__}: {error})"
            raise BadSample(
                batch_index, problem, f"; replace or remove the file, or {DROP_FIX}"
            ) from None

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Return decoded and cropped images; raise BadSample for a file that cannot be decoded."""
        blends = seeds is not None and self.blends
        shape = (len(indices), self.size, self.size, self.sizes.in_channels or 1)
        batch = np.empty(shape, np.float32 if blends else np.uint8)
        target = torch.zeros(len(indices), self.sizes.classes or 1)
        for row, index in enumerate(indices.tolist()):
            rng = None if seeds is None else np.random.Generator(np.random.PCG64(int(seeds[row])))
            augment_rng = rng if self.distorts else None
            if rng is not None and self.blends:
                # the partner is a training sample chosen by the seed, not by the batch
                other_index = int(self.train[rng.integers(len(self.train))])
                first, second = (self._sample(i, augment_rng, row) for i in (index, other_index))
                options = rng, self.config.mixup, self.config.cutmix
                batch[row], share = blend(first, second, *options)
                target[row, self.target[index]] += share
                target[row, self.target[other_index]] += 1 - share
            else:
                batch[row] = self._sample(index, augment_rng, row)
        # pixels from 0 to 255 as float32 from 0 to 1, the channel second
        images = torch.from_numpy(batch).permute(0, 3, 1, 2).contiguous().float().div_(255)
        return images, target if blends else self.target[torch.from_numpy(indices)]

    def _sample(self, index: int, rng: np.random.Generator | None, row: int) -> np.ndarray:
        """Return an image as uint8 [size, size, channels]; BadSample carries its `row`."""
        from PIL import Image, ImageOps

        pixels = self.cache.get(index)
        if pixels is None:
            with self._named_errors(index, row), _open(self.sources[index]) as file:
                image = ImageOps.exif_transpose(file).convert(self.mode)
            if not self.config.augment:
                image = self._crop(image, None)
            self.cache.store(index, _pixels(image))
        elif rng is None and not self.config.augment:
            return pixels
        else:
            image = Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[..., 0])
        if self.config.augment:
            image = self._crop(image, rng)
        if rng is not None and self.config.randaugment:
            image = rand_augment(image, rng, self.config.randaugment, self.config.magnitude)
        return _pixels(image)

    def labels(self) -> np.ndarray:
        """Return the class index of each image."""
        return self.target.numpy()

    def _crop(self, image: Image, rng: np.random.Generator | None) -> Image:
        from PIL.Image import Resampling, Transpose

        side = min(image.size) / (1 if rng is None else MARGIN)
        left, top = ((edge - side) * (0.5 if rng is None else rng.random()) for edge in image.size)
        # crop and resize at once: a long thin image never becomes a huge one
        box = (left, top, left + side, top + side)
        image = image.resize((self.size, self.size), Resampling.BILINEAR, box)
        if rng is not None and rng.random() < 0.5:
            image = image.transpose(Transpose.FLIP_LEFT_RIGHT)
        return image


def _pixels(image: Image) -> np.ndarray:
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[..., None]


def _open(source: Any) -> Image:
    """Open an image file or stream; only its header is read."""
    from PIL import Image

    file = Image.open(source, formats=FORMATS)
    max_pixels = Image.MAX_IMAGE_PIXELS
    if max_pixels is not None and file.width * file.height > max_pixels:  # PIL would only warn
        file.close()
        raise Image.DecompressionBombError(f"{file.width} by {file.height} pixels")
    return file
