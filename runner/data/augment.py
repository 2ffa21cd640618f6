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
SHIFT = 150 / 331  # of the side, at the largest magnitude
TURN = 30.0  # degrees, likewise
SHEAR = 0.3
CONTRAST = 0.9  # added to or subtracted from the factor 1


def rand_augment(image: Image, draw: np.random.Generator, count: int, magnitude: float) -> Image:
    """Apply `count` operations, drawn with replacement, at strength `magnitude` of 30."""
    strength = magnitude / LEVELS
    for _ in range(count):
        name = NAMES[int(draw.integers(len(NAMES)))]
        sign = 1.0 if draw.random() < 0.5 else -1.0
        image = OPERATIONS[name](image, strength, sign)
    return image


def _affine(image: Image, *matrix: float) -> Image:
    from PIL.Image import Resampling, Transform

    return image.transform(image.size, Transform.AFFINE, matrix, Resampling.NEAREST)


def _enhance(kind: str) -> Callable[[Image, float, float], Image]:
    def change(image: Image, strength: float, sign: float) -> Image:
        from PIL import ImageEnhance

        changed: Image = getattr(ImageEnhance, kind)(image).enhance(1 + sign * CONTRAST * strength)
        return changed

    return change


def _chart(kind: str, argument: Callable[[float], int] | None = None) -> Callable[..., Image]:
    def change(image: Image, strength: float, sign: float) -> Image:
        from PIL import ImageOps

        more = () if argument is None else (argument(strength),)
        changed: Image = getattr(ImageOps, kind)(image, *more)
        return changed

    return change


OPERATIONS: dict[str, Callable[[Image, float, float], Image]] = {
    "identity": lambda image, strength, sign: image,
    "shear_x": lambda image, s, sign: _affine(image, 1, sign * SHEAR * s, 0, 0, 1, 0),
    "shear_y": lambda image, s, sign: _affine(image, 1, 0, 0, sign * SHEAR * s, 1, 0),
    "shift_x": lambda image, s, sign: _affine(image, 1, 0, sign * SHIFT * s * image.width, 0, 1, 0),
    "shift_y": lambda i, s, sign: _affine(i, 1, 0, 0, 0, 1, sign * SHIFT * s * i.height),
    "rotate": lambda image, strength, sign: image.rotate(sign * TURN * strength),
    "brightness": _enhance("Brightness"),
    "color": _enhance("Color"),
    "contrast": _enhance("Contrast"),
    "sharpness": _enhance("Sharpness"),
    "posterize": _chart("posterize", lambda strength: 8 - round(4 * strength)),
    "solarize": _chart("solarize", lambda strength: round(256 * (1 - strength))),
    "autocontrast": _chart("autocontrast"),
    "equalize": _chart("equalize"),
}
NAMES = tuple(OPERATIONS)


def blend(
    one: np.ndarray, other: np.ndarray, draw: np.random.Generator, mixup: float, cutmix: float
) -> tuple[np.ndarray, float]:
    """Blend two images [height, width, channels]; return float32 pixels and the first's share.

    By mixup or CutMix, whose beta parameter is above 0, or by either at random if both are.
    """
    cuts = cutmix > 0 and (mixup == 0 or draw.random() < 0.5)
    alpha = cutmix if cuts else mixup
    share = float(draw.beta(alpha, alpha))
    first, second = one.astype(np.float32), other.astype(np.float32)
    if not cuts:
        return share * first + (1 - share) * second, share
    height, width = one.shape[:2]
    side = np.sqrt(1 - share)
    rows, columns = (_stretch(n, side, draw) for n in (height, width))
    first[rows, columns] = second[rows, columns]
    pasted = (rows.stop - rows.start) * (columns.stop - columns.start)
    return first, 1 - pasted / (height * width)


def _stretch(length: int, share: float, draw: np.random.Generator) -> slice:
    """Return a slice of `share` of the length around a random centre, clipped to the image."""
    centre, half = draw.integers(length), int(length * share) // 2
    return slice(max(0, int(centre) - half), min(length, int(centre) + half))
