"""Tables of a few columns: written, opened, and read as those that a model was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from runner.core.data.dataset import TensorsDataset
from runner.core.data.preprocessing import OpenOptions, Preprocessing, parse_preprocessing
from runner.core.schemas.data import Tabular
from runner.datasets.tabular import tabular

Columns = dict[str, list[Any]]


def write_columns(path: Path, columns: Columns) -> Path:
    """Write a csv or parquet file, with a target `y` if there is none."""
    columns = {"y": ["no", "yes"] * (len(next(iter(columns.values()))) // 2), **columns}
    columns["y"] = columns.pop("y")  # the last one
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.table(columns), path)
        return path
    cells = [["" if cell is None else str(cell) for cell in column] for column in columns.values()]
    lines = [",".join(row) for row in zip(*cells, strict=True)]
    path.write_text("\n".join([",".join(columns), *lines, ""]))
    return path


def opened(path: str | Path, target: str = "y", **changes: Any) -> TensorsDataset:
    """Open a table to train on."""
    return tabular(Tabular(path=str(path), target=target, **changes))


def applied(source: TensorsDataset, path: str | Path, **changes: Any) -> TensorsDataset:
    """Open other data with the preprocessing that was fitted on `source`."""
    config = Tabular(path=str(path), target="y", **changes)
    saved = Preprocessing.of(Tabular(path="train", target="y"), source).dump()
    fitted = parse_preprocessing(saved, Path(path))
    return tabular(config, OpenOptions(fitted=fitted, evaluates=True))


def chosen(source: TensorsDataset, key: str) -> str:
    """Return the choices of a config key, as one text."""
    return "; ".join(f"{c.value}: {c.reason}" for c in source.choices if c.key == key)


def values(source: TensorsDataset, place: int = 0) -> np.ndarray:
    """Return the numbers of a column before they were standardised."""
    column = source.columns[place]
    assert not column.values, "is texts"
    return source.inputs[:, place].double().numpy() * column.deviation + column.mean
