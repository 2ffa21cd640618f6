"""Predict from a UTF-8 csv, written as the training file: pipeline_example.py NEW.csv [rows]."""

import csv
import json
import re
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

FITTED = json.loads(Path(__file__).with_name("preprocessing.json").read_text("utf-8"))
SIGNS = {"comma": ",", "point": ".", "space": " \u00a0\u202f", "apostrophe": "'’"}


def parse_cell(cell: str, column: dict[str, Any]) -> float:
    """Return a cell's input value; NaN if it is missing."""
    cell, part, form = cell.strip(), column["part"], column.get("format") or {}
    if cell.lower() in ("", "na", "n/a", "nan", "none", "null") or cell in column["missing"]:
        return float("nan")
    if part == "missing":
        return 0.0  # only whether there is a value
    if part:
        iso = re.match(r"\d{4}-\d\d-\d\d", cell) or not column.get("form")
        time = datetime.fromisoformat(cell) if iso else datetime.strptime(cell, column["form"])
        time = time.astimezone(timezone.utc) if time.tzinfo else time  # noqa: UP017
        days = time.toordinal() - 719_163  # since 1970
        parts = {"year": time.year, "month": time.month, "hour": time.hour, "days": days}
        return float({**parts, "weekday": time.weekday()}[part])
    decimal, thousands = (form.get(key) or FITTED[key] for key in ("decimal", "thousands"))
    decimal, groups = SIGNS.get(decimal, decimal) or ".", SIGNS.get(thousands, thousands)
    cell = re.sub(rf"(?<=\d)[{groups}](?=\d{{3}}(?!\d))", "", cell) if groups else cell
    cell = cell.replace(form.get("unit") or "\0", "").strip()
    if not re.fullmatch(rf"[+-]?\d*([{decimal}]\d*)?([eE][+-]?\d+)?", cell):
        raise ValueError(f"{cell!r} is no number as the training file writes them")
    return float(cell.replace(decimal, "."))


def read_table(path: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers and category indices of the first `count` rows."""
    numbers = [column for column in FITTED["columns"] if not column["values"]]
    names = {column["name"] for column in numbers if column["part"] != "missing"}
    numbers = [c for c in numbers if c["part"] != "missing" or c["name"] not in names]
    with open(path, newline="", encoding="utf-8-sig") as file:
        separator = max(",;\t|", key=file.readline().count)
        file.seek(0)
        rows = [*csv.DictReader(file, delimiter=separator)][:count]
    values = [[parse_cell(row[c["name"]], c) for c in numbers] for row in rows]
    words = {c["name"]: c["values"] for c in FITTED["columns"] if c["values"]}
    code = {name: {w: i for i, w in enumerate(values)} for name, values in words.items()}
    codes = [[code[n].get(row[n] if row[n].strip() else "", -1) for n in code] for row in rows]
    return torch.tensor(values, dtype=torch.float64), torch.tensor(codes, dtype=torch.int64)


if __name__ == "__main__":
    program = torch.export.load(Path(__file__).with_name("pipeline.pt2")).module()
    tensors = read_table(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10)
    for prediction in program(*tensors).tolist():
        sys.stdout.write(",".join(map(repr, prediction)) + "\n")  # probabilities or values
