"""Files as people have them, each with an independent computation of what a model must answer.

One to train on (part `train`) and one with new rows (part `new`): `write_x(folder, part)` makes it,
and `x_rows(part)` says what its rows mean. To add one: these two functions, and a line in
`STRANGERS`. A kind of column that `table_inputs` does not know is added there, from the fields of
preprocessing.json and with numpy alone.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from pyarrow import parquet
from safetensors.numpy import load_file

from tests import runs

CITIES = ("Bonn", "Oslo", "Rome")
Rows = list[dict[str, Any]]
Known = dict[str, Any]
"""What preprocessing.json says."""


# -- what a model must answer ----------------------------------------------------------------------


def known(run: Path) -> Known:
    """The preprocessing of a run's best checkpoint."""
    read: Known = json.loads((run / "checkpoints/best/preprocessing.json").read_text())
    return read


def weights(run: Path) -> dict[str, np.ndarray]:
    """The weights of a run's best checkpoint."""
    return load_file(run / "checkpoints/best/model.safetensors")


def table_inputs(known: Known, rows: Rows) -> np.ndarray:
    """What an mlp is given, float64 [rows, inputs]."""
    inputs: list[Any] = []
    for column in known["columns"]:
        cells = [row[column["name"]] for row in rows]
        if column["values"]:
            words = ["" if cell is None else cell for cell in cells]
            one_hot = [[float(word == value) for value in column["values"]] for word in words]
            inputs += np.array([[*row, float(not any(row))] for row in one_hot]).T.tolist()
        elif column["part"] == "missing":
            inputs.append([float(cell is None) for cell in cells])
        else:
            numbers = [date_part(cell, column["part"]) for cell in cells]
            filled = np.array([column["fill"] if n is None else n for n in numbers])
            inputs.append((filled - column["mean"]) / column["deviation"])
    return np.array(inputs).T


def date_part(cell: Any, part: str) -> Any:
    """That number of a date, or the cell itself."""
    if cell is None or not part:
        return cell
    if part == "days":
        return (cell - datetime(1970, 1, 1)).days
    return cell.weekday() if part == "weekday" else getattr(cell, part)


def mlp_outputs(run: Path, inputs: np.ndarray, overrides: Sequence[str] = ()) -> np.ndarray:
    """What an mlp makes of its inputs, in float64."""
    state = weights(run)
    layers = sorted({name.rpartition(".")[0] for name in state}, key=lambda n: int(n.split(".")[1]))
    hidden = inputs
    for layer in layers:
        hidden = hidden @ state[f"{layer}.weight"].T.astype(float) + state[f"{layer}.bias"]
        hidden = hidden if layer == layers[-1] else np.maximum(hidden, 0)
    return hidden


def text_inputs(known: Known, rows: Rows) -> np.ndarray:
    """The first bytes of each text, and 256 after its end; int64 [rows, sequence]."""
    length = known["sizes"]["sequence"]
    inputs = np.full((len(rows), length), 256)
    for place, row in enumerate(rows):
        cut = row["text"].encode()[:length]
        inputs[place, : len(cut)] = list(cut)
    return inputs


def classifier_outputs(run: Path, inputs: np.ndarray, overrides: Sequence[str]) -> np.ndarray:
    """What a fresh model of that config makes of them with the checkpoint's weights."""
    with runs.opened(*overrides) as fresh, torch.no_grad():
        fresh.model.load_state_dict({n: torch.from_numpy(x) for n, x in weights(run).items()})
        ids = torch.from_numpy(inputs)
        output: Any = fresh.model.eval()(ids, (ids < 256).long())
    logits: np.ndarray = getattr(output, "logits", output).double().numpy()
    return logits


def probabilities(outputs: np.ndarray) -> np.ndarray:
    """Of each class, [rows, classes]."""
    powers = np.exp(outputs - outputs.max(1, keepdims=True))
    shares: np.ndarray = powers / powers.sum(1, keepdims=True)
    return shares


def table_probabilities(run: Path, rows: Rows) -> np.ndarray:
    """What a run of an mlp must say of rows, [rows, classes]."""
    return probabilities(mlp_outputs(run, table_inputs(known(run), rows)))


# -- the files -------------------------------------------------------------------------------------


MLP = ("data=tabular", "model=mlp", "model.width=16")


@dataclass(frozen=True)
class Stranger:
    """A file to train on and one with new rows, and how they are used and understood."""

    name: str
    write: Callable[[Path, str], Path]  # the file in a folder of part `train` or `new`
    rows: Callable[[str], Rows]  # what its rows mean: a number, a category or a text by column
    target: str
    overrides: tuple[str, ...] = MLP
    inputs: Callable[[Known, Rows], np.ndarray] = table_inputs
    outputs: Callable[[Path, np.ndarray, Sequence[str]], np.ndarray] = mlp_outputs
    said: str = ""  # what a line of "chosen automatically" says of the new file
    labelled: bool = True  # whether the new file has the target, so that it can be evaluated
    parts: Callable[[], dict[str, Rows]] = dict  # `val` and `test` rows, where they are known


def write_csv(path: Path, rows: Rows, *columns: str) -> Path:
    """Rows as a csv of those columns, or of all."""
    with path.open("w", newline="") as file:
        names = columns or [*rows[0]]
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def people(count: int, shift: float = 0.0, cities: tuple[str, ...] = CITIES) -> Rows:
    """Rows whose label follows from age, income and city."""
    rng = np.random.default_rng(int(shift * 10) + count)
    ages, incomes = rng.normal(40 + shift, 9, count), rng.normal(-3, 200, count)
    places = rng.integers(0, 9, count).tolist()
    rows = []
    for age, income, place in zip(ages.tolist(), incomes.tolist(), places, strict=True):
        city = cities[place % len(cities)]
        likes = 10 * (age - 40) + income + 90 * (city == "Rome") > 0
        rows.append({"age": age, "income": income, "city": city, "buys": "yes" if likes else "no"})
    return rows


def patients_rows(part: str) -> Rows:
    """A fifth of the rows have a gap; None is a missing value. New people are 25 years older."""
    rng = np.random.default_rng(len(part))
    rows = people(300) if part == "train" else people(90, shift=25)
    for place in range(len(rows)):
        for name in ("age", "income", "city"):
            if rng.random() < 0.08:
                rows[place][name] = None
    return rows


def write_patients(folder: Path, part: str) -> Path:
    """Gaps are written in many ways, two of them as a text; new columns have another order."""
    rows = patients_rows(part)
    gaps = [row for row in rows if row["age"] is None]
    for row, text in zip(gaps, ("unknown", "unknown", "NA", "nan", ""), strict=False):
        row["age"] = text
    return write_csv(folder / f"{part}.csv", rows, *[*rows[0]][:: 1 if part == "train" else -1])


def orders_rows(part: str) -> Rows:
    """Orders, with the time of each, ids and a flag; they come back if ordered late in the day."""
    rng = np.random.default_rng(len(part))
    first = datetime(2022, 3, 1) if part == "train" else datetime(2022, 7, 9)
    rows = []
    for place in range(240 if part == "train" else 60):
        time = first + timedelta(minutes=int(rng.integers(0, 400 * 24 * 60)))
        returned = "yes" if time.hour + rng.normal(0, 2) > 12 else "no"
        row = {"order_id": 70_000 + 3 * place, "code": f"{rng.integers(1 << 40):010x}"}
        row |= {"time": time, "gift": ("false", "true")[int(rng.integers(2))]}
        rows.append({**row, "amount": float(rng.normal(50, 20)), "returned": returned})
    return rows


def write_orders(folder: Path, part: str) -> Path:
    """Parquet with timestamps and booleans; the new file writes its times as texts and no id."""
    table = pyarrow.Table.from_pylist(orders_rows(part))
    if part == "train":
        flags = pyarrow.array([word.as_py() == "true" for word in table["gift"]])
        table = table.set_column(table.schema.get_field_index("gift"), "gift", flags)
    else:
        times = table["time"].cast(pyarrow.string())
        table = table.set_column(2, "time", times).drop_columns(["code"])
    parquet.write_table(table, folder / f"{part}.parquet")
    return folder / f"{part}.parquet"


def reviews_rows(part: str) -> Rows:
    """Reviews with commas, quotes and letters beyond ASCII; the new ones are longer."""
    rng = np.random.default_rng(len(part))
    words = {
        "bad": ("awful", "broken", "naïve", 'a "joke"', "never, ever"),
        "good": ("lovely", "fine", "très bien", 'a "gem"', "again, soon"),
    }
    length = 4 if part == "train" else 9
    rows = []
    for place in range(120 if part == "train" else 50):
        label = ("bad", "good")[place % 2]
        text = " ".join(words[label][i] for i in rng.integers(0, 5, length))
        rows.append({"text": text, "label": label})
    return rows


def write_reviews(folder: Path, part: str) -> Path:
    """A csv in UTF-8 with quoted cells."""
    return write_csv(folder / f"{part}.csv", reviews_rows(part))


def demand_rows(part: str) -> Rows:
    """Demand by day, which rises and falls with the week; the new days come later."""
    rng = np.random.default_rng(len(part))
    first, rows = datetime(2023, 1, 2) + timedelta(days=180 * (part != "train")), []
    for place in rng.permutation(180 if part == "train" else 30).tolist():
        day = first + timedelta(days=place)
        price = float(rng.normal(20, 3))
        demand = 100 + 30 * (day.weekday() >= 5) - 2 * price + float(rng.normal(0, 3))
        rows.append({"day": day, "price": price, "demand": demand})
    return rows


def write_demand(folder: Path, part: str) -> Path:
    """A csv with ISO dates."""
    rows = [{**row, "day": f"{row['day']:%Y-%m-%d}"} for row in demand_rows(part)]
    return write_csv(folder / f"{part}.csv", rows)


def last_days() -> dict[str, Rows]:
    """The last fifth by day is validation."""
    return {"val": sorted(demand_rows("train"), key=lambda row: row["day"])[-36:]}


PHOTOS = {"train": 30, "val": 11, "test": 13, "new": 17}


def photos_rows(part: str) -> Rows:
    """Images of two moods, uint8 [8, 12, 3]; the name of a mood says nothing of its place."""
    rng = np.random.default_rng(len(part))
    rows = []
    for place in range(2 * PHOTOS[part]):
        label = ("bright", "dark")[place >= PHOTOS[part]]
        pixels = rng.integers(0, 120, (8, 12, 3)) + (120 if label == "bright" else 0)
        rows.append({"pixels": pixels.astype(np.uint8), "label": label})
    return rows


def write_photos(folder: Path, part: str) -> Path:
    """Folders train, val and test, with an empty class in one; or new images by class."""
    from PIL import Image

    for name in ("train", "val", "test") if part == "train" else (part,):
        root = folder / "photos" / name if part == "train" else folder / name
        for place, row in enumerate(photos_rows(name)):
            (root / row["label"]).mkdir(parents=True, exist_ok=True)
            Image.fromarray(row["pixels"]).save(root / row["label"] / f"{place:03}.png")
        (root / "misty").mkdir(exist_ok=True)
    return folder / "photos" if part == "train" else folder / part


def photo_inputs(known: Known, rows: Rows) -> np.ndarray:
    """The central square from 0 to 1, by channel, row and column; float64 [rows, inputs]."""
    squares = np.array([row["pixels"][:, 2:10] for row in rows]) / 255
    return squares.transpose(0, 3, 1, 2).reshape(len(rows), -1)


SMALL_CLASSIFIER = ("model=classifier", "model.width=16", "model.depth=1", "optimizer.lr=1e-2")
STRANGERS = [
    Stranger(
        "gaps and words for them, other columns first", write_patients, patients_rows, "buys",
        (*MLP, "+data.types={age: number}"), said="missing cells of",
    ),
    Stranger(
        "dates, ids and flags", write_orders, orders_rows, "returned",
        ("data=tabular", "model=mlp", "model.width=16", "optimizer.lr=2e-2"),
    ),
    Stranger(
        "reviews", write_reviews, reviews_rows, "label",
        ("data=text", "data.sequence=48", *SMALL_CLASSIFIER),
        text_inputs, classifier_outputs,
    ),
    Stranger(
        "demand by day", write_demand, demand_rows, "demand",
        (*MLP, "data.split=time", "data.split_by=day", "training.validate_every=12"),
        parts=last_days,
    ),
    Stranger(
        "photos in train, val and test", write_photos, photos_rows, "label",
        (
            "data=images", "data.image_size=8", "model=mlp", "model.width=16", "optimizer.lr=3e-2",
            "training.validate_every=12",  # the best is the last
        ),
        photo_inputs, said="not classes: misty (has no images",
        parts=lambda: {part: photos_rows(part) for part in ("val", "test")},
    ),
]  # fmt: skip
