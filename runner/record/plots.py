"""Pictures for TensorBoard, drawn with Pillow: matplotlib takes half a second to import.

TensorBoard shows them 320 pixels wide at first, so letters are drawn twice the usual size.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

SIDE = 640
MOST_CLASSES = 24  # in one picture; more could not be read
INK, GREY, PAPER = (33, 37, 41), (108, 117, 125), (255, 255, 255)
BLUE, GREEN, RED = (13, 71, 161), (27, 122, 51), (192, 28, 40)


def confusion_matrix(counts: NDArray[np.int64], names: Sequence[str]) -> NDArray[np.uint8]:
    """Counts [true, predicted] as a table, shaded by the share of each true class.

    Of many classes only those with the most mistakes are drawn, and the title says so.
    """
    kept = _worst(counts)
    right, total = int(np.trace(counts)), int(counts.sum())
    title = f"{right:,} of {total:,} right"
    if len(kept) < len(counts):
        title += f" · {len(kept)} worst of {len(counts)} classes"
    totals = counts.sum(axis=1, keepdims=True)
    shares = (counts / np.maximum(totals, 1))[np.ix_(kept, kept)]
    counts = counts[np.ix_(kept, kept)]
    labels = [str(names[i]) if i < len(names) else str(i) for i in kept]

    n = len(kept)
    size = 26 if n <= 12 else 18
    widest = max(_width(label, size) for label in labels)
    margin = int(min(widest, 150)) + 52  # the turned axis title stands left of the labels
    cell = (SIDE - margin - 12) // n
    upright = widest < cell - 6
    foot = size + 14 if upright else int(min(widest, 150)) + 14
    height = 52 + cell * n + foot + 40
    picture = Image.new("RGB", (SIDE, height), PAPER)
    draw = ImageDraw.Draw(picture)
    draw.text((SIDE / 2, 26), title, INK, _fit(title, SIDE - 24, 28), anchor="mm")
    inside = _font(max(10, min(30, int(cell * 0.42))))
    for row in range(n):
        for column in range(n):
            _cell(draw, margin + column * cell, 52 + row * cell, cell,
                  int(counts[row, column]), float(shares[row, column]), inside)  # fmt: skip
    for i, label in enumerate(labels):
        label = _shorten(label, 150, size)
        middle = i * cell + cell / 2
        draw.text((margin - 8, 52 + middle), label, INK, _font(size), anchor="rm")
        below = 52 + n * cell + 6
        if upright:
            draw.text((margin + middle, below), label, INK, _font(size), anchor="mt")
        else:
            _turned(picture, label, size, INK, x=margin + middle, y=below)
    draw.text((margin + n * cell / 2, height - 20), "predicted", GREY, _font(26), anchor="mm")
    _turned(picture, "true", 26, GREY, x=18, y=52 + n * cell / 2 - 30)
    return np.asarray(picture)


def image_grid(
    images: NDArray[np.floating], true: Sequence[str], predicted: Sequence[str]
) -> NDArray[np.uint8]:
    """Images [N, C, H, W] in rows of four, each with what it was taken for.

    Values may have any range. A right one says its class in green; a wrong one,
    framed in red, what was said and what it is.
    """
    low, high = images.min(), images.max()
    pixels = ((images - low) / (high - low or 1.0) * 255).astype(np.uint8)
    if pixels.shape[1] != 3:
        pixels = np.repeat(pixels[:, :1], 3, axis=1)
    side, edge = SIDE // 4, 6
    right = [a == b for a, b in zip(true, predicted, strict=True)]
    captions = [32 if all(right[i : i + 4]) else 58 for i in range(0, len(right), 4)]
    picture = Image.new("RGB", (SIDE, sum(captions) + side * len(captions)), PAPER)
    draw = ImageDraw.Draw(picture)
    for i, array in enumerate(pixels):
        x, y = i % 4 * side, sum(captions[: i // 4]) + i // 4 * side
        inner = (side - 2 * edge, side - 2 * edge)
        tile = Image.fromarray(array.transpose(1, 2, 0)).resize(inner, Image.Resampling.NEAREST)
        picture.paste(tile, (x + edge, y + edge))
        if right[i]:
            lines, ink, size = [true[i]], GREEN, 26
        else:
            lines, ink, size = [f"said {predicted[i]}", f"is {true[i]}"], RED, 22
            box = (x + 1, y + 1, x + side - 2, y + side - 2)
            draw.rectangle(box, outline=RED, width=edge - 1)
        for k, line in enumerate(lines):
            text, at = _shorten(line, side - 8, size), (x + side / 2, y + side + 2 + 25 * k)
            draw.text(at, text, ink, _font(size), anchor="mt")
    return np.asarray(picture)


def _worst(counts: NDArray[np.int64]) -> NDArray[np.intp]:
    """The classes to draw, in order: all, or those most often mistaken or mistaken for."""
    if len(counts) <= MOST_CLASSES:
        return np.arange(len(counts))
    wrong = counts.sum(axis=0) + counts.sum(axis=1) - 2 * np.diag(counts)
    return np.sort(np.argsort(-wrong, kind="stable")[:MOST_CLASSES])


def _cell(
    draw: ImageDraw.ImageDraw, x: int, y: int, side: int, count: int, share: float, font: Font
) -> None:
    colour = tuple(round(p + (b - p) * share) for p, b in zip(PAPER, BLUE, strict=True))
    draw.rectangle((x, y, x + side, y + side), fill=colour, outline=(222, 226, 230))
    text = str(count)
    if count and draw.textlength(text, font) < side - 2:  # zeros would only be noise
        ink = PAPER if share > 0.5 else INK
        draw.text((x + side / 2, y + side / 2), text, ink, font, anchor="mm")


def _turned(
    picture: Image.Image, text: str, size: int, ink: tuple[int, int, int], x: float, y: float
) -> None:
    """Text that reads upwards, its middle above `x` and its upper end at `y`."""
    length = int(_width(text, size)) + 2
    strip = Image.new("L", (length, size + 6), 0)
    ImageDraw.Draw(strip).text((1, (size + 6) / 2), text, 255, _font(size), anchor="lm")
    strip = strip.rotate(90, expand=True)
    picture.paste(ink, (int(x - strip.width / 2), int(y)), strip)


def _shorten(text: str, width: float, size: int) -> str:
    if _width(text, size) <= width:
        return text
    while len(text) > 1 and _width(text + "…", size) > width:
        text = text[:-1]
    return text.rstrip() + "…"


def _fit(text: str, width: float, size: int) -> Font:
    """The largest font up to `size` in which the text fits."""
    while size > 10 and _width(text, size) > width:
        size -= 1
    return _font(size)


def _width(text: str, size: int) -> float:
    return _font(size).getlength(text)


@cache
def _font(size: int) -> Font:
    """DejaVu Sans, found in matplotlib without importing it; else Pillow's, which is ASCII."""
    found = importlib.util.find_spec("matplotlib")
    for place in (found.submodule_search_locations or ()) if found else ():
        path = Path(place, "mpl-data", "fonts", "ttf", "DejaVuSans.ttf")
        if path.is_file():
            return ImageFont.truetype(str(path), size)
    return ImageFont.load_default(size)
