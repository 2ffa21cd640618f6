"""Image augmentation beyond crop and flip, drawn from the sample's own generator.

The operations and strengths of `rand_augment` are those of torchvision's (Cubuk et al. 2020,
arXiv:1909.13719); `blend` is mixup (Zhang et al. 2018, arXiv:1710.09412) or
CutMix (Yun et al. 2019, arXiv:1905.04899).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

LEVELS = 30  # the largest data.magnitude
TRANSLATION = 150 / 331  # of the side, at the largest magnitude
ROTATION = 30.0  # degrees, likewise
SHEAR = 0.3
CONTRAST = 0.9  # added to or subtracted from the factor 1


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


def _enhancement(kind: str) -> Callable[[Image, float, float], Image]:
    def operation(image: Image, strength: float, sign: float) -> Image:
        from PIL import ImageEnhance

        changed: Image = getattr(ImageEnhance, kind)(image).enhance(1 + sign * CONTRAST * strength)
        return changed

    return operation


def _image_op(
    kind: str, strength_argument: Callable[[float], int] | None = None
) -> Callable[..., Image]:
    def operation(image: Image, strength: float, sign: float) -> Image:
        from PIL import ImageOps

        arguments = () if strength_argument is None else (strength_argument(strength),)
        changed: Image = getattr(ImageOps, kind)(image, *arguments)
        return changed

    return operation


OPERATIONS: dict[str, Callable[[Image, float, float], Image]] = {
    "identity": lambda image, strength, sign: image,
    "shear_x": lambda image, s, sign: _affine(image, 1, sign * SHEAR * s, 0, 0, 1, 0),
    "shear_y": lambda image, s, sign: _affine(image, 1, 0, 0, sign * SHEAR * s, 1, 0),
    "shift_x": lambda image, s, sign: _affine(
        image, 1, 0, sign * TRANSLATION * s * image.width, 0, 1, 0
    ),
    "shift_y": lambda i, s, sign: _affine(i, 1, 0, 0, 0, 1, sign * TRANSLATION * s * i.height),
    "rotate": lambda image, strength, sign: image.rotate(sign * ROTATION * strength),
    "brightness": _enhancement("Brightness"),
    "color": _enhancement("Color"),
    "contrast": _enhancement("Contrast"),
    "sharpness": _enhancement("Sharpness"),
    "posterize": _image_op("posterize", lambda strength: 8 - round(4 * strength)),
    "solarize": _image_op("solarize", lambda strength: round(256 * (1 - strength))),
    "autocontrast": _image_op("autocontrast"),
    "equalize": _image_op("equalize"),
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
