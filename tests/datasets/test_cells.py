"""Cells are read as texts first: numbers, dates, ids and labels by strict rules of each column."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow
import pytest
import torch

from runner.core.data.arrays import arrays
from runner.core.data.dataset import TensorsDataset
from runner.core.data.preprocessing import OpenOptions, Preprocessing
from runner.core.data.target_scale import fit_target_scale, target_array
from runner.core.errors import ConfigError, DataError, RunnerError
from runner.core.interfaces.batch import Column
from runner.core.jobs import run_report as report
from runner.core.objectives.regression import RegressionObjective
from runner.core.schemas.checks import TableConfig
from runner.core.schemas.data import Arrays, ColumnType, Tabular
from runner.datasets.date_format import guess_form
from runner.datasets.table_checks import CheckedTable, check_table
from runner.datasets.tabular import tabular
from tests import runs
from tests.datasets.tables import applied, chosen, opened, values, write_columns

ROWS = 120
RNG = np.random.default_rng(0)
NUMBERS = RNG.normal(40, 9, ROWS).round(2).tolist()


def write(folder: Path, name: str = "t.csv", **columns: list[Any]) -> Path:
    """A csv of the columns, with a target `y` if there is none."""
    return write_columns(folder / name, columns)


def notices(source: TensorsDataset) -> str:
    return "\n".join(f"{c.key}: {c.value}: {c.reason}" for c in source.choices if c.is_notice)


@pytest.mark.parametrize("cells", [["11_0", "1_10", "2_20", "22_0"], ["0x10", "0x1F"], ["١٢", "٣"]])
def test_only_plain_notation_is_a_number(tmp_path: Path, cells: list[str]) -> None:
    source = opened(write(tmp_path, lot=(cells * ROWS)[:ROWS]))
    assert source.columns[0].values == tuple(sorted(cells))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_whole_numbers_beyond_2_53_keep_their_texts(tmp_path: Path, suffix: str) -> None:
    ids, labels = (
        [start + i % n for i in range(ROWS)] for start, n in ((2**53 + 1, 12), (2**60, 3))
    )
    path = write(tmp_path, f"t.{suffix}", account=ids, y=labels)
    source = opened(path)
    assert source.columns[0].values == tuple(map(str, sorted({*ids})))
    assert source.sizes.class_names == tuple(str(2**60 + i) for i in range(3))
    assert "120 of 120 cells are whole numbers that are beyond 2^53" in notices(source)
    declared = opened(path, types={"account": ColumnType.number})
    assert np.allclose(values(declared), ids)


def test_one_number_beyond_2_53_is_a_bad_cell(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 121, column 'x': 9007199254740993 is beyond"):
        opened(write(tmp_path, x=[*range(ROWS - 1), "9007199254740993"]))
    assert not opened(write(tmp_path, x=[*range(ROWS - 1), 2**53])).columns[0].values


def test_two_codes_with_leading_zeros_make_a_column_texts_at_any_place(tmp_path: Path) -> None:
    codes = [f"{(i * 997) % 90000 + 10000}" for i in range(ROWS // 2)] * 2
    codes[7], codes[90] = "01234", "07001"
    source = opened(write(tmp_path, zip=codes, decimals=NUMBERS))
    assert {"01234", "07001"} & {*source.columns[0].values} or source.columns[0].others
    assert "zip: category: 2 of 120 cells are whole numbers that have lea" in notices(source)
    source = opened(write(tmp_path, zip=RNG.permutation(codes).tolist(), decimals=NUMBERS))
    assert source.columns[0].name == "zip" and source.columns[0].values
    mixed = [*NUMBERS[:-2], "007", "008"]  # among decimals, too
    assert opened(write(tmp_path, x=mixed), types={"x": ColumnType.text}).columns[0].values
    assert "x" in opened(write(tmp_path, x=mixed, z=NUMBERS)).ids  # nearly all differ
    read = opened(write(tmp_path, x=mixed), types={"x": ColumnType.number})
    assert values(read)[-2:] == pytest.approx([7, 8], abs=1e-4)


def test_a_single_leading_zero_is_read_and_named_but_a_label_keeps_it(tmp_path: Path) -> None:
    cells = [*range(100, 100 + ROWS - 1), "007"]
    source = opened(write(tmp_path, x=cells))
    assert values(source)[-1] == pytest.approx(7, abs=1e-4)
    assert "x: number: 1 of 120 cells" in notices(source) and "'007'" in notices(source)
    labels = ["01", *[1, 10] * (ROWS // 2)][:ROWS]
    target = opened(write(tmp_path, x=NUMBERS, y=labels))
    assert target.sizes.class_names == ("01", "1", "10")


@pytest.mark.parametrize(
    ("cells", "new", "numbers"),
    [
        (["12.3 kg", "-4 kg"], ["5 kg", "7.5 kg"], [5, 7.5]),
        (["\u22121.5", "2.5"], ["\u22123", "4"], [-3, 4]),
        (["(1.00)", "2.50"], ["(3)", "4"], [-3, 4]),
        (["$(1.00)", "$2.50"], ["$(3)", "$4"], [-3, 4]),
        (["USD 12", "USD -3"], ["USD 1", "USD 2"], [1, 2]),
        (["12 %", "-3 %"], ["1 %", "2 %"], [1, 2]),
        (["42.5 €", "7 €"], ["5 €", "6 €"], [5, 6]),
        (["$ 7.25", "-$6.25"], ["$1", "$ 2"], [1, 2]),
    ],
)
def test_declared_numbers_are_read_with_a_unit_that_all_cells_share(
    tmp_path: Path, cells: list[str], new: list[str], numbers: list[float]
) -> None:
    declared = {"types": {"w": ColumnType.number}}
    path = write(tmp_path, w=cells * (ROWS // 2), z=NUMBERS)
    assert opened(path).columns[0].values  # only if they are declared
    source = opened(path, **declared)
    sizes = [float(re.sub(r"[^\d.]", "", cell)) for cell in cells]
    first = [-x if {*"-\u2212("} & {*cell} else x for x, cell in zip(sizes, cells, strict=True)]
    assert values(source)[:2] == pytest.approx(first, abs=1e-4)
    unit = source.columns[0].format.unit if source.columns[0].format else ""
    assert (f"without its unit, {unit!r}" in chosen(source, "data.types")) is bool(unit)
    later = write(tmp_path, "b.csv", w=new, z=[1, 2], y=["no", "yes"])
    assert values(applied(source, later))[:2] == pytest.approx(numbers, abs=1e-4)
    for cell in (new[0], "4 lb"):  # another unit is no number, also where all cells have it
        other = write(tmp_path, "c.csv", w=[cell, "5 lb"], z=[1, 2], y=["no", "yes"])
        missing = applied(source, other)
        assert values(missing)[1] == pytest.approx(source.columns[0].mean, abs=1e-4)


def test_numbers_with_a_unit_are_reported_with_the_override_that_reads_them(tmp_path: Path) -> None:
    cells = [f"{number} kg" for number in NUMBERS]
    source = opened(write(tmp_path, weight=cells, z=NUMBERS))
    assert [*source.ids] == ["weight"]
    assert "with '+data.types={weight: number}'" in notices(source)
    few = opened(write(tmp_path, weight=(cells[:5] * ROWS)[:ROWS], z=NUMBERS))
    assert few.columns[0].values and "{weight: number}" in notices(few)


@pytest.mark.parametrize(
    ("cell", "form"),
    [
        ("2021-03-21 19:27:40 UTC", "%Y-%m-%d %H:%M:%S UTC"),
        ("10/Oct/2000:13:55:36 -0700", "%d/%b/%Y:%H:%M:%S %z"),
        ("Mon Jan 05 13:00:01 2021", "%a %b %d %H:%M:%S %Y"),
        ("21/03/21", "%d/%m/%y"),
        ("2021-03", "%Y-%m"),
        ("5-Jan-20", "%d-%b-%y"),
        ("1.2.3", ""),
        ("Q2 2011", ""),
    ],
)
def test_a_format_is_proposed_for_dates_that_are_not_read(cell: str, form: str) -> None:
    assert guess_form([cell]) == form


def test_no_other_format_is_proposed_where_half_of_the_cells_are_iso_dates() -> None:
    assert guess_form(["2024-05-02", "week 3 of 2024"] * 20) == "%Y-%m-%d"


def test_declared_date_formats_are_read_as_iso_dates_are(tmp_path: Path) -> None:
    days = [np.datetime64("2021-01-31") + 3 * i for i in range(ROWS)]
    apache = [f"{day.item():%d/%b/%Y:12:30:00 +0200}" for day in days]
    iso = opened(write(tmp_path, when=[f"{day} 10:30:00" for day in days]))
    path = write(tmp_path, when=apache)
    form = "%d/%b/%Y:%H:%M:%S %z"
    source = opened(path, date_formats={"when": form})
    assert torch.allclose(source.inputs, iso.inputs) and source.columns[0].form == form
    proposed = notices(opened(write(tmp_path, when=apache, z=NUMBERS)))
    assert f'+data.date_formats={{when: "{form}"}}' in proposed
    assert torch.equal(applied(source, path).inputs, source.inputs)
    with pytest.raises(ConfigError, match="data.date_formats: .*do not fit '%Y'"):
        opened(path, date_formats={"when": "%Y"})
    packed = write(tmp_path, when=[f"{day.item():%d%m%Y}" for day in days])
    read = opened(packed, date_formats={"when": "%d%m%Y"})  # digits are dates if declared
    assert "year" not in [column.part for column in read.columns] or read.columns[0].mean > 2000
    for form in ("day", "%Q"):
        with pytest.raises(ConfigError, match="data.date_formats: no format of dates"):
            Tabular(path="t.csv", target="y", date_formats={"when": form})


def test_times_of_which_some_have_a_zone_are_named(tmp_path: Path) -> None:
    times = [f"2021-03-{1 + i % 28:02}T12:00:{i % 60:02}" for i in range(ROWS)]
    source = opened(
        write(tmp_path, when=[t + "+02:00" * (i % 3 == 0) for i, t in enumerate(times)])
    )
    assert source.columns[0].part and "40 of 120 times have a time zone" in notices(source)


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_the_order_of_rows_makes_no_column_an_input(tmp_path: Path, order: str) -> None:
    years = np.arange(1900, 1900 + ROWS)
    years = years if order == "sorted" else RNG.permutation(years)
    notes = [f"note {i // 2 if i < 14 else i}" for i in years.tolist()]
    source = opened(write(tmp_path, year=years.tolist(), note=notes, noise=NUMBERS))
    assert [column.name for column in source.columns] == ["year", "noise"]
    assert [*source.ids] == ["note"] and "'+data.types={note: text}'" in notices(source)


def test_a_class_for_each_row_is_an_error_with_the_override_for_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, z=NUMBERS, y=[f"{number} kg" for number in NUMBERS])
    message = r"classes in 120 rows.*if they are numbers, use '\+data.types=\{y: number\}'"
    with pytest.raises(DataError, match=message):
        opened(path)
    read = opened(path, types={"y": ColumnType.number})
    assert read.sizes.task == "regression" and read.target.tolist() == pytest.approx(NUMBERS)
    assert opened(path, task="classification").sizes.classes == len({*NUMBERS})
    rows, inputs = np.arange(ROWS), RNG.normal(size=(ROWS, 2)).astype(np.float32)
    table = CheckedTable(inputs, rows, (Column("a"), Column("b")), rows, rows[:0], classes=ROWS)
    assert not [r for r in check_table(table, TableConfig()).reasons if r.code == "table.leak"]


def test_an_id_as_target_is_named(tmp_path: Path) -> None:
    ids = RNG.permutation(10**6)[:ROWS].tolist()
    source = opened(write(tmp_path, z=NUMBERS, customer_id=ids, y=NUMBERS), "customer_id")
    assert "data.target: customer_id: its cells are all different" in notices(source)


def test_labels_that_differ_in_case_form_or_spaces_are_named(tmp_path: Path) -> None:
    labels = (["Yes", "yes ", "caf\u00e9", "cafe\u0301", "no"] * ROWS)[:ROWS]
    source = opened(write(tmp_path, z=NUMBERS, y=labels))
    assert "'Yes' and 'yes '" in notices(source) and "differ only in case" in notices(source)
    assert "'cafe\\u0301' and 'café'" in notices(source) and source.sizes.classes == 5


def test_prices_as_a_target_name_both_keys_that_read_them(tmp_path: Path) -> None:
    prices = [f'"${200_000 + 317 * i:,}"' for i in range(ROWS)]
    path = write(tmp_path, z=NUMBERS, y=prices)
    with pytest.raises(DataError, match=r"'\+data.types=\{y: number\}' data.thousands=comma"):
        opened(path)
    number = {"y": ColumnType.number}
    with pytest.raises(ConfigError, match="for commas between thousands: data.thousands=comma"):
        opened(path, types=number)
    read = opened(path, types=number, thousands="comma")
    assert read.target.tolist() == [200_000 + 317 * i for i in range(ROWS)]


def test_class_numbers_with_gaps_make_as_many_outputs_as_there_are_classes(tmp_path: Path) -> None:
    labels = np.array([7, 40, 90001] * 20)
    x = RNG.normal(size=(60, 3)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=x, y=labels)
    config = Arrays(path=str(tmp_path / "a.npz"))
    source = arrays(config)
    assert (source.sizes.classes, source.sizes.class_names) == (3, ("7", "40", "90001"))
    assert source.target.tolist() == [0, 1, 2] * 20
    fitted = Preprocessing.of(config, source)
    np.savez(tmp_path / "b.npz", x=x[:2], y=labels[1:3])
    later = Arrays(path=str(tmp_path / "b.npz"))
    assert arrays(later, OpenOptions(fitted=fitted, evaluates=True)).target.tolist() == [1, 2]


def test_targets_are_centred_in_float64() -> None:
    seconds = 1.7e9 + RNG.normal(0, 30, 200)
    fitted, _ = fit_target_scale(seconds, np.arange(200))
    mean, deviation = fitted["target_mean"], fitted["target_deviation"]
    target = torch.from_numpy(target_array(seconds, deviation))
    objective = RegressionObjective(mean, deviation)
    exact = torch.from_numpy(((seconds - mean) / deviation).astype(np.float32))[:, None]
    assert objective(exact, target).item() < 1e-12
    metrics = objective.metrics(objective.batch_sums(exact, target))
    assert metrics["rmse"] < 1e-3 and metrics["r2"] == pytest.approx(1)
    assert target_array(np.arange(5.0), 1.0).dtype == np.float32


@pytest.mark.parametrize("header_end", ["", ",", ",,"])
@pytest.mark.parametrize("row_end", ["", ",", ",,"])
def test_separators_at_line_ends_make_no_columns(
    tmp_path: Path, header_end: str, row_end: str
) -> None:
    rows = [f"{i},{i % 7}.5,{'MB'[i % 2]}" for i in range(60)]
    plain, path = tmp_path / "plain.csv", tmp_path / "t.csv"
    plain.write_text("\n".join(["a,b,y", *rows]))
    path.write_text("\n".join([f"a,b,y{header_end}", *(row + row_end for row in rows)]))
    source = opened(path)
    assert torch.equal(source.inputs, opened(plain).inputs)
    if len(row_end) == 2:
        path.write_text("\n".join([f"a,b,y{header_end}", *(f"{row},,1" for row in rows)]))
        with pytest.raises(DataError):
            opened(path)


def test_lines_that_end_in_carriage_returns_alone_are_lines(tmp_path: Path) -> None:
    path, rows = tmp_path / "mac.csv", [f"{i},{'MB'[i % 2]}" for i in range(60)]
    path.write_bytes("\r".join(["a,y", *rows, ""]).encode())
    assert len(opened(path).target) == 60
    path.write_bytes("\r".join(["a,y", *rows, "inf,M"]).encode())
    with pytest.raises(DataError, match="line 62, column 'a': inf"):
        opened(path)


def test_a_line_of_another_encoding_is_named_with_one_that_fits_alone(tmp_path: Path) -> None:
    rows = [f"{i},{('Zürich', 'Köln')[i % 2]}" for i in range(60)]
    path = tmp_path / "t.csv"
    text = "\n".join(["x,y", *rows, ""])
    path.write_bytes(text.encode() + "7,Köln\n".encode("cp1252"))
    with pytest.raises(DataError, match="line 62 is not UTF-8 text; correct it"):
        opened(path)
    path.write_bytes(text.replace("Köln", "Mål").encode("mac-roman") + b"1,\x8f\n2,\x8f\n")
    for changes in ({"encoding": "cp1252"}, {}):
        with pytest.raises(DataError, match="data.encoding=mac-roman$"):
            opened(path, **changes)
    path.write_bytes(("x,y\n" + "1,»Spaß«\n" * 9 + "ü,ä\n" * 99).encode("cp1252"))
    assert "»Spaß«" in opened(path, types={"x": ColumnType.text}).sizes.class_names


def test_whole_numbers_of_an_array_are_no_features_of_an_mlp(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=RNG.integers(0, 50, (60, 6)), y=np.arange(60) % 2)
    with pytest.raises(ConfigError, match="if they are features, save x as float32"):
        with runs.opened("data=arrays", f"data.path={tmp_path / 't.npz'}", "model=mlp"):
            pass


NAMES = ["Größe (m²)", "a b", "x.y", "b [1]", "c{d}: e", 'q"s', "plain", "50%", "yes", "it's"]


@pytest.mark.parametrize("name", NAMES)
def test_each_override_in_a_message_can_be_typed_and_works(tmp_path: Path, name: str) -> None:
    held_out = int(opened(write(tmp_path, z=NUMBERS)).validation[0])
    kinds: dict[str, tuple[list[Any], str]] = {
        "unit": ([f"{number} kg" for number in NUMBERS], "number"),
        "words": (["ca. 1", "2.5", "3"] * (ROWS // 3), "number"),
        "date": ([f"{1 + i % 28}/Mar/20{10 + i % 9}" for i in range(ROWS)], "date"),
        "two forms": ([f"0{1 + i % 9}/0{1 + i % 8}/2020" for i in range(ROWS)], "date"),
        "codes": ([f"0{i % 50}" for i in range(ROWS)], "number"),
        "notes": ([f"note {i}" for i in range(ROWS)], "text"),
        "bad cell": ([*NUMBERS[:-1], "n/k"], "number"),
        "outlier": ([1e30 if i == held_out else i * 1e-30 for i in range(ROWS)], "ignored"),
    }
    for kind, (cells, effect) in kinds.items():
        table = pyarrow.table({name: list(map(str, cells)), "z": NUMBERS, "y": ["a", "b"] * 60})
        path = tmp_path / "t.csv"
        quoted = [f'"{c.replace(chr(34), chr(34) * 2)}"' for c in (name, *table[name].to_pylist())]
        rest = [f"{z},{y}" for z, y in zip(NUMBERS, ["a", "b"] * 60, strict=True)]
        path.write_text("\n".join(map(",".join, zip(quoted, ["z,y", *rest], strict=True))))
        base = ["data=tabular", f"data.path={path}", "data.target=y"]
        try:
            message = notices(tabular(cast("Tabular", runs.config(*base).data)))
        except RunnerError as error:
            message = str(error)
        typed = overrides_in(message)
        assert typed, (kind, message)
        for override in typed:
            config = cast("Tabular", runs.config(*base, override).data)
            source = tabular(config)
            names = [column.name for column in source.columns]
            if "data.ignore" in override:
                assert name not in names
            elif effect in override or "date_formats" in override:
                column = source.columns[names.index(name)]
                is_date = column.part in ("year", "month", "weekday", "days")
                assert bool(column.values) == ("text}" in override), override
                assert is_date == (effect == "date"), override
    dotted = f"+data.types.{name}=text" if name != "c{d}: e" else f'+data.types={{"{name}": text}}'
    config = cast("Tabular", runs.config(*base, dotted).data)
    assert config.types == {name: ColumnType.text}


def overrides_in(message: str) -> list[str]:
    """The overrides of data that a message names, as a shell reads them."""
    quoted = r"'\+?data\.(?:types|ignore|date_formats)=(?:[^']|'\"'\"')*'"
    found = re.finditer(rf"{quoted}|data\.ignore=\[[^\]\s]+\]", message)
    return [shlex.split(text)[0] for text in dict.fromkeys(match[0] for match in found)]


def test_notices_are_in_end_table_and_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, weight=[f"{number} kg" for number in NUMBERS], z=NUMBERS)
    table = "data=tabular", f"data.path={path}", "data.target=y", "model=mlp", "model.width=4"
    steps = "training.steps=1", "optimization=none", "data.workers=0", "checkpoint=off"
    summary = runs.trained(*table, *steps, folder=tmp_path / "run")
    rows = dict(report._sections(summary, tmp_path / "run", [], full=False))["result"]
    assert any("+data.types={weight: number}" in text for key, text in rows if key == "data.types")
    assert "'+data.types={weight: number}'" in caplog.text
    saved = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [c for c in saved["choices"] if c["is_notice"]]
