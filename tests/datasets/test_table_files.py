"""How files of tables are written: encodings, separators, decimal signs, compression."""

from __future__ import annotations

import csv
import gzip
import random
import shlex
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from runner.core.data.dataset import TensorsDataset
from runner.core.data.preprocessing import OpenOptions, Preprocessing
from runner.core.device import memory
from runner.core.errors import ConfigError, DataError, UsageError
from runner.core.schemas.data import BadSamples, ColumnType, Missing, Tabular
from runner.core.schemas.data import Text as TextConfig
from runner.datasets import table_files
from runner.datasets.cells import CellKind, CellRules
from runner.datasets.tabular import tabular
from runner.datasets.text import text
from tests.datasets.tables import applied, opened, values
from tests.runs import config

HEADER = "größe;preis;name;y\n"
ROWS = [f"{i};{i},5;{'blau' if i % 3 else 'grün'};{'ja' if i % 2 else 'nein'}\n" for i in range(40)]
PLAIN = "".join([HEADER, *ROWS]).replace(";", "|").replace(",", ".").replace("|", ",")


def write(folder: Path, content: str | bytes, name: str = "t.csv") -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def chosen(source: TensorsDataset) -> dict[str, Any]:
    return {c.key: c.value for c in source.choices if c.key not in ("data.task", "data.split")}


def assert_equal(a: TensorsDataset, b: TensorsDataset) -> None:
    assert torch.equal(a.inputs, b.inputs) and torch.equal(a.target, b.target)
    plain = [tuple(replace(c, format=None) for c in source.columns) for source in (a, b)]
    assert a.sizes == b.sizes and plain[0] == plain[1]


GERMAN = "".join([HEADER, *ROWS])
EXCEL = ("sep=;\n" + GERMAN).replace("\n", "\r\n").encode("cp1252")
COMMA = {"data.separator": "semicolon", "data.decimal": "comma"}
TABS = {"data.encoding": "utf-16", "data.separator": "tab"}
KNOWN: dict[str, tuple[bytes, dict[str, Any], dict[str, Any]]] = {
    "decimal comma": (GERMAN.encode(), {}, COMMA),
    "keys": (GERMAN.encode(), {"separator": "semicolon", "decimal": "comma"}, {}),
    "excel": (EXCEL, {"encoding": "cp1252"}, COMMA),
    "tabs in UTF-16": (PLAIN.replace(",", "\t").encode("utf-16"), {}, TABS),
    "a byte order mark": (PLAIN.encode("utf-8-sig"), {}, {}),
    "pipes": (PLAIN.replace(",", "|").encode(), {}, {"data.separator": "pipe"}),
    "a sign of one's own": (PLAIN.replace(",", "~").encode(), {"separator": "~"}, {}),
    "no last line break": (PLAIN.rstrip("\n").encode(), {}, {}),
    "gzip": (gzip.compress(PLAIN[:500].encode()) + gzip.compress(PLAIN[500:].encode()), {}, {}),
    "zstd": (pyarrow.Codec("zstd").compress(PLAIN.encode()).to_pybytes(), {}, {}),
    "UTF-16 in gzip": (gzip.compress(PLAIN.encode("utf-16")), {}, {"data.encoding": "utf-16"}),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_file_is_read_as_the_plain_one_and_choices_are_stated(name: str, tmp_path: Path) -> None:
    content, keys, choices = KNOWN[name]
    source = opened(write(tmp_path, content, "other.csv"), **keys)
    assert_equal(source, opened(write(tmp_path, PLAIN)))
    assert chosen(source) == choices


def test_a_separator_that_the_header_lacks_is_refused_with_the_one_it_has(tmp_path: Path) -> None:
    problem = r"data.separator: the header of \S*t.csv has no ','; it looks like semicolon; leave"
    with pytest.raises(ConfigError, match=problem):
        opened(write(tmp_path, GERMAN), separator="comma")


def test_an_index_without_a_name_is_left_out_and_others_are_refused(tmp_path: Path) -> None:
    header, *rows = PLAIN.splitlines()
    shuffled = [f"{(7 * i) % 40},{row}" for i, row in enumerate(rows)]  # by pandas
    path = write(tmp_path, "\n".join([f",{header}", *shuffled]), "pandas.csv")
    source = opened(path)
    assert_equal(source, opened(write(tmp_path, PLAIN)))
    assert chosen(source) == {"data.ignore": "1 column left out"}
    fitted = Preprocessing.of(Tabular(path=path, target="y"), source)
    later = OpenOptions(fitted=fitted, evaluates=True, labelled=False)
    for name in (path, write(tmp_path, PLAIN)):  # later data may have it as well
        assert len(tabular(Tabular(path=name, target="y"), later).target) == 40
    for cell in ("x", "-1", "7", "1.5"):
        refused = "\n".join([f",{header}", *(f"{cell},{row}" for row in rows)])
        with pytest.raises(DataError, match="data.path: .*: a column has no name, and its cells"):
            opened(write(tmp_path, refused))
    with pytest.raises(DataError, match="2 columns have no name; give each a unique name"):
        opened(write(tmp_path, "\n".join([f",,{header}", *(f"1,{row}" for row in shuffled)])))


def test_lines_are_counted_with_what_comes_before_the_rows(tmp_path: Path) -> None:
    rows = [*ROWS[:5], "1;2,5;blau;\n", *ROWS[5:]]
    for before, line in (("", 7), ("sep=;\n", 8)):
        with pytest.raises(DataError, match=f"line {line}, column 'y'"):
            opened(write(tmp_path, "".join([before, HEADER, *rows])))


def test_the_first_line_that_cannot_be_decoded_is_named_with_the_key(tmp_path: Path) -> None:
    wrong = "".join([HEADER.replace("ö", "o").replace("ß", "s"), *ROWS])
    undefined = b"1;2;\x81;ja\n"  # in cp1252
    message = r"line 2 is not UTF-8 text; .*data.encoding=(?!cp1252)"
    with pytest.raises(DataError, match=message):
        opened(write(tmp_path, wrong.encode("cp1252") + undefined))
    texts = wrong.replace("y\n", "label\n", 1).replace("name", "text", 1).encode("cp1252")
    with pytest.raises(DataError, match=message):  # a column that is read as texts
        text(TextConfig(path=write(tmp_path, texts + undefined)))
    assert len(text(TextConfig(path=write(tmp_path, texts), encoding="cp1252")).target) == 40
    with pytest.raises(DataError, match="line 42 is not CP1252 text"):
        opened(write(tmp_path, GERMAN.encode("cp1252") + undefined), encoding="cp1252")
    with pytest.raises(DataError, match="line 1 holds NUL bytes.*data.encoding=utf-16-le"):
        opened(write(tmp_path, PLAIN.encode("utf-16-le").replace(b"\xf6\0", b"o\0")[:64]))


@pytest.mark.parametrize(("first", "compress"), [(1, bytes), (2, gzip.compress)])
def test_a_file_that_is_not_utf_8_is_read_as_cp1252_with_a_warning(
    first: int, compress: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = GERMAN if first == 1 else GERMAN.replace("größe", "groesse")
    path = write(tmp_path, compress(whole.encode("cp1252")))
    source = opened(path)
    assert_equal(source, opened(write(tmp_path, whole, "utf8.csv")))
    choice = next(choice for choice in source.choices if choice.key == "data.encoding")
    assert choice.value == "cp1252" and f"{path} is not UTF-8 from line {first};" in choice.reason
    assert f"data.encoding: cp1252: {choice.reason}" in caplog.messages


def test_a_sign_or_an_encoding_that_is_none_is_refused() -> None:
    for (
        typed
    ) in 'encoding=utf-9 encoding=hex separator=:: separator=" decimal=; thousands=3'.split():
        key, _, value = typed.partition("=")
        with pytest.raises(ConfigError, match=f"data.{key}: "):
            Tabular(path="t.csv", target="y", **{key: value})
    with pytest.raises(ConfigError, match="data.thousands: and data.decimal are both"):
        Tabular(path="t.csv", target="y", thousands="comma", decimal=",")


def column(tmp_path: Path, cells: list[str], sep: str = ";", **keys: Any) -> TensorsDataset:
    """A table of the `cells` in turns, and a column of its own for the target."""
    lines = [f'"{cells[i % len(cells)]}"{sep}{"ab"[i % 2]}' for i in range(30)]
    return opened(write(tmp_path, "\n".join([f"x{sep}y", *lines])), **keys)


DECLARED = {"types": {"x": ColumnType.number}}
GROUPS: list[tuple[list[str], dict[str, Any], list[float]]] = [
    (["1,234", "999", "1,234,567.5"], {"thousands": "comma"}, [1234, 999, 1234567.5]),
    (["1.234,5", "1.234", "7"], {"thousands": "point"}, [1234.5, 1234, 7]),
    (["1 234,5", "1\u202f000", "7"], {"thousands": "space"}, [1234.5, 1000, 7]),
    (["1'234.5", "1’000", "7"], {"thousands": "apostrophe"}, [1234.5, 1000, 7]),
    (["1,234", "2,5", "7"], {"decimal": "comma"}, [1.234, 2.5, 7]),
    (["1,234", "2,5", "-,5e1"], {}, [1.234, 2.5, -5]),
    (["1,234.5", "999", "1,234"], {}, [1234.5, 999, 1234]),
    (["1.234,5", "9,25", "1.234"], {}, [1234.5, 9.25, 1234]),
    (["1.234.567", "925.000,5", "1.234"], {}, [1234567, 925000.5, 1234]),
    (["1\u202f234,5", "9,25", "1 234"], DECLARED, [1234.5, 9.25, 1234]),
    (["1'234.5", "1’000", "7"], DECLARED, [1234.5, 1000, 7]),
    (["1 234", "999", "7"], DECLARED, [1234, 999, 7]),
]


@pytest.mark.parametrize(("cells", "keys", "numbers"), GROUPS)
def test_numbers_are_read_with_the_signs_that_are_named(
    cells: list[str], keys: dict[str, Any], numbers: list[float], tmp_path: Path
) -> None:
    source = column(tmp_path, cells, **keys)
    assert values(source)[:3] == pytest.approx(numbers, rel=1e-4)


NOT_CERTAIN = [
    (["1,234", "5,678"], ";", "data.thousands=comma"),  # 1.234 or 1234
    (["1,5", "2,5"], ",", "data.decimal=comma"),  # in quotes, among commas
    (["1,5", "2.5"], ";", "data.decimal=comma"),  # both signs
    (["1'234", "999"], ";", "data.thousands=apostrophe"),
    (["1'234.5", "999"], ";", "data.thousands=apostrophe"),
    (["1 234,5", "999"], ";", "data.thousands=space"),
    (["1,234.5", "1.234,5"], ";", "data.thousands=comma"),  # both ways
    (["12 345 678", "9"], ";", "data.thousands=space"),  # or a telephone number
]


@pytest.mark.parametrize(("cells", "separator", "hint"), NOT_CERTAIN)
def test_a_column_of_ambiguous_cells_stays_text_and_is_reported(
    cells: list[str], separator: str, hint: str, tmp_path: Path
) -> None:
    source = column(tmp_path, cells, separator)
    assert source.columns[0].values == tuple(sorted(cells))
    assert [c.reason for c in source.choices if c.reason.endswith(f"use {hint}")]


def test_each_column_has_its_own_decimal_sign_and_two_signs_are_reported(tmp_path: Path) -> None:
    rows = [f"{i},5;{i}.5;{'ab'[i % 2]}" for i in range(20)]
    path = write(tmp_path, "\n".join(["p;q;y", *rows]))
    source = opened(path)
    assert [bool(c.values) for c in source.columns] == [False, False]
    expected = np.array([i + 0.5 for i in source.train])
    assert [c.mean for c in source.columns] == pytest.approx([expected.mean()] * 2)
    reasons = [c.reason for c in source.choices if c.is_notice]
    assert "'q' have decimal points, but 'p' decimal commas" in reasons[0]
    with pytest.raises(DataError, match=r"'q' holds 0.5, .*comma; use data.decimal=point"):
        opened(path, decimal="comma")
    one_sign = "comma; use data.decimal=point, or write all numbers with one decimal sign"
    with pytest.raises(DataError, match=one_sign):  # typed already, and needed
        opened(path, target="q", decimal="comma", thousands="point")


AS_TRAINED = [  # a file of the training, a new one, and what its numbers are
    (["12,5", "7"], ["1,234", "5,678"], ";", [1.234, 5.678]),
    (["1.234,5", "7"], ["1.234", "2.500"], ";", [1234, 2500]),  # 1.234 alone is a number, too
    (["1,234.5", "7"], ["1,234", "2,500"], ";", [1234, 2500]),
    (["12,5", "7"], ["1.234", "12.5"], ",", r"'x' holds 1.234, .* comma; use data.decimal=point"),
    (["1,234.5", "7"], ["12,5", "1,234"], ";", "column 'x': 12,5 is not a finite number"),
    (["12.5", "7"], ["12,5", "1,234"], ";", [12.5, 1.234]),
    (["12,5", "7"], ["1.234", "5.678"], ";", r"'x' holds 1.234, .* comma; use data.decimal=point"),
    (["12.5", "7"], ["1,234", "5,678"], ";", "column 'x': 1,234 is not a finite number"),
]


@pytest.mark.parametrize(("trained", "cells", "separator", "numbers"), AS_TRAINED)
def test_numbers_of_new_files_are_read_as_trained(
    trained: list[str], cells: list[str], separator: str, numbers: Any, tmp_path: Path
) -> None:
    source = column(tmp_path, trained)
    rows = [f"{cells[i % 2]}{separator}{'ab'[i % 2]}" for i in range(30)]
    new = write(tmp_path, "\n".join([f"x{separator}y", *rows]), "new.csv")
    if isinstance(numbers, str):
        with pytest.raises(DataError, match=numbers):
            applied(source, new)
        return
    assert values(applied(source, new))[:2] == pytest.approx(numbers, rel=1e-4)
    if cells[0] == "1,234":
        stated = applied(source, new, decimal="point", thousands="comma")
        assert values(stated)[0] == pytest.approx(1234, rel=1e-4)


def test_what_a_compressed_file_decompresses_to_must_fit_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = gzip.compress(("x,y\n" + "1,a\n" * (4 << 20)).encode())
    for content in (packed, gzip.compress(b"x" * (16 << 20))):
        path = write(tmp_path, content, "bomb.csv.gz")
        with monkeypatch.context() as patch:
            patch.setattr(memory, "available_bytes", lambda: 12 << 20)
            with pytest.raises(DataError, match=r"bomb.csv.gz: refused: its cells .* only 12,58"):
                opened(path, most_expansion=None, most_cell_mb=None)
    cut = write(tmp_path, packed[:-2000], "cut.csv.gz")
    with pytest.raises(DataError, match="cut.csv.gz: cannot be decompressed"):
        opened(cut, most_expansion=None)


@pytest.mark.parametrize("content", [b"x,y\n" + b"1,a\n2,b\n" * (1 << 18), b"x" * (2 << 20)])
@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_a_file_may_expand_only_so_much(content: bytes, codec: str, tmp_path: Path) -> None:
    packed = pyarrow.compress(content, codec, asbytes=True)
    path = write(tmp_path, gzip.compress(content) if codec == "gzip" else packed, "bomb.csv")
    with pytest.raises(ConfigError, match=r"data.most_expansion: .* more than 100 times its \d"):
        opened(path, most_cell_mb=None)
    small = pyarrow.compress(b"x,y\n" + b"1,a\n2,b\n" * 9_000, "zstd", asbytes=True)
    assert len(opened(write(tmp_path, small)).inputs) == 18_000
    old_mac = pyarrow.compress(content.replace(b"\n", b"\r"), "zstd", asbytes=True)
    with pytest.raises(ConfigError, match=r"data.most_expansion"):
        opened(write(tmp_path, old_mac), most_cell_mb=None)
    if b"," in content:
        assert len(opened(path, most_expansion=None).inputs) == 1 << 19


def test_only_kept_columns_count_as_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f"{i % 97},{'long text ' * 20}{i},{'ab'[i % 2]}\n" for i in range(20_000)]
    path = write(tmp_path, "".join(["x,note,y\n", *rows]))
    size = Path(path).stat().st_size
    monkeypatch.setattr(memory, "available_bytes", lambda: size // 2)
    with pytest.raises(DataError, match=r"take ([\d,]+) bytes, but only [\d,]+ are .*data.ignore="):
        opened(path)
    assert opened(path, ignore=["note"]).inputs.shape == (20_000, 1)
    monkeypatch.setattr(memory, "available_bytes", lambda: 90_000)  # 4 bytes a number, and a text
    with pytest.raises(DataError, match=r"its cells take 16\d,\d{3} bytes, but only 90,000"):
        opened(path, ignore=["note"])


def test_a_table_with_more_columns_than_allowed_is_refused(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(2_000)]
    line = ",".join(["1"] * 2_000)
    path = write(tmp_path, f"{','.join(names)},y\n{line},a\n{line},b\n", "wide.csv")
    table = pyarrow.table({**{name: [1.0, 2.0] for name in names}, "y": ["a", "b"]})
    parquet.write_table(table, tmp_path / "wide.parquet")
    header = write(tmp_path, "," * (1 << 21), "header.csv")  # which is not read to its end
    row = write(tmp_path, "x,y\n" + "," * 5_000 + "\n", "row.csv")
    for file in (path, str(tmp_path / "wide.parquet"), header, row):
        with pytest.raises(ConfigError, match="data.most_columns: .* more than 2,000 columns"):
            opened(file, most_columns=2_000)
    assert opened(path, most_columns=2_001).inputs.shape == (2, 2_000)
    quoted = write(tmp_path, '"a,b,c,d",y\n1,a\n2,b\n')
    assert opened(quoted, most_columns=2).inputs.shape == (2, 1)


LONG = "x" * 1_000_001


@pytest.mark.parametrize("long", [LONG, f'"{LONG[:9]},\n{LONG}"', "1" * 3_000_000])
def test_a_cell_that_is_too_long_is_an_error_with_its_line(long: str, tmp_path: Path) -> None:
    rows = [f"{i},red,{'ab'[i % 2]}\n" for i in range(20)]
    path = write(tmp_path, "".join(["x,colour,y\n", *rows[:7], f"7,{long},a\n", *rows[8:]]))
    header = write(tmp_path, "".join([f"x,{LONG},y\n", *rows]), "header.csv")
    columns = {"colour": ["a", LONG, "b"], "x": [1, 2, 3], "y": ["a", "b", "a"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    for file, where in (
        (path, "(line 9|row 8).*: a cell has more than 1 MB"),
        (header, "line 1: a cell has more"),
        (str(tmp_path / "t.parquet"), "row 2, column 'colour'"),
    ):
        with pytest.raises(ConfigError, match=f"data.most_cell_mb: .*: {where}"):
            opened(file)
    assert len(opened(path, most_cell_mb=4).inputs) == 20


@pytest.mark.parametrize("start", ["", "x,y\n1,a\n2,"])
def test_a_sparse_csv_ends_at_the_first_cell_that_is_too_long(start: str, tmp_path: Path) -> None:
    path = write(tmp_path, start)
    with open(path, "r+b") as file:
        file.truncate(1 << 30)
    problem = "most_cell_mb: .*: line 3: a cell has" if start else "line 1 has 64 MiB or more"
    with memory.peak_memory() as peak, pytest.raises(UsageError, match=problem):
        opened(path)
    assert peak.process - peak.process_before < 200 << 20


@pytest.mark.parametrize("kind", ["csv", "parquet", "folders"])
def test_a_text_is_read_as_far_as_the_sequence_needs(kind: str, tmp_path: Path) -> None:
    texts = [f"text {i} " * (400_000 if i == 3 else 10) for i in range(20)]
    labels = ["ab"[i % 2] for i in range(20)]
    path = tmp_path / f"t.{kind}"
    if kind == "folders":
        for i, (words, label) in enumerate(zip(texts, labels, strict=True)):
            (path / label).mkdir(parents=True, exist_ok=True)
            write(path / label, words, f"{i:02}.txt")
        with (path / "b" / "03.txt").open("r+b") as file:
            file.truncate(1 << 30)
        labels, texts = [*"ab"], texts[::2] + texts[1::2]
    elif kind == "csv":
        table = [f"{words},{label}\n" for words, label in zip(texts, labels, strict=True)]
        write(tmp_path, "".join(["text,label\n", *table]), path.name)
    else:
        parquet.write_table(pyarrow.table({"text": texts, "label": labels}), path)
    with memory.peak_memory() as peak:
        source = text(TextConfig(path=str(path), sequence=16))
    expected = [list(words.encode()[:16]) for words in texts]
    assert source.fetch(np.arange(20), None)[0]["input_ids"].tolist() == expected
    assert peak.process - peak.process_before < 200 << 20
    if kind != "folders":
        with pytest.raises(ConfigError, match="data.most_cell_mb: .*column 'text'"):
            text(TextConfig(path=str(path), text="label", target="text"))


def test_cells_may_be_of_any_size_and_hold_line_breaks_also_in_the_header(tmp_path: Path) -> None:
    long, lines = "x" * 200_000, '"two\r\nlines"'
    rows = [f'"{long * 12}",{i},{"ab"[i % 2]}\r\n' for i in range(4)]
    rows += [f"{lines},{i},{'ab'[i % 2]}\r\n" for i in range(16)]
    table = write(tmp_path, "".join([f'{lines},"{long}",y\r\n', *rows]))
    source = opened(table, most_cell_mb=None)
    assert [c.name for c in source.columns] == ["two\r\nlines", long]
    numbers = source.inputs[:, -1].numpy()
    assert np.array_equal(np.argsort(numbers[:4]), np.arange(4)) and len(numbers) == 20
    assert {*source.columns[0].values} <= {long * 12, "two\r\nlines"}


def test_a_workbook_and_a_header_with_an_open_quote_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a workbook or a zip archive; save its table as csv"):
        opened(write(tmp_path, b"PK\x03\x04 and so on"))
    with pytest.raises(DataError, match="unclosed quote in the header"):
        opened(write(tmp_path, 'a,"b,y\n' + "1,2,a\n" * 9))


def test_what_comes_after_the_first_block_counts_as_much(tmp_path: Path) -> None:
    rows = ["1,a\n", "2,b\n"] * 300_000  # more than a block
    with pytest.raises(DataError, match=r"line 600002 has 1 value, and the header names 2"):
        opened(write(tmp_path, "".join(["x,y\n", *rows, "3\n"])))
    source = opened(write(tmp_path, "".join(["x,y\n", *rows, *['c,"c\nd"\n'] * 100_000])))
    assert source.columns[0].values == ("1", "2", "c") and len(source.target) == 700_000
    assert source.sizes.class_names == ("a", "b", "c\nd")


CELLS = ["k", '5" t', '5"', '"a,b"', '""', '"x\ny"', '"\n"', '"q""\n""z"', '"\n1,2\n3,4\n"']


@pytest.mark.parametrize("seed", range(12))
def test_a_line_break_in_a_cell_is_found_wherever_a_block_of_the_file_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    sizes = {"BLOCK_BYTES": 200, "COLUMN_BYTES": 60, "SCAN_BYTES": 64, "MAX_ROW_BYTES": 1_000}
    for name, size in sizes.items():  # the file is more than one block can hold
        monkeypatch.setattr(table_files, name, size)
    rng = random.Random(seed)
    cells = rng.sample(CELLS, 4) if seed % 2 else CELLS[:5]  # without line breaks, too
    lines = [f"{rng.choice(cells)},{rng.choice(cells)},{i}\n" for i in range(150)]
    if not seed:
        cells, lines = CELLS, ['5","x\ny",6"\n'] * 150  # an even number of quotes in each line
    lines += ['5",k,150\n'] * ("".join(lines).count('"') % 2)  # an odd one would be unclosed
    path = Path(write(tmp_path, "".join(["a,b,c\n", *lines])))
    expected = list(csv.reader(path.read_text().splitlines(keepends=True)))[1:]
    texts = CellRules(CellKind.texts)
    content = table_files.read_content(path, lambda names, _: [*names], lambda _: texts, Tabular())
    columns = [content.columns[name].cast("string").to_pylist() for name in "abc"]
    assert [list(row) for row in zip(*columns, strict=True)] == expected


WORDS, COUNTS = [f"w{i % 3}" for i in range(30)], list(range(30))
TYPES = {
    "float16": (np.arange(30, dtype=np.float16), [float(i) for i in COUNTS]),
    "uint64": (pyarrow.array([i + 2**63 for i in COUNTS], pyarrow.uint64()), None),
    "decimal": (pyarrow.array([Decimal(i) / 4 for i in COUNTS]), [i / 4 for i in COUNTS]),
    "decimal256": (pyarrow.array(COUNTS, pyarrow.decimal256(50, 2)), COUNTS),
    "dictionary of numbers": (pyarrow.array(COUNTS).dictionary_encode(), COUNTS),
    "dictionary": (pyarrow.array(WORDS).dictionary_encode(), WORDS),
    "large_string": (pyarrow.array(WORDS, pyarrow.large_string()), WORDS),
    "string_view": (pyarrow.array(WORDS, pyarrow.string_view()), WORDS),
    "time": (pyarrow.array(COUNTS, pyarrow.time32("s")), COUNTS),
    "bool": (pyarrow.array([i % 3 == 0 for i in COUNTS]), None),
    "timestamp": (pyarrow.array(COUNTS, pyarrow.timestamp("ns", "Europe/Oslo")), None),
    "date": (pyarrow.array(COUNTS, pyarrow.date32()), None),
}  # fmt: skip


def written(folder: Path, **columns: Any) -> Path:
    path = folder / "t.parquet"
    table = pyarrow.table({**columns, "n": COUNTS, "y": ["no", "yes"] * 15})
    parquet.write_table(table, path)
    return path


@pytest.mark.parametrize("name", TYPES)
def test_every_single_value_of_parquet_is_read(name: str, tmp_path: Path) -> None:
    column, cells = TYPES[name]
    source = opened(written(tmp_path, x=column))
    assert {c.name for c in source.columns} >= ({"x", "n"} if name != "timestamp" else {"n"})
    if cells is not None:
        assert_equal(source, opened(written(tmp_path, x=cells)))


def test_nested_and_binary_columns_are_refused_by_name_or_ignored(tmp_path: Path) -> None:
    nested = {
        "list": [["a"]] * 30,
        "struct": [{"n": 1}] * 30,
        "bytes": [b"\xff"] * 30,
        "map": pyarrow.array([[("n", 1)]] * 30, pyarrow.map_(pyarrow.string(), pyarrow.int64())),
    }
    path = written(tmp_path, **nested)
    message = r"'list' of type list.*'struct' of .*leave out a column with data.ignore"
    with pytest.raises(DataError, match=message):
        opened(path)
    assert_equal(opened(path, ignore=list(nested)), opened(written(tmp_path)))


def test_all_bad_rows_are_named_by_kind_with_the_keys_that_drop_them(tmp_path: Path) -> None:
    rows = [f"{i},{'ab'[i % 2]}\n" for i in range(30)]
    rows += ["1\n", "1e99,a\n", "1,a,b\n"] + ["2e99,\n"] * 2 + ["1,\n"] * 8
    path = write(tmp_path, "".join(["x,y\n", *rows]))
    with pytest.raises(DataError) as raised:
        opened(path)
    message = str(raised.value)
    for part in (
        "line 32 has 1 value, and the header names 2 columns; ",
        "line 34 has 3 values, and the header names 2 columns; ",
        "line 33, column 'x': 1e+99 is too large for float32 (3 lines in all: also 35, 36); ",
        "line 35, column 'y': the value is missing (10 lines in all: also 36, 37, 38, 39, …); ",
    ):
        assert part in message
    assert message.endswith("or leave out the rows with data.bad_samples=drop data.most_bad=0.31")
    assert len(opened(path, bad_samples=BadSamples.drop, most_bad=0.31).target) == 30
    few = "".join(["x,y\n", *rows[:4], *["1,\n"] * 8])  # most rows would be dropped
    with pytest.raises(DataError, match="the value is missing.*; correct them") as raised:
        opened(write(tmp_path, few))
    assert "data.bad_samples" not in str(raised.value)


def test_all_that_is_wrong_with_a_file_is_one_message_with_the_keys(tmp_path: Path) -> None:
    rows = [f"{i},{'Ayr' if i % 2 else 'Bath'},{i}.5\n" for i in range(60)]
    rows += ["1e99,Ayr,1.5\n", ",Ayr,1.5\n", "1,Bath\n", "1,Bath,\n"]
    path = write(tmp_path, "".join(["area,home town,price\n", *rows]))
    changes: Any = {"missing": Missing.error, "types": {"aera": ColumnType.number}}
    with pytest.raises(ConfigError) as raised:
        tabular(Tabular(path=path, target="prise", ignore=["home twon"], **changes))
    message = str(raised.value)
    places = [
        message.index(part)
        for part in (
            "data.target: ",
            "has no column 'prise', nor 'home twon' (data.ignore) and 'aera' (data.types); ",
            "did you mean 'price'?; did you mean 'home town'?; did you mean 'area'?; ",
            "line 62, column 'area': 1e+99 is too large for float32; ",
            "line 63, column 'area': the value is missing; ",
            "line 65, column 'price': the value is missing; ",
            "line 64 has 2 values, and the header names 3 columns; ",
            "or leave out the rows with data.bad_samples=drop data.missing=drop",
        )
    ]
    assert places == sorted(places) and len(message) < 1_000
    typed = shlex.split(message.partition("the rows with ")[2])
    corrected = ["data.target=price", 'data.ignore=["home town"]', "+data.types={area: number}"]
    data = tabular(
        cast("Tabular", config("data=tabular", f"data.path={path}", *corrected, *typed).data)
    )
    assert len(data.target) == 60 and [c.name for c in data.columns] == ["area"]


def test_a_missing_column_is_named_once_and_no_needed_one_suggested(tmp_path: Path) -> None:
    rows = [f"{'' if i % 5 else '1.5'},2024-0{i % 9 + 1}-11,{i % 2}" for i in range(40)]
    path = write(tmp_path, "\n".join(["score,since,y", *rows]))
    fitted = Preprocessing.of(Tabular(path=path, target="y"), opened(path))
    assert len([column for column in fitted.columns if column.name == "score"]) == 2
    later = write(tmp_path, "\n".join(["scores,since", *(row[:-2] for row in rows)]), "later.csv")
    how = OpenOptions(fitted=fitted, evaluates=True, labelled=False)
    with pytest.raises(DataError, match=r"lacks 'score', which .*; did you mean 'scores'\?$"):
        tabular(Tabular(path=later, target="y"), how)
    write(tmp_path, "\n".join(["score", *(row.partition(",")[0] for row in rows)]), "later.csv")
    with pytest.raises(DataError, match=r"lacks 'since', which the model was trained on$"):
        tabular(Tabular(path=later, target="y"), how)
    later = write(tmp_path, "\n".join(["score,city", *["1,Ayr"] * 9]), "later.csv")
    unused = "lacks 'since', .*; columns that the model does not use: city$"
    with pytest.raises(DataError, match=unused):
        tabular(Tabular(path=later, target="y"), how)


@pytest.mark.parametrize(
    ("kind", "row", "is_column"),
    [
        ("tabular", "1,2,a", False),  # has too many cells
        ("tabular", "1e99,a", True),
        ("tabular", "1,", False),  # the target is needed
        ("text", "1,2,a", False),
        ("text", ",a", False),
    ],
)
def test_only_a_table_s_bad_column_can_be_left_out(
    kind: str, row: str, is_column: bool, tmp_path: Path
) -> None:
    path = write(tmp_path, "\n".join(["x,y", *[f"{i},{'ab'[i % 2]}" for i in range(30)], row]))
    with pytest.raises(DataError, match="; correct them") as raised:
        if kind == "text":
            text(TextConfig(path=str(path), text="x", target="y"))
        else:
            opened(path)
    assert ("leave out a column with data.ignore" in str(raised.value)) is is_column


def test_a_csv_without_a_header_is_reported(tmp_path: Path) -> None:
    rows = "".join(f"5.{i},{i}e-3,-1,{'ab'[i % 2]}\n" for i in range(30))
    hint = "is a header missing\\? the first line must name the columns, and holds numbers"
    with pytest.raises(ConfigError, match=f"data.target: .*no column 'y'; .*; {hint}"):
        opened(write(tmp_path, rows))
    with pytest.raises(DataError, match=f"2 columns are called '7'; .*; {hint}"):
        opened(write(tmp_path, "7,7,a\n" * 30))
    with pytest.raises(ConfigError) as raised:  # texts are names
        opened(write(tmp_path, f"x,z,2019,class\n{rows}"))
    assert "is a header missing" not in str(raised.value)
