"""A user's table: what is made of it, what is refused, and bad rows, named or left out."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from runner.core.data.dataset import TensorsDataset
from runner.core.device import memory
from runner.core.errors import ConfigError, DataError
from runner.core.schemas.data import BadSamples, Missing
from tests.datasets import tables

opened = partial(tables.opened, target="bought")
HEADER = "age,income,colour,bought"
ROWS = [f"{i},{i * i},{'red' if i % 3 else 'blue'},{'yes' if i % 2 else 'no'}" for i in range(40)]


def write(folder: Path, *rows: str, header: str = HEADER) -> str:
    path = folder / "people.csv"
    path.write_bytes("\n".join([header, *rows, ""]).encode("latin-1"))
    return str(path)


def dropped(path: str | Path, **changes: Any) -> TensorsDataset:
    return opened(path, **{"bad_samples": BadSamples.drop, **changes})


def test_texts_to_predict_are_classes_and_texts_to_read_are_one_hot(tmp_path: Path) -> None:
    source = opened(write(tmp_path, *ROWS))
    assert source.sizes.task == "classification"
    assert source.sizes.class_names == ("no", "yes")
    assert source.sizes.for_constructor() == {"in_features": 5, "classes": 2}
    x, y = source.fetch(np.arange(20), None)
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert y.tolist() == [i % 2 for i in range(20)]
    assert x[:, 2:].tolist() == [[float(i % 3 == 0), float(i % 3 != 0), 0.0] for i in range(20)]
    trained = source.inputs[torch.from_numpy(source.train), :2]
    assert torch.allclose(trained.mean(dim=0), torch.zeros(2), atol=1e-6)
    assert torch.allclose(trained.std(dim=0, correction=0), torch.ones(2), atol=1e-6)


def test_many_numbers_to_predict_are_regression_and_stay_as_they_are(tmp_path: Path) -> None:
    source = opened(write(tmp_path, *(f"{i},{i}.5,red,yes" for i in range(30))), target="income")
    assert (source.sizes.task, source.sizes.classes) == ("regression", 1)
    assert source.fetch(np.array([0, 7]), None)[1].tolist() == [0.5, 7.5]
    assert [c.key for c in source.choices] == ["data.task", "data.target"]
    incomes = source.target[torch.from_numpy(source.train)].numpy()
    assert source.sizes.target_mean == pytest.approx(incomes.mean())
    assert source.sizes.target_deviation == pytest.approx(incomes.std())


def test_few_whole_numbers_to_predict_are_classes_unless_told_otherwise(tmp_path: Path) -> None:
    path = write(tmp_path, *(f"{i},{3 + i % 2 * 4},red,yes" for i in range(30)))
    source = opened(path, target="income")
    assert source.sizes.class_names == ("3", "7")
    assert source.fetch(np.array([0, 1]), None)[1].tolist() == [0, 1]
    told = opened(path, target="income", task="regression")
    assert (told.sizes.task, [c.key for c in told.choices]) == ("regression", ["data.target"])
    assert told.fetch(np.array([0, 1]), None)[1].tolist() == [3.0, 7.0]


BAD_ROWS = {
    "an infinite number": ("9,inf,red,yes", ", column 'income': inf is not a finite number"),
    "too large for float32": ("9,-1e300,red,yes", ", column 'income': -1e+300 is too large"),
    "a missing label": ("9,1,red,", ", column 'bought': the value is missing"),
    "too few values": ("9,1,red", " has 3 values, and the header names 4 columns"),
}
MISSING_CELLS = {
    "a missing number": ("9,,red,yes", ", column 'income': the value is missing"),
    "a missing category": ("9,1,,yes", ", column 'colour': the value is missing"),
}


@pytest.mark.parametrize("kind", [*BAD_ROWS, *MISSING_CELLS])
def test_a_bad_row_is_an_error_or_left_out_alone(kind: str, tmp_path: Path) -> None:
    row, problem = {**BAD_ROWS, **MISSING_CELLS}[kind]
    key, stop, drop = "data.bad_samples", {}, {"bad_samples": BadSamples.drop}
    if kind in MISSING_CELLS:
        key, stop, drop = "data.missing", {"missing": Missing.error}, {"missing": Missing.drop}
    path = write(tmp_path, *ROWS[:5], row, *ROWS[5:])
    with pytest.raises(DataError, match=f"people.csv: line 7{re.escape(problem)}.*{key}=drop"):
        opened(path, **stop)
    source = opened(path, **drop)
    told = source.choices[0]
    assert (told.key, told.value) == (key, "1 of 41 left out")
    assert told.reason.startswith("line 7") and problem in told.reason
    clean = opened(write(tmp_path, *ROWS))
    assert torch.equal(source.inputs, clean.inputs) and torch.equal(source.target, clean.target)
    assert source.sizes == clean.sizes
    assert source.train.tolist() == clean.train.tolist()
    assert [c.key for c in clean.choices] == ["data.task", "data.split"]
    assert source.rows(5) == "line 8"  # rows keep the name of their line


def test_a_few_texts_among_numbers_are_bad_cells_named_by_line(tmp_path: Path) -> None:
    path = write(tmp_path, *ROWS, "9,12a,red,yes")
    assert "column 'income': 12a is not a finite number" in dropped(path).choices[0].reason
    message = r"line 42, column 'income': 12a is not .*'\+data.types=\{income: number\}', or leave"
    with pytest.raises(DataError, match=message):
        opened(path)
    message = "line 42, column 'income': 12a is not a finite number; correct them, or leave out the"
    with pytest.raises(DataError, match=message):  # once; and a target is never missing
        opened(path, target="income")
    mixed = [row.replace("red", "7") for row in ROWS]  # a third is blue
    assert dropped(write(tmp_path, *mixed)).sizes.in_features == 5
    edge = [f"{i},{i if i % 10 else 'x'},red,{'yes' if i % 2 else 'no'}" for i in range(40)]
    assert dropped(write(tmp_path, *edge)).columns[1].values == ()  # 90 % are numbers
    edge[1] = "1,x,red,yes"
    assert dropped(write(tmp_path, *edge)).columns[1].values


def test_more_bad_rows_than_the_stated_share_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, *ROWS, *["9,1,red"] * 5)
    with pytest.raises(DataError, match=r"5 of 45 rows .* data.most_bad=0.1: line 42 has 3"):
        dropped(path)
    path = write(tmp_path, *ROWS, *ROWS, *["9,NA,red,yes"] * 8)
    told = opened(path, missing=Missing.drop).choices[0]
    assert told.value == "8 of 88 left out" and told.reason.endswith("and 3 more")
    path = write(tmp_path, *ROWS, *["9,NA,red,yes"] * 60)  # asked for, so no limit
    told = opened(path, missing=Missing.drop).choices[0]
    assert told.value == "60 of 100 left out" and told.is_notice
    path = write(tmp_path, *["9,NA,red,yes", "9,,red,no"] * 20)
    with pytest.raises(DataError, match="no row is without a missing value"):
        opened(path, missing=Missing.drop)
    with pytest.raises(DataError, match="with data.missing=mean$"):  # drop would leave none
        opened(path, missing=Missing.error)
    with pytest.raises(ConfigError, match=r"data.most_bad: must be > 0 and < 1, got 1.0"):
        dropped(path, most_bad=1.0)


@pytest.mark.parametrize("row", ['9,1,"red,yes', '9,1,red,"yes'])
def test_a_quote_that_is_not_closed_is_an_error(tmp_path: Path, row: str) -> None:
    with pytest.raises(DataError, match="unclosed quote"):  # it takes all rows after it
        dropped(write(tmp_path, *ROWS[:20], row, *ROWS[20:]))
    inches = [row.replace("red", '5" red') for row in ROWS[:-1]]  # 25 quotes
    assert opened(write(tmp_path, *inches)).sizes.in_features == 5
    long = [f"1,2,{'x' * (2 << 20)},yes", *ROWS]  # longer than what pyarrow parses at a time
    source = opened(write(tmp_path, *long), most_cell_mb=3)
    assert source.sizes.in_features in (5, 6)  # the long text may be held out


def test_a_quoted_cell_may_hold_lines_and_rows_are_counted_then(tmp_path: Path) -> None:
    rows = [row.replace("red", '"red\nand more"') for row in ROWS]
    assert opened(write(tmp_path, *rows)).sizes.in_features == 5
    with pytest.raises(DataError, match="row 41, column 'colour'"):
        opened(write(tmp_path, *rows, "9,1,,yes"), missing=Missing.error)


def test_bad_cells_of_parquet_are_left_out(tmp_path: Path) -> None:
    ages = pyarrow.array([None, float("nan"), *range(30)], pyarrow.float64())
    table = pyarrow.table({"age": ages, "bought": ["yes", "no"] * 16})
    parquet.write_table(table, tmp_path / "people.parquet")
    with pytest.raises(DataError, match="row 1, column 'age'"):
        opened(tmp_path / "people.parquet", missing=Missing.error)
    source = opened(tmp_path / "people.parquet", missing=Missing.drop)
    assert len(source.target) == 30
    assert source.choices[0].reason.startswith("row 1, column 'age': the value is missing; row 2")
    (tmp_path / "people.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        opened(tmp_path / "people.parquet")


def test_a_wrong_name_brings_up_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.ignore: .*did you mean 'colour'"):
        opened(write(tmp_path, *ROWS), ignore=["color"])
    with pytest.raises(ConfigError, match=r"data.path: .*did you mean 'people.csv'"):
        opened(tmp_path / "poeple.csv")
    with pytest.raises(ConfigError, match="nor does its folder"):
        opened(tmp_path / "nowhere" / "people.csv")


def test_a_table_without_rows_classes_or_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="data.path: .* has no rows below its header"):
        opened(write(tmp_path))
    (tmp_path / "nothing.csv").touch()
    with pytest.raises(DataError, match="data.path: .*nothing.csv is empty; it needs a header"):
        opened(tmp_path / "nothing.csv")
    with pytest.raises(DataError, match="^data.target: .*use two or more classes"):
        opened(write(tmp_path, *("1,2,red,yes" for _ in range(9))))
    with pytest.raises(DataError, match="2 columns are called 'age'"):
        opened(write(tmp_path, *ROWS, header="age,age,colour,bought"))
    with pytest.raises(ConfigError, match="no input column besides"):
        opened(write(tmp_path, "yes", "no", header="bought"))


def test_a_task_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, *(f"1,2,red,{'x' * 300}{i % 2}" for i in range(30)))
    with pytest.raises(ConfigError, match="data.task") as told:
        opened(path, task="regression")
    assert f"'{'x' * 40}'" in str(told.value) and "x" * 41 not in str(told.value)
    with pytest.raises(ConfigError, match="data.task: unknown task 'clasification'"):
        opened(path, task="clasification")


def test_a_table_that_does_not_fit_into_memory_is_refused_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"{i},1,city {i},{'yes' if i % 2 else 'no'}" for i in range(30)]
    path = write(tmp_path, *rows)
    free = 4 * Path(path).stat().st_size
    monkeypatch.setattr(memory, "available_bytes", lambda: free)
    with pytest.raises(DataError, match=r"27 numbers a row, 25 .* 'colour'.*data.ignore="):
        opened(path)
    assert opened(path, ignore=["colour"]).inputs.shape == (30, 2)
    free = 100
    with pytest.raises(DataError, match=r"data.path: .*people.csv: refused: its cells take"):
        opened(path)
    small = tmp_path / "numbers.parquet"
    parquet.write_table(pyarrow.table({"a": range(30), "bought": ["y", "n"] * 15}), small)
    with pytest.raises(DataError, match="30 rows of 2 columns take 240 bytes.*write fewer rows"):
        opened(small)


def test_the_decoded_size_of_a_parquet_file_is_counted_and_not_taken_from_its_footer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, left = tmp_path / "small.parquet", iter([1 << 20, 1 << 10])
    texts = ["a" * (4 << 20), *["b"] * 29]
    table = pyarrow.table({"text": texts, "bought": ["y", "n"] * 15})
    parquet.write_table(table, path, compression="zstd")
    monkeypatch.setattr(memory, "available_bytes", lambda: next(left))
    with pytest.raises(DataError, match=r"decoded rows take 4,194,\d+ bytes, but only 1,024"):
        opened(path)


def test_a_number_too_far_from_the_training_rows_is_named(tmp_path: Path) -> None:
    rows = [f"1,{i * 1e-30},red,{'yes' if i % 2 else 'no'}" for i in range(30)]
    row = int(opened(write(tmp_path, *rows)).validation[0])
    rows[row] = "1,1e30,red,no"
    problem = rf"line {row + 2}, column 'income': 1e\+30 is an extreme outlier"
    with pytest.raises(DataError, match=problem):
        opened(write(tmp_path, *rows))
