"""How large a table may be, and how large its numbers."""

from __future__ import annotations

import itertools
import string
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from runner.data import budget
from runner.data.config import BadSamples, Tabular
from runner.data.table import read_table
from runner.data.tabular import tabular
from runner.data.tensors import Tensors
from runner.errors import ConfigError, DataError

LABELS = ["yes", "no"] * 15
CODES = ["".join(pair) for pair in itertools.product(string.ascii_lowercase, repeat=2)]


def csv(folder: Path, *columns: list[object]) -> str:
    path = folder / "numbers.csv"
    rows = zip(*columns, LABELS, strict=True)
    header = ",".join([*(f"c{i}" for i in range(len(columns))), "label"])
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return str(path)


def opened(path: str, target: str = "label", **changes: object) -> Tensors:
    return tabular(Tabular(path=path, target=target, **changes))  # type: ignore[arg-type]


def varint(number: int, length: int = 0) -> bytes:
    """A number as parquet's footer has it, drawn out to so many bytes."""
    number, found = number * 2, []
    while number > 127 or len(found) < length - 1:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def test_a_parquet_file_whose_footer_lies_about_its_size_is_refused_as_it_is_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "small.parquet"
    texts = ["a" * (24 << 20), *["b"] * 29]
    table = pyarrow.table({"text": texts, "label": LABELS})
    options = {"compression": "zstd", "use_dictionary": False, "write_statistics": False}
    parquet.write_table(table, path, **options)
    group = parquet.ParquetFile(path).metadata.row_group(0)
    data = path.read_bytes()
    sizes = {group.total_byte_size, *(group.column(i).total_uncompressed_size for i in range(2))}
    end = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[end:]
    for size in sizes - {group.column(1).total_uncompressed_size}:
        assert varint(size) in footer
        footer = footer.replace(varint(size), varint(10, len(varint(size))))
    path.write_bytes(data[:end] + footer)
    told = parquet.ParquetFile(path).metadata.row_group(0)
    assert told.total_byte_size == told.column(0).total_uncompressed_size == 10
    with pytest.raises(DataError, match=r"data.path: .* become 25,166,\d+ \(30 rows or more\)"):
        opened(str(path))


def test_a_table_takes_as_much_memory_as_its_file_allows_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, codes = list(range(30)), CODES[:30]
    path = csv(tmp_path, numbers, codes)
    whole = opened(path)
    assert whole.inputs.shape == (30, 31)
    held = read_table(path).budget.taken
    monkeypatch.setattr(budget, "RATIO", 1)
    monkeypatch.setattr(budget, "FREE", held + 4 * 30 * 31)
    assert opened(path).inputs.equal(whole.inputs)  # the last byte that it needs
    monkeypatch.setattr(budget, "FREE", held + 4 * 30 * 31 - 1)
    with pytest.raises(DataError, match=r"'c1' as 30 numbers a row.*data.ignore=\[c1\]"):
        opened(path)
    assert opened(path, ignore=["c1"]).inputs.shape == (30, 1)
    monkeypatch.setattr(budget, "FREE", held - 1)
    with pytest.raises(DataError, match=r"data.path: .* with 30 rows, .* at most may be; split"):
        opened(path)
    small = tmp_path / "numbers.parquet"
    parquet.write_table(pyarrow.table({"a": numbers, "label": LABELS}), small)
    monkeypatch.setattr(budget, "FREE", 0)
    monkeypatch.setattr(budget, "RATIO", 0)
    with pytest.raises(DataError, match=r"data.path: .* with column 'a'.*leave out rows"):
        opened(str(small))


def test_a_table_of_many_columns_is_opened(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(20_000)]
    path = tmp_path / "wide.csv"
    rows = [",".join(["1"] * 20_000 + [label]) for label in ("yes", "no") * 3]
    path.write_text("\n".join([",".join([*names, "label"]), *rows]) + "\n")
    assert read_table(str(path)).columns.keys() == {*names, "label"}
    path.write_text("\n".join([",".join([*names, names[-1]]), *rows]) + "\n")
    with pytest.raises(DataError, match="two columns are called 'c19999'"):
        read_table(str(path))


@pytest.mark.parametrize("value", ["1e300", "-1e300", "3.5e38", "1" + "0" * 400])
def test_a_number_that_float32_cannot_hold_is_named_by_line_and_column(
    tmp_path: Path, value: str
) -> None:
    values = [*range(29), value]
    path = csv(tmp_path, values, list(range(30)))
    told = r"line 31, column 'c0': \S{1,40} is (too large for float32|not finite); .*bad_samples"
    with pytest.raises(DataError, match=told):
        opened(path)
    with pytest.raises(DataError, match=told):
        opened(path, target="c0", ignore=["label"])
    source = opened(path, bad_samples=BadSamples.drop)
    assert len(source.target) == 29 and source.inputs.isfinite().all()
    assert "line 31, column 'c0'" in source.choices[0].reason
    assert max(map(len, source.choices[0].reason.split())) < 50


def test_numbers_up_to_the_largest_of_float32_are_used(tmp_path: Path) -> None:
    values = list(np.random.default_rng(0).uniform(-3e38, 3e38, 30))
    assert opened(csv(tmp_path, values)).inputs.abs().max() < 3
    path = csv(tmp_path, values, list(range(30)))
    assert opened(path, target="c0", ignore=["label"]).sizes.target_deviation > 1e38


def test_a_number_too_far_from_the_training_rows_is_named(tmp_path: Path) -> None:
    path = csv(tmp_path, [i * 1e-30 for i in range(30)])
    row = int(opened(path).validation[0])
    values = [i * 1e-30 for i in range(30)]
    values[row] = 1e30
    with pytest.raises(DataError, match=rf"line {row + 2}, column 'c0': 1e\+30 is too far"):
        opened(csv(tmp_path, values))


def test_a_text_is_quoted_no_further_than_forty_characters(tmp_path: Path) -> None:
    path = csv(tmp_path, ["x" * 300 + str(i % 2) for i in range(30)])
    with pytest.raises(ConfigError) as told:
        opened(path, target="c0", task="regression")
    assert f"'{'x' * 40}'" in str(told.value) and "x" * 41 not in str(told.value)
