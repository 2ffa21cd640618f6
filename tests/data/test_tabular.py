"""A user's table, right and wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from runner.data.config import Tabular
from runner.data.table import read_table
from runner.data.tabular import tabular
from runner.data.tensors import Tensors
from runner.errors import ConfigError, DataError

ROWS = [f"{i},{i * i},{'red' if i % 3 else 'blue'},{'yes' if i % 2 else 'no'}" for i in range(20)]


def write(folder: Path, *rows: str, header: str = "age,income,colour,bought") -> str:
    path = folder / "people.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


def opened(path: str, target: str = "bought", **changes: object) -> Tensors:
    return tabular(Tabular(path=path, target=target, **changes))  # type: ignore[arg-type]


def test_texts_to_predict_are_classes_and_texts_to_read_are_one_hot(tmp_path: Path) -> None:
    source = opened(write(tmp_path, *ROWS))
    assert source.sizes.task == "classification"
    assert source.sizes.class_names == ("no", "yes")
    assert source.sizes.for_constructor() == {"in_features": 4, "classes": 2}
    x, y = source.fetch(np.arange(20), None)
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert y.tolist() == [i % 2 for i in range(20)]
    assert x[:, 2:].tolist() == [[float(i % 3 == 0), float(i % 3 != 0)] for i in range(20)]
    train = x[torch.from_numpy(source.train), :2]
    assert torch.allclose(train.mean(dim=0), torch.zeros(2), atol=1e-6)
    assert torch.allclose(train.std(dim=0, correction=0), torch.ones(2), atol=1e-6)


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


def test_columns_can_be_ignored(tmp_path: Path) -> None:
    assert opened(write(tmp_path, *ROWS), ignore=["colour"]).sizes.in_features == 2


@pytest.mark.parametrize("separator", [";", "\t"])
def test_the_separator_is_the_headers(tmp_path: Path, separator: str) -> None:
    rows = [row.replace(",", separator) for row in ROWS]
    header = "age,income,colour,bought".replace(",", separator)
    assert opened(write(tmp_path, *rows, header=header)).sizes.in_features == 4


@pytest.mark.parametrize("value", ["", "NA", "nan", "null"])
def test_a_missing_number_is_named_by_line_and_column(tmp_path: Path, value: str) -> None:
    rows = [*ROWS[:5], f"5,{value},red,yes", *ROWS[5:]]
    with pytest.raises(DataError, match=r"people.csv: line 7, column 'income': .*missing"):
        opened(write(tmp_path, *rows))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("5,inf,red,yes", r"line 22, column 'income': inf is not finite"),
        ("5,5,,yes", r"line 22, column 'colour': .*missing"),
        ("5,5,red,", r"line 22, column 'bought': .*missing"),
        ("5,5,red", r"line 22 has 3 values, and the header names 4"),
        ('5,5,"red,yes', r"line 22"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        opened(write(tmp_path, *ROWS, row))


def test_a_text_among_numbers_makes_the_column_categories_only_if_few(tmp_path: Path) -> None:
    rows = [f"{i},{i},person {i},{'yes' if i % 2 else 'no'}" for i in range(300)]
    with pytest.raises(
        DataError, match=r"'colour' has 300 different texts.*data.ignore=\[colour\]"
    ):
        opened(write(tmp_path, *rows))


@pytest.mark.parametrize("column", ["colour", "bought"])
def test_decimal_commas_are_called_what_they_are(
    tmp_path: Path, column: str, caplog: pytest.LogCaptureFixture
) -> None:
    def rows(number: int) -> list[str]:
        told = {"colour": "{0};{0};{0},5;{1}", "bought": "{0};{0};{1};{0},5"}[column]
        texts = [told.format(i, "yes" if i % 2 else "no") for i in range(number)]
        return ["age;income;colour;bought", *texts]

    path = tmp_path / "people.csv"
    path.write_text("\n".join(rows(20)))
    opened(str(path))
    assert f"column '{column}' is taken for" in caplog.text
    assert "a decimal comma, such as '0,5': save the table with decimal points" in caplog.text
    path.write_text("\n".join(rows(300)))
    if column == "colour":
        with pytest.raises(DataError, match="300 different texts.*with decimal points"):
            opened(str(path))


def test_a_missing_column_brings_up_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path, *ROWS)
    with pytest.raises(
        ConfigError, match=r"data.target: .*no column 'boght'; did you mean 'bought'"
    ):
        opened(path, target="boght")
    with pytest.raises(ConfigError, match=r"data.ignore: .*did you mean 'colour'"):
        opened(path, ignore=["color"])


def test_a_missing_file_brings_up_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, *ROWS)
    with pytest.raises(ConfigError, match=r"data.path: .*did you mean 'people.csv'"):
        opened(str(tmp_path / "poeple.csv"))
    with pytest.raises(ConfigError, match="nor is its folder"):
        opened(str(tmp_path / "nowhere" / "people.csv"))


def test_an_empty_table_and_one_class_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="empty"):
        opened(write(tmp_path))
    with pytest.raises(DataError, match="nothing to tell apart"):
        opened(write(tmp_path, *("1,2,red,yes" for _ in range(9))))


def test_names_and_bytes_that_are_no_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="two columns are called 'age'"):
        opened(write(tmp_path, *ROWS, header="age,age,colour,bought"))
    (tmp_path / "people.csv").write_bytes(b"age,bought\n1,\xff\xfe\n")
    with pytest.raises(DataError, match="UTF-8"):
        opened(str(tmp_path / "people.csv"))


def test_a_task_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, *ROWS)
    with pytest.raises(ConfigError, match="data.task"):
        opened(path, task="regression")
    with pytest.raises(ConfigError, match="data.task: no task 'clasification'"):
        opened(path, task="clasification")


def test_parquet_reads_as_the_same_csv(tmp_path: Path) -> None:
    columns = list(zip(*(row.split(",") for row in ROWS), strict=True))
    table = pyarrow.table({
        "age": [int(v) for v in columns[0]], "income": [float(v) for v in columns[1]],
        "colour": pyarrow.array(columns[2]).dictionary_encode(), "bought": columns[3],
    })  # fmt: skip
    parquet.write_table(table, tmp_path / "people.parquet")
    a, b = opened(str(tmp_path / "people.parquet")), opened(write(tmp_path, *ROWS))
    assert torch.equal(a.inputs, b.inputs)
    assert torch.equal(a.target, b.target)
    assert a.sizes == b.sizes


def test_a_null_in_parquet_is_named_by_row_and_column(tmp_path: Path) -> None:
    table = pyarrow.table({"age": [1, None, 3], "bought": ["yes", "no", "no"]})
    parquet.write_table(table, tmp_path / "people.parquet")
    with pytest.raises(DataError, match="row 2, column 'age'"):
        opened(str(tmp_path / "people.parquet"))


def test_a_constant_column_that_is_a_thousand_times_as_large_as_its_file_is_read(
    tmp_path: Path,
) -> None:
    path, rows = tmp_path / "people.parquet", 1 << 20
    table = pyarrow.table({"a": np.zeros(rows), "b": np.arange(rows) % 7, "y": np.arange(rows) % 2})
    parquet.write_table(table, path)
    assert path.stat().st_size * 10 < table.nbytes
    source = opened(str(path), target="y")
    assert source.inputs.shape == (rows, 2) and not source.inputs[:, 0].any()


def test_a_long_text_that_is_there_a_million_times_is_kept_once(tmp_path: Path) -> None:
    texts = pyarrow.array(["x" * 1000, None, "y"] * 1000)
    numbers = np.random.default_rng(0).random(3000)
    table = pyarrow.table({"a": texts, "b": numbers})
    parquet.write_table(table, tmp_path / "people.parquet", row_group_size=700)
    found = read_table(str(tmp_path / "people.parquet")).columns["a"]
    assert found.to_pylist() == texts.to_pylist() and found.combine_chunks().nbytes < 100_000


def test_a_parquet_column_of_no_use_and_a_broken_file_are_named(tmp_path: Path) -> None:
    table = pyarrow.table(
        {"when": pyarrow.array([0, 1], pyarrow.timestamp("s")), "bought": ["y", "n"]}
    )
    parquet.write_table(table, tmp_path / "people.parquet")
    with pytest.raises(DataError, match="'when' is of type timestamp"):
        opened(str(tmp_path / "people.parquet"))
    (tmp_path / "people.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        opened(str(tmp_path / "people.parquet"))
