"""Pictures of what a model makes of its data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

from runner.record.drawing import (
    BLUE,
    GREEN,
    GREY,
    INK,
    PAPER,
    RED,
    SIDE,
    Font,
    fit,
    font,
    shorten,
    turned,
    width,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_CLASSES = 24  # in one picture; more could not be read


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
    widest = max(width(label, size) for label in labels)
    margin = int(min(widest, 150)) + 52  # the turned axis title stands left of the labels
    cell = (SIDE - margin - 12) // n
    upright = widest < cell - 6
    foot = size + 14 if upright else int(min(widest, 150)) + 14
    height = 52 + cell * n + foot + 40
    picture = Image.new("RGB", (SIDE, height), PAPER)
    draw = ImageDraw.Draw(picture)
    draw.text((SIDE / 2, 26), title, INK, fit(title, SIDE - 24, 28), anchor="mm")
    inside = font(max(10, min(30, int(cell * 0.42))))
    for row in range(n):
        for column in range(n):
            _cell(draw, margin + column * cell, 52 + row * cell, cell,
                  int(counts[row, column]), float(shares[row, column]), inside)  # fmt: skip
    for i, label in enumerate(labels):
        label = shorten(label, 150, size)
        middle = i * cell + cell / 2
        draw.text((margin - 8, 52 + middle), label, INK, font(size), anchor="rm")
        below = 52 + n * cell + 6
        if upright:
            draw.text((margin + middle, below), label, INK, font(size), anchor="mt")
        else:
            turned(picture, label, size, INK, x=margin + middle, y=below)
    draw.text((margin + n * cell / 2, height - 20), "predicted", GREY, font(26), anchor="mm")
    turned(picture, "true", 26, GREY, x=18, y=52 + n * cell / 2 - 30)
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
            text, at = shorten(line, side - 8, size), (x + side / 2, y + side + 2 + 25 * k)
            draw.text(at, text, ink, font(size), anchor="mt")
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
