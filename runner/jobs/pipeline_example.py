"""Predict the first rows of a csv with pipeline.pt2: python pipeline_example.py new.csv [rows].

Needs torch alone, and preprocessing.json beside it. Numbers have a decimal point, dates are ISO
8601, and a cell that is no number (no date) counts as missing.
"""

import csv
import json
import sys
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path

import torch


def number(cell: str, part: str) -> float:
    """The number of a cell, or that part of a date; NaN where there is none."""
    try:
        if not part:
            return float(cell)
        time = datetime.fromisoformat(cell.strip())
    except ValueError:
        return float("nan")
    if time.tzinfo is not None:
        time = time.astimezone(timezone.utc).replace(tzinfo=None)  # noqa: UP017
    days = time.toordinal() - datetime(1970, 1, 1).toordinal()
    parts = {"year": time.year, "month": time.month, "hour": time.hour, "days": days}
    return float({**parts, "weekday": time.weekday()}[part])


def predict(path: str, count: int) -> list[list[float]]:
    """For each of the first rows: the probabilities of the classes, or the value."""
    here = Path(__file__).parent
    columns = json.loads((here / "preprocessing.json").read_text(encoding="utf-8"))["columns"]
    with open(path, newline="", encoding="utf-8-sig") as file:
        dialect = csv.Sniffer().sniff(file.readline(), delimiters=",;\t")
        file.seek(0)
        rows = list(islice(csv.DictReader(file, delimiter=dialect.delimiter), count))
    numbers = [[number(row[c["name"]], c["part"]) for c in columns if is_number(c)] for row in rows]
    places = [
        [c["values"].index(row[c["name"]]) if row[c["name"]] in c["values"] else -1
         for c in columns if c["values"]]
        for row in rows
    ]  # fmt: skip
    program = torch.export.load(here / "pipeline.pt2").module()
    with torch.no_grad():
        answers = program(
            torch.tensor(numbers, dtype=torch.float32).reshape(len(rows), -1),
            torch.tensor(places, dtype=torch.int64).reshape(len(rows), -1),
        )
    result: list[list[float]] = answers.tolist()
    return result


def is_number(column: dict[str, object]) -> bool:
    """Whether the program gets a number of it."""
    return not column["values"] and column["part"] != "missing"


if __name__ == "__main__":
    most = int(sys.argv[2]) if len(sys.argv) > 2 else 10
    for row in predict(sys.argv[1], most):
        sys.stdout.write(",".join(map(repr, row)) + "\n")
