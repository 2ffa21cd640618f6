"""How large a table may be, and how large its numbers."""

from __future__ import annotations

import itertools
import string
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from runner.data.config import BadSamples, Tabular
from runner.data.table import read_table
from runner.data.tabular import tabular
from runner.data.tensors import Tensors
from runner.device import memory
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


def test_a_table_that_does_not_fit_into_memory_is_refused_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = csv(tmp_path, list(range(30)), CODES[:30])
    assert opened(path).inputs.shape == (30, 31)
    free = 4 * Path(path).stat().st_size
    monkeypatch.setattr(memory, "available_bytes", lambda: free)
    with pytest.raises(DataError, match=r"31 numbers a row, 30 .* 'c1'.*data.ignore=\[c1\]"):
        opened(path)
    assert opened(path, ignore=["c1"]).inputs.shape == (30, 1)
    free = 100
    with pytest.raises(DataError, match=r"data.path: .*numbers.csv: refused: its cells take"):
        opened(path)
    small = tmp_path / "numbers.parquet"
    parquet.write_table(pyarrow.table({"a": range(30), "label": LABELS}), small)
    with pytest.raises(DataError, match=r"data.path: .* 30 rows take 480 bytes.*leave out rows"):
        opened(str(small))


def test_what_a_parquet_file_decodes_to_is_counted_whatever_its_footer_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, left = tmp_path / "small.parquet", iter([1 << 20, 1 << 10])
    texts = ["a" * (4 << 20), *["b"] * 29]
    parquet.write_table(pyarrow.table({"text": texts, "label": LABELS}), path, compression="zstd")
    monkeypatch.setattr(memory, "available_bytes", lambda: next(left))
    with pytest.raises(DataError, match=r"bytes of decoded rows take 4,194,\d+ bytes, and 1,024"):
        opened(str(path))


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
