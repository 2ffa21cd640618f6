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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from tests import runs

CITIES = ("Bonn", "Oslo", "Rome")
Rows = list[dict[str, Any]]
Known = dict[str, Any]
"""What preprocessing.json says."""


# -- what a model must answer ----------------------------------------------------------------------


def known(run: Path) -> Known:
    """The preprocessing of a run's last checkpoint."""
    read: Known = json.loads((run / "checkpoints/last/preprocessing.json").read_text())
    return read


def weights(run: Path) -> dict[str, np.ndarray]:
    """The weights of a run's last checkpoint."""
    return load_file(run / "checkpoints/last/model.safetensors")


def table_inputs(known: Known, rows: Rows) -> np.ndarray:
    """What an mlp is given, float64 [rows, inputs]."""
    inputs: list[Any] = []
    for column in known["columns"]:
        cells = [row[column["name"]] for row in rows]
        if column["values"]:
            one_hot = [[float(cell == value) for value in column["values"]] for cell in cells]
            inputs += np.array([[*row, float(not any(row))] for row in one_hot]).T.tolist()
        else:
            inputs.append((np.array(cells) - column["mean"]) / column["deviation"])
    return np.array(inputs).T


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


@dataclass(frozen=True)
class Stranger:
    """A file to train on and one with new rows, and how they are used and understood."""

    name: str
    write: Callable[[Path, str], Path]  # the file in a folder of part `train` or `new`
    rows: Callable[[str], Rows]  # what its rows mean: a number, a category or a text by column
    target: str
    overrides: tuple[str, ...] = ("data=tabular", "model=mlp", "model.width=16")
    inputs: Callable[[Known, Rows], np.ndarray] = table_inputs
    outputs: Callable[[Path, np.ndarray, Sequence[str]], np.ndarray] = mlp_outputs
    said: str = ""  # what a line of "chosen automatically" says of the new file
    labelled: bool = True  # whether the new file has the target, so that it can be evaluated


def write_csv(path: Path, rows: Rows, *columns: str, separator: str = ",") -> Path:
    """Rows as a csv of those columns, or of all."""
    with path.open("w", newline="") as file:
        names = columns or [*rows[0]]
        writer = csv.DictWriter(file, names, extrasaction="ignore", delimiter=separator)
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


def shifted_rows(part: str) -> Rows:
    """New people are 25 years older."""
    return people(200) if part == "train" else people(90, shift=25)


def write_shifted(folder: Path, part: str) -> Path:
    """The new file has its columns in another order."""
    columns = ["age", "income", "city", "buys"]
    order = columns if part == "train" else columns[::-1]
    return write_csv(folder / f"{part}.csv", shifted_rows(part), *order)


def replaced_rows(part: str) -> Rows:
    """In the new file there is another city in the place of the first one."""
    return people(200) if part == "train" else people(90, 5, ("Cairo", *CITIES[1:]))


def write_replaced(folder: Path, part: str) -> Path:
    """A csv."""
    return write_csv(folder / f"{part}.csv", replaced_rows(part))


def houses_rows(part: str) -> Rows:
    """Prices of houses; the new ones are larger, and all of a district."""
    rng = np.random.default_rng(len(part))
    rows = []
    for area in rng.normal(90 if part == "train" else 150, 20, 150 if part == "train" else 40):
        district = "NSEW"[rng.integers(4)] if part == "train" else "W"
        price = 2500.0 * area + 50_000 * (district == "W") + rng.normal(0, 9000)
        rows.append({"area": float(area), "district": district, "price": float(price)})
    return rows


def write_houses(folder: Path, part: str) -> Path:
    """A csv separated by semicolons."""
    return write_csv(folder / f"{part}.csv", houses_rows(part), separator=";")


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


SMALL_CLASSIFIER = ("model=classifier", "model.width=16", "model.depth=1", "optimizer.lr=1e-2")
STRANGERS = [
    Stranger("columns in another order, numbers shifted", write_shifted, shifted_rows, "buys"),
    Stranger(
        "a category in another's place", write_replaced, replaced_rows, "buys",
        said="categories that no training row has: 'Cairo'",
    ),
    Stranger("prices", write_houses, houses_rows, "price"),
    Stranger(
        "reviews", write_reviews, reviews_rows, "label",
        ("data=text", "data.sequence=48", *SMALL_CLASSIFIER),
        text_inputs, classifier_outputs,
    ),
]  # fmt: skip
