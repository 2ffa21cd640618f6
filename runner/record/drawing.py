"""Letters and colours of the pictures, which are drawn with Pillow.

matplotlib takes half a second to import. TensorBoard shows pictures 320 pixels wide at first, so
letters are drawn twice the usual size.
"""

from __future__ import annotations

import importlib.util
from bisect import bisect_right
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

SIDE = 640
INK, GREY, PAPER = (33, 37, 41), (108, 117, 125), (255, 255, 255)
BLUE, GREEN, RED = (13, 71, 161), (27, 122, 51), (192, 28, 40)
ORANGE = (217, 119, 6)


def turned(
    picture: Image.Image, text: str, size: int, ink: tuple[int, int, int], x: float, y: float
) -> None:
    """Text that reads upwards, its middle above `x` and its upper end at `y`."""
    length = int(width(text, size)) + 2
    strip = Image.new("L", (length, size + 6), 0)
    ImageDraw.Draw(strip).text((1, (size + 6) / 2), text, 255, font(size), anchor="lm")
    strip = strip.rotate(90, expand=True)
    picture.paste(ink, (int(x - strip.width / 2), int(y)), strip)


def shorten(text: str, room: float, size: int) -> str:
    """The text, its end left out where it is wider than `room` pixels."""
    if width(text, size) <= room:
        return text
    fits = bisect_right(range(1, len(text)), room, key=lambda n: width(text[:n] + "…", size))
    return text[: max(fits, 1)].rstrip() + "…"


def fit(text: str, room: float, size: int) -> Font:
    """The largest font up to `size` in which the text fits."""
    while size > 10 and width(text, size) > room:
        size -= 1
    return font(size)


def width(text: str, size: int) -> float:
    """Pixels that the text takes."""
    return font(size).getlength(text)


@cache
def font(size: int) -> Font:
    """DejaVu Sans, found in matplotlib without importing it; else Pillow's, which is ASCII."""
    found = importlib.util.find_spec("matplotlib")
    for place in (found.submodule_search_locations or ()) if found else ():
        path = Path(place, "mpl-data", "fonts", "ttf", "DejaVuSans.ttf")
        if path.is_file():
            return ImageFont.truetype(str(path), size)
    return ImageFont.load_default(size)
