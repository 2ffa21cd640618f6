"""Predict with pipeline.pt2 or pipeline.onnx: python pipeline_example.py new.csv [rows], or images.

Needs torch (onnxruntime for .onnx, Pillow for images), and preprocessing.json beside it. A csv is
in UTF-8, its numbers are written as those of the training file, and its dates as
in that file or as ISO 8601.
"""

import csv
import json
import math
import re
import sys
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
MISSING = ("", "na", "n/a", "nan", "none", "null")
SIGNS = {"comma": ",", "point": ".", "space": " \u00a0\u202f", "apostrophe": "'’"}
Known = dict[str, Any]  # preprocessing.json


def number(cell: str, known: Known) -> float:
    """Parse a number with the decimal and thousands signs of the training file."""
    decimal = str(SIGNS.get(known["decimal"], known["decimal"]) or ".")
    groups = str(SIGNS.get(known["thousands"], known["thousands"]))
    whole = rf"\d{{1,3}}([{groups}]\d{{3}})+|\d*" if groups else r"\d*"
    cell = cell.translate(dict.fromkeys(map(ord, "€$£¥₹%"))).strip()  # of money and per cent
    if not re.fullmatch(rf"\s*[+-]?({whole})([{decimal}]\d*)?([eE][+-]?\d+)?\s*", cell):
        raise ValueError(f"{cell!r} is no number as the training file writes them")
    return float("".join(sign for sign in cell if sign not in groups).replace(decimal, "."))


def part_of_date(cell: str, part: str, form: str) -> float:
    """Return a part of a date, which is in ISO 8601 or in the strptime format `form`."""
    cell, iso = cell.strip(), re.match(r"\d{4}-\d\d-\d\d", cell.strip()) or not form
    time = datetime.fromisoformat(cell) if iso else datetime.strptime(cell, form)
    if time.tzinfo is not None:
        time = time.astimezone(timezone.utc).replace(tzinfo=None)  # noqa: UP017
    days = time.toordinal() - datetime(1970, 1, 1).toordinal()
    parts = {"year": time.year, "month": time.month, "hour": time.hour, "days": days}
    return float({**parts, "weekday": time.weekday()}[part])


def value(cell: str, column: Known, known: Known) -> float:
    """Return the number that the program takes for a cell; NaN if it is missing."""
    if cell.strip().lower() in MISSING or cell in column["missing"]:
        return math.nan
    if column["part"] == "missing":
        return 0.0  # only whether there is a value
    if column["part"]:
        return part_of_date(cell, column["part"], column.get("form", ""))
    return number(cell, known)


def table(path: str, count: int, known: Known) -> tuple[Tensor, ...]:
    """Return the numbers and category indices of the first `count` rows."""
    categories = [column for column in known["columns"] if column["values"]]
    numbers = [column for column in known["columns"] if not column["values"]]
    names = {column["name"] for column in numbers if column["part"] != "missing"}
    numbers = [c for c in numbers if c["part"] != "missing" or c["name"] not in names]
    with open(path, newline="", encoding="utf-8-sig") as file:
        dialect = csv.Sniffer().sniff(file.readline(), delimiters=",;\t|")
        file.seek(0)
        rows = list(islice(csv.DictReader(file, delimiter=dialect.delimiter), count))
    values = [[value(row[column["name"]], column, known) for column in numbers] for row in rows]
    places = [
        [c["values"].index(cell) if cell in c["values"] else -1
         for c in categories for cell in [row[c["name"]] if row[c["name"]].strip() else ""]]
        for row in rows
    ]  # fmt: skip
    return (
        torch.tensor(values, dtype=torch.float64).reshape(len(rows), -1),
        torch.tensor(places, dtype=torch.int64).reshape(len(rows), -1),
    )


def pixels(path: str, known: Known) -> Tensor:
    """Return the centre of an image, resized; uint8 [channels, size, size]."""
    from PIL import Image, ImageOps

    channels, size = known["sizes"]["in_channels"], known["sizes"]["image_size"]
    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file).convert("RGB" if channels == 3 else "L")
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    image = image.resize((size, size), Image.Resampling.BILINEAR, box)
    cells = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return cells.reshape(size, size, channels).permute(2, 0, 1).contiguous()


def answer(inputs: tuple[Tensor, ...]) -> list[list[float]]:
    """Return the class probabilities, or the values, of each sample."""
    if (HERE / "pipeline.onnx").is_file():
        import onnxruntime

        session = onnxruntime.InferenceSession(HERE / "pipeline.onnx")
        names = [node.name for node in session.get_inputs()]
        arrays = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        answers: list[list[float]] = session.run(None, arrays)[0].tolist()
        return answers
    with torch.no_grad():
        answers = torch.export.load(HERE / "pipeline.pt2").module()(*inputs).tolist()
    return answers


def main(paths: list[str]) -> None:
    """Print a line for each sample."""
    if not paths:
        sys.exit(__doc__)
    known = json.loads((HERE / "preprocessing.json").read_text(encoding="utf-8"))
    if known["columns"]:
        inputs = table(paths[0], int(paths[1]) if len(paths) > 1 else 10, known)
    else:
        inputs = (torch.stack([pixels(path, known) for path in paths]),)
    for row in answer(inputs):
        sys.stdout.write(",".join(map(repr, row)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
