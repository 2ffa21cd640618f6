"""Images in a folder per class or a saved `datasets` folder, decoded when first fetched."""

from __future__ import annotations

import logging
import math
import mmap
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from runner.core.data.dataset import Dataset
from runner.core.data.labels import labelled_files, relative_names, remap_labels
from runner.core.data.paths import existing_path
from runner.core.data.preprocessing import DEFAULT_OPENING, OpenOptions
from runner.core.data.split import split_samples
from runner.core.data.usable import DROP_FIX, examples, lacks_resources, usable_indices
from runner.core.device import memory
from runner.core.errors import BadSample, ConfigError, DataError, error_text
from runner.core.findings import Choice
from runner.core.interfaces.batch import Batch, RowNames, Sizes
from runner.core.schemas.data import BadSamples, Images
from runner.datasets.saved_dataset import SavedImages, is_saved

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger("runner")

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are decoded, whatever the suffix: others, such as PostScript, run programs."""
MAX_HEADERS = 500  # files that are opened before training: 0.1 s
MAX_RANGE = 2_000  # training images that are decoded for the range of 16-bit and float pixels
MAX_LISTED, MAX_NAMED = 20_000, 20  # files that are searched for bad ones, and named
MAX_DECODED = 2**28  # pixels that this search decodes: a few seconds; headers are all read
MARGIN = 1.125  # ratio of the shorter side to the side of a random crop
HEADER = np.dtype([("height", np.uint32), ("width", np.uint32)])
LEVELS = 30  # the largest data.magnitude
TRANSLATION = 150 / 331  # of the side, at the largest magnitude
ROTATION = 30.0  # degrees, likewise
SHEAR = 0.3
CONTRAST = 0.9  # added to or subtracted from the factor 1


ImageLabels = tuple[np.ndarray, tuple[str, ...], tuple[Choice, ...]]
"""Labels, class names and choices."""


class ImageCache:
    """Decoded pixels ([height, width, channels]) in memory shared by all processes.

    The memory is mapped before workers are forked. An entry's size is written after its pixels, so
    no lock is needed, and a process that dies while writing leaves no entry. The first images are
    cached, as many as fit into `limit` bytes.
    """

    def __init__(self, sizes: np.ndarray, channels: int, limit: int, dtype: Any = np.uint8) -> None:
        """Map memory for images of at most `sizes[i]` pixels each."""
        self.dtype = np.dtype(dtype)
        pixel_bytes = channels * self.dtype.itemsize
        ends = np.cumsum(sizes.astype(np.int64) * pixel_bytes + HEADER.itemsize)
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
        size = height * width * self.channels * self.dtype.itemsize
        pixels: np.ndarray = self.pixels[start + HEADER.itemsize :][:size]
        if not size:
            return None
        shaped: np.ndarray = pixels.view(self.dtype).reshape(height, width, self.channels)
        return shaped

    def store(self, index: int, pixels: np.ndarray) -> None:
        """Cache the pixels, if the image has room."""
        start = int(self.starts[index]) if index < self.capacity else 0
        flat = np.ascontiguousarray(pixels, self.dtype).reshape(-1).view(np.uint8)
        if index >= self.capacity or start + HEADER.itemsize + flat.size > self.starts[index + 1]:
            return
        self.pixels[start + HEADER.itemsize :][: flat.size] = flat
        head = np.array([pixels.shape[:2]], HEADER)
        self.pixels[start : start + HEADER.itemsize] = head.view(np.uint8)


class ImageFolder(Dataset):
    """Batches of float32 [batch, channels, size, size], and labels.

    8-bit pixels are divided by 255; those of 16 or 32 bits and floats are scaled by the range of
    all such training images (`pixel_range`), and not clipped. Images are centre-cropped and
    resized. Augmentation crops at random, flips half of the images and applies RandAugment, driven
    by the sample's seed. With mixup or CutMix, training labels are class shares, float32 [batch,
    classes].
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
        if config.bad_samples is BadSamples.drop:
            usable, dropped = self._drop_bad()
            labels, choices = labels[usable], (*choices, *dropped)
        if opening.labelled and isinstance(self.sources, list):
            if twins := find_twins(self.sources, labels, self.rows):
                log.warning("data.path: %s", twins)
                choices = (*choices, Choice("data.path", str(root), twins))
        self.target, count = torch.from_numpy(labels), len(self.sources)
        has_deep = self._check_headers()
        strata = labels if opening.labelled else None
        *parts, rule = split_samples(opening, count, config, str(root), strata)
        self.train, self.validation = parts
        self.pixel_range = () if fitted is None else fitted.pixel_range
        if fitted is None and has_deep:
            self.pixel_range, choice = self._fit_range()
            choices = (*choices, choice)
        features, classes = channels * self.size**2, len(class_names)
        sizes = Sizes("classification", features, classes=classes, class_names=class_names)
        sizes = replace(sizes, in_channels=channels, image_size=self.size)
        self.sizes = sizes if fitted is None else fitted.sizes
        self.cache, cache_choices = self._make_cache(channels)
        self.choices = (*choices, *rule, *cache_choices)

    def _read_folders(self, root: Path, opening: OpenOptions) -> ImageLabels:
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

    def _read_saved(self, root: Path, opening: OpenOptions) -> ImageLabels:
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
        sizes, dtype = np.full(count, self.size**2), np.float32 if self.pixel_range else np.uint8
        if self.config.augment and self.pixel_range:
            max_bytes = 0
        if self.config.augment and max_bytes:
            sizes = self._pixel_counts(max_bytes // channels)
        cache = ImageCache(sizes, channels, max_bytes, dtype)
        counts = f"{cache.capacity:,} of {count:,} images"
        reason = f"{counts} are decoded once, {cache.bytes / 1e6:,.0f} MB"
        choice = Choice("data.cache_mb", self.config.cache_mb, reason)
        return cache, (choice,) if self.config.cache_mb else ()

    def _pixel_counts(self, max_pixels: int) -> np.ndarray:
        """Read pixel counts from headers, until `max_pixels` in all; 0 for a bad image."""
        sizes = np.full(len(self.sources), max_pixels + 1)
        for number in range(len(self.sources)):
            sizes[number] = 0
            with suppress(Exception), _open(self.sources[number]) as file:
                sizes[number] = file.width * file.height
            if (max_pixels := max_pixels - int(sizes[number])) < 0:
                break
        return sizes

    def _check_headers(self) -> bool:
        """Return whether one of a sample of images is deep; BadSample for what is no image."""
        count, modes = len(self.sources), set[str]()
        for number in np.linspace(0, count - 1, min(MAX_HEADERS, count)).astype(int).tolist():
            try:
                with _open(self.sources[number]) as file:
                    modes.add(file.mode)
            except Exception as error:  # see _named_errors
                if self.config.bad_samples is BadSamples.stop:
                    with self._named_errors(number):
                        raise error
        return any(map(is_deep, modes))

    def _drop_bad(self) -> tuple[np.ndarray, tuple[Choice, ...]]:
        """Leave out the images that cannot be decoded; return the indices of the others."""
        count, problems = len(self.sources), self._find_problems()
        usable, choices = usable_indices(problems, count, self.config)
        if choices:
            choices = (replace(choices[0], reason=examples(problems, MAX_NAMED)),)
            if isinstance(self.sources, SavedImages):
                self.sources.kept, self.rows = usable, RowNames("row", usable)
            else:
                self.sources = [self.sources[index] for index in usable]
                self.rows = RowNames(names=[self.rows(index) for index in usable])
        return usable, choices

    def _fit_range(self) -> tuple[tuple[float, float], Choice]:
        """Return the lowest and the highest value of the training images that are deep."""
        if self.config.randaugment:
            problem = "needs images of 8 bits, and some have 16, 32 or floats"
            raise ConfigError("data.randaugment", problem, "convert them, or use data.augment=true")
        count = min(MAX_RANGE, len(self.train))
        picked = self.train[np.linspace(0, len(self.train) - 1, count).astype(int)]
        lowest, highest, images = math.inf, -math.inf, 0
        for index in picked.tolist():
            with suppress(Exception), _open(self.sources[index]) as file:  # reported when fetched
                if is_deep(file.mode):
                    values = np.asarray(file, np.float64)
                    values = values[np.isfinite(values)]
                    lowest, highest = min(lowest, values.min()), max(highest, values.max())
                    images += 1
        if not images:
            lowest, highest = 0.0, 65535.0
        reason = f"16-bit and float pixels: the range of {images:,} training images becomes 0 to 1"
        choice = Choice("data.image_range", f"{lowest:g} to {highest:g}", reason)
        return (float(lowest), float(highest)), choice

    @contextmanager
    def _named_errors(self, index: int, batch_index: int = 0) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a decoder may raise anything on malformed bytes
            if lacks_resources(error):
                raise
            problem = self._describe(index, error)
            if self.config.bad_samples is BadSamples.stop:
                problem = examples({index: problem} | self._find_problems(), MAX_NAMED)
            fix = f"; replace or remove the file, or {DROP_FIX}"
            raise BadSample(batch_index, problem, fix) from None

    def _describe(self, index: int, error: Exception) -> str:
        source = self.sources[index]
        where = source if isinstance(source, Path) else f"{self.config.path}: {self.rows(index)}"
        return f"{where}: cannot be decoded as an image ({error_text(error)})"

    def _find_problems(self) -> dict[int, str]:
        """Return the problems of bad images: all headers are read, MAX_DECODED pixels decoded."""
        problems, pixels = dict[int, str](), MAX_DECODED
        for index in range(min(MAX_LISTED, len(self.sources))):
            try:
                with _open(self.sources[index]) as file:
                    pixels -= file.width * file.height
                    if pixels >= 0:
                        file.load()
            except Exception as error:
                if lacks_resources(error):
                    raise
                problems[index] = self._describe(index, error)
        return problems

    def fetch(self, indices: np.ndarray, seeds: np.ndarray | None) -> Batch:
        """Return decoded and cropped images; raise BadSample for a file that cannot be decoded."""
        blends = seeds is not None and self.blends
        shape = (len(indices), self.size, self.size, self.sizes.in_channels or 1)
        batch = np.empty(shape, np.float32 if blends or self.pixel_range else np.uint8)
        target = torch.zeros(len(indices), self.sizes.classes or 1, dtype=torch.float32)
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
        """Return an image as [size, size, channels], 0 to 255; BadSample carries its `row`.

        It is uint8, or float32 for a deep image.
        """
        from PIL import Image, ImageOps

        pixels = self.cache.get(index)
        if pixels is None:
            with self._named_errors(index, row), _open(self.sources[index]) as file:
                image = ImageOps.exif_transpose(file)
                image = self._scaled(image) if is_deep(file.mode) else image.convert(self.mode)
            if not self.config.augment:
                image = self._crop(image, None)
            self.cache.store(index, self._pixels(image))
        elif rng is None and not self.config.augment:
            return pixels
        else:
            image = Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[..., 0])
        if self.config.augment:
            image = self._crop(image, rng)
        if rng is not None and self.config.randaugment:
            image = rand_augment(image, rng, self.config.randaugment, self.config.magnitude)
        return self._pixels(image)

    def _scaled(self, image: Image) -> Image:
        """Return a deep image as float32: the range of the training images becomes 0 to 255."""
        from PIL import Image

        if not self.pixel_range:
            raise ValueError(f"its pixels have mode {image.mode}, those of the training 8 bits")
        low, high = self.pixel_range
        values = (np.asarray(image, np.float64) - low) * (255 / ((high - low) or 1.0))
        return Image.fromarray(values.astype(np.float32))

    def labels(self) -> np.ndarray:
        """Return the class index of each image."""
        return self.target.numpy()

    def _pixels(self, image: Image) -> np.ndarray:
        pixels = np.asarray(image)
        pixels = pixels if pixels.ndim == 3 else pixels[..., None]
        return pixels.repeat(3, axis=2) if image.mode == "F" and self.mode == "RGB" else pixels

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


def is_deep(mode: str) -> bool:
    """Whether PIL's `mode` has more than 8 bits per channel: integers of 16 or 32, or floats."""
    return mode[0] in "IF"


def find_twins(files: Sequence[Path], labels: np.ndarray, rows: RowNames) -> str:
    """Return a message about files of equal bytes in different classes; "" without any."""
    by_size = defaultdict[int, list[int]](list)
    for number, file in enumerate(files):
        by_size[file.stat().st_size].append(number)
    by_content = defaultdict[bytes, list[int]](list)
    for numbers in by_size.values():
        if len(set(labels[numbers].tolist())) > 1:
            for number in numbers[:MAX_LISTED]:
                by_content[sha256(files[number].read_bytes()).digest()].append(number)
    twins = [numbers for numbers in by_content.values() if len(set(labels[numbers].tolist())) > 1]
    if not twins:
        return ""
    first, count = twins[0], len(twins)
    pair = first[0], next(number for number in first if labels[number] != labels[first[0]])
    names = " and ".join(map(rows, pair))
    what = "image is" if count == 1 else "images are"
    return f"{count:,} {what} in two classes: {names}{', …' if count > 1 else ''}"


def _open(source: Any) -> Image:
    """Open an image file or stream; only its header is read."""
    from PIL import Image

    file = Image.open(source, formats=FORMATS)
    max_pixels = Image.MAX_IMAGE_PIXELS
    if max_pixels is not None and file.width * file.height > max_pixels:  # PIL would only warn
        file.close()
        raise Image.DecompressionBombError(f"{file.width} by {file.height} pixels")
    return file


# -- augmentation beyond crop and flip -------------------------------------------------------------


def rand_augment(image: Image, rng: np.random.Generator, count: int, magnitude: float) -> Image:
    """Apply `count` operations, drawn with replacement, at strength `magnitude` of 30."""
    strength = magnitude / LEVELS
    for _ in range(count):
        name = NAMES[int(rng.integers(len(NAMES)))]
        sign = 1.0 if rng.random() < 0.5 else -1.0
        image = OPERATIONS[name](image, strength, sign)
    return image


def _affine(image: Image, *matrix: float) -> Image:
    from PIL.Image import Resampling, Transform

    return image.transform(image.size, Transform.AFFINE, matrix, Resampling.NEAREST)


def _enhance(image: Image, kind: str, change: float) -> Image:
    from PIL import ImageEnhance

    enhanced: Image = getattr(ImageEnhance, kind)(image).enhance(1 + change * CONTRAST)
    return enhanced


def _image_op(image: Image, kind: str, *arguments: int) -> Image:
    from PIL import ImageOps

    changed: Image = getattr(ImageOps, kind)(image, *arguments)
    return changed


OPERATIONS: dict[str, Callable[[Image, float, float], Image]] = {
    "identity": lambda image, strength, sign: image,
    "shear_x": lambda image, s, sign: _affine(image, 1, sign * SHEAR * s, 0, 0, 1, 0),
    "shear_y": lambda image, s, sign: _affine(image, 1, 0, 0, sign * SHEAR * s, 1, 0),
    "shift_x": lambda i, s, sign: _affine(i, 1, 0, sign * TRANSLATION * s * i.width, 0, 1, 0),
    "shift_y": lambda i, s, sign: _affine(i, 1, 0, 0, 0, 1, sign * TRANSLATION * s * i.height),
    "rotate": lambda image, strength, sign: image.rotate(sign * ROTATION * strength),
    "brightness": lambda image, s, sign: _enhance(image, "Brightness", sign * s),
    "color": lambda image, s, sign: _enhance(image, "Color", sign * s),
    "contrast": lambda image, s, sign: _enhance(image, "Contrast", sign * s),
    "sharpness": lambda image, s, sign: _enhance(image, "Sharpness", sign * s),
    "posterize": lambda image, s, sign: _image_op(image, "posterize", 8 - round(4 * s)),
    "solarize": lambda image, s, sign: _image_op(image, "solarize", round(256 * (1 - s))),
    "autocontrast": lambda image, s, sign: _image_op(image, "autocontrast"),
    "equalize": lambda image, s, sign: _image_op(image, "equalize"),
}
NAMES = tuple(OPERATIONS)


def blend(
    image: np.ndarray, other: np.ndarray, rng: np.random.Generator, mixup: float, cutmix: float
) -> tuple[np.ndarray, float]:
    """Blend two images [height, width, channels]; return float32 pixels and the first's share.

    By mixup or CutMix, whose beta parameter is above 0, or by either at random if both are.
    """
    use_cutmix = cutmix > 0 and (mixup == 0 or rng.random() < 0.5)
    alpha = cutmix if use_cutmix else mixup
    share = float(rng.beta(alpha, alpha))
    first, second = image.astype(np.float32), other.astype(np.float32)
    if not use_cutmix:
        return share * first + (1 - share) * second, share
    height, width = image.shape[:2]
    side = np.sqrt(1 - share)
    rows, columns = (_random_slice(n, side, rng) for n in (height, width))
    first[rows, columns] = second[rows, columns]
    pasted = (rows.stop - rows.start) * (columns.stop - columns.start)
    return first, 1 - pasted / (height * width)


def _random_slice(length: int, share: float, rng: np.random.Generator) -> slice:
    """Return a slice of `share` of the length around a random centre, clipped to the image."""
    centre, half = rng.integers(length), int(length * share) // 2
    return slice(max(0, int(centre) - half), min(length, int(centre) + half))
