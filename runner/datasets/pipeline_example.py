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

FOLDER = Path(__file__).parent
MISSING = ("", "na", "n/a", "nan", "none", "null")
SEPARATORS = {"comma": ",", "point": ".", "space": " \u00a0\u202f", "apostrophe": "'’"}
JsonDict = dict[str, Any]  # preprocessing.json, or one of its columns


def parse_number(cell: str, preprocessing: JsonDict) -> float:
    """Parse a cell's number with the separators of the training file."""
    decimal = str(SEPARATORS.get(preprocessing["decimal"], preprocessing["decimal"]) or ".")
    groups = str(SEPARATORS.get(preprocessing["thousands"], preprocessing["thousands"]))
    integer_pattern = rf"\d{{1,3}}([{groups}]\d{{3}})+|\d*" if groups else r"\d*"
    cell = cell.translate(dict.fromkeys(map(ord, "€$£¥₹%"))).strip()  # of money and per cent
    if not re.fullmatch(rf"\s*[+-]?({integer_pattern})([{decimal}]\d*)?([eE][+-]?\d+)?\s*", cell):
        raise ValueError(f"{cell!r} is no number as the training file writes them")
    digits = "".join(character for character in cell if character not in groups)
    return float(digits.replace(decimal, "."))


def parse_date_part(cell: str, part: str, date_format: str) -> float:
    """Return that part of a date, given in ISO 8601 or the format `date_format`."""
    cell, iso = cell.strip(), re.match(r"\d{4}-\d\d-\d\d", cell.strip()) or not date_format
    time = datetime.fromisoformat(cell) if iso else datetime.strptime(cell, date_format)
    if time.tzinfo is not None:
        time = time.astimezone(timezone.utc).replace(tzinfo=None)  # noqa: UP017
    days = time.toordinal() - datetime(1970, 1, 1).toordinal()
    parts = {"year": time.year, "month": time.month, "hour": time.hour, "days": days}
    return float({**parts, "weekday": time.weekday()}[part])


def parse_cell(cell: str, column: JsonDict, preprocessing: JsonDict) -> float:
    """Return a cell's input value; NaN if it is missing."""
    if cell.strip().lower() in MISSING or cell in column["missing"]:
        return math.nan
    if column["part"] == "missing":
        return 0.0  # only whether there is a value
    if column["part"]:
        return parse_date_part(cell, column["part"], column.get("form", ""))
    return parse_number(cell, preprocessing)


def read_table(path: str, count: int, preprocessing: JsonDict) -> tuple[Tensor, ...]:
    """Return the numbers and category indices of the first `count` rows."""
    categories = [column for column in preprocessing["columns"] if column["values"]]
    numbers = [column for column in preprocessing["columns"] if not column["values"]]
    names = {column["name"] for column in numbers if column["part"] != "missing"}
    numbers = [c for c in numbers if c["part"] != "missing" or c["name"] not in names]
    with open(path, newline="", encoding="utf-8-sig") as file:
        dialect = csv.Sniffer().sniff(file.readline(), delimiters=",;\t|")
        file.seek(0)
        rows = list(islice(csv.DictReader(file, delimiter=dialect.delimiter), count))
    values = [[parse_cell(row[c["name"]], c, preprocessing) for c in numbers] for row in rows]
    indices = [
        [c["values"].index(cell) if cell in c["values"] else -1
         for c in categories for cell in [row[c["name"]] if row[c["name"]].strip() else ""]]
        for row in rows
    ]  # fmt: skip
    return (
        torch.tensor(values, dtype=torch.float64).reshape(len(rows), -1),
        torch.tensor(indices, dtype=torch.int64).reshape(len(rows), -1),
    )


def read_image(path: str, preprocessing: JsonDict) -> Tensor:
    """Return the scaled centre crop of an image, uint8 [channels, size, size]."""
    from PIL import Image, ImageOps

    channels, size = preprocessing["sizes"]["in_channels"], preprocessing["sizes"]["image_size"]
    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file).convert("RGB" if channels == 3 else "L")
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    image = image.resize((size, size), Image.Resampling.BILINEAR, box)
    cells = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return cells.reshape(size, size, channels).permute(2, 0, 1).contiguous()


def predict(inputs: tuple[Tensor, ...]) -> list[list[float]]:
    """Return class probabilities, or the predicted values, per sample."""
    if (FOLDER / "pipeline.onnx").is_file():
        import onnxruntime

        session = onnxruntime.InferenceSession(FOLDER / "pipeline.onnx")
        names = [node.name for node in session.get_inputs()]
        arrays = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        predictions: list[list[float]] = session.run(None, arrays)[0].tolist()
        return predictions
    with torch.no_grad():
        predictions = torch.export.load(FOLDER / "pipeline.pt2").module()(*inputs).tolist()
    return predictions


def main(paths: list[str]) -> None:
    """Print a line for each sample."""
    if not paths:
        sys.exit(__doc__)
    preprocessing = json.loads((FOLDER / "preprocessing.json").read_text(encoding="utf-8"))
    if preprocessing["columns"]:
        inputs = read_table(paths[0], int(paths[1]) if len(paths) > 1 else 10, preprocessing)
    else:
        inputs = (torch.stack([read_image(path, preprocessing) for path in paths]),)
    for row in predict(inputs):
        sys.stdout.write(",".join(map(repr, row)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
