"""What a table's columns are taken for, and what a model gets of missing values and dates."""

from __future__ import annotations

import json
import re
from datetime import date, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from rich.console import Console

from runner.core.data.dataset import TensorsDataset
from runner.core.data.preprocessing import OpenOptions, Preprocessing, parse_preprocessing
from runner.core.errors import ConfigError, DataError
from runner.core.jobs import run_report as report
from runner.core.schemas.data import BadSamples, ColumnType, Missing, Tabular
from runner.datasets.tabular import tabular
from tests import runs
from tests.datasets.tables import Columns, applied, chosen, opened
from tests.datasets.tables import write_columns as write

ROWS = 240


def titles(source: TensorsDataset) -> list[str]:
    return [column.title for column in source.columns]


def numbers(seed: int = 0) -> list[Any]:
    drawn: list[Any] = np.random.default_rng(seed).normal(40, 9, ROWS).round(3).tolist()
    return drawn


def test_texts_among_declared_numbers_are_missing_and_lines_are_named(tmp_path: Path) -> None:
    ages, gone = numbers(), [11, 200]
    ages[11] = ages[200] = "unknown"
    declared: Any = {"types": {"age": ColumnType.number}}
    source = opened(write(tmp_path / "a.csv", {"age": ages}), **declared)
    assert titles(source) == ["age", "age (missing)"]
    text = chosen(source, "data.missing")
    assert "2 of 240 cells of 'age' read as missing" in text
    assert "'unknown' in line 13, 'unknown' in line 202" in text
    assert source.inputs[gone, 1].tolist() == [1, 1] and source.inputs[:, 1].sum() == 2
    known = np.array([ages[i] for i in source.train.tolist() if i not in gone])
    assert source.columns[0].mean == pytest.approx(known.mean())
    assert source.columns[0].deviation == pytest.approx(known.std())
    assert np.allclose(source.inputs[gone, 0], 0, atol=1e-6)
    # in other data texts are missing values as in training
    new = applied(source, write(tmp_path / "b.csv", {"age": ["unknown", 4, "other", 5]}))
    assert new.inputs[:, 1].tolist() == [1, 0, 1, 0]
    plain = opened(write(tmp_path / "a.csv", {"age": numbers()}))
    with pytest.raises(DataError, match="line 2, column 'age': other is not a finite number"):
        applied(plain, write(tmp_path / "b.csv", {"age": ["other", 4]}))


def test_more_texts_among_numbers_make_a_column_of_texts_unless_its_type_is_declared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ages = [round(age) for age in numbers()]
    ages[::8] = ["unknown", "none of it"] * 15
    path = write(tmp_path / "a.csv", {"age": ages})
    source = opened(path)
    assert len(source.columns) == 1 and "unknown" in source.columns[0].values
    assert "30 of 240 cells, such as 'none of it', are not plain numbers; with" in caplog.text
    assert "data.types={age: number}" in chosen(source, "data.types")
    declared = opened(path, types={"age": ColumnType.number})
    assert titles(declared) == ["age", "age (missing)"] and declared.inputs[:, 1].sum() == 30
    with pytest.raises(ConfigError, match="data.types: .*no column 'agee'"):
        opened(path, types={"agee": ColumnType.number})
    ages[::8] = [40] * 30
    as_text = opened(write(path, {"age": ages}), types={"age": ColumnType.text})
    assert set(as_text.columns[0].values) == {str(ages[i]) for i in as_text.train.tolist()}


def test_a_declared_type_that_fits_less_than_half_of_the_cells_is_an_error(tmp_path: Path) -> None:
    cells = [f"Q{1 + i % 4} 20{10 + i % 9}" for i in range(ROWS)]
    cells[::5] = ["2020-01-01"] * (ROWS // 5)
    path = write(tmp_path / "a.csv", {"since": cells})
    with pytest.raises(ConfigError, match=r"data.types: .*192 of 240 .*'Q2 2011'.*2024-05-31"):
        opened(path, types={"since": ColumnType.date})


def test_types_may_be_typed_without_spaces_and_to_ignore_is_another_key() -> None:
    typed = ["data=tabular", "data.path=a.csv", "data.target=y"]
    for types in ("{price:number}", "{price: number}"):
        config = runs.config(*typed, f"+data.types={types}").data
        assert config.types == {"price": ColumnType.number}  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"^data.types.note: .*; to .*data.ignore=\[note\]$"):
        runs.config(*typed, "+data.types={note: ignore}")


def test_a_boolean_of_parquet_is_a_category(tmp_path: Path) -> None:
    cells = [True, False, None] * (ROWS // 3)
    source = opened(write(tmp_path / "a.parquet", {"paid": cells}))
    assert source.columns[0].values == ("", "false", "true")
    assert source.inputs[:3].argmax(1).tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("policy", "suffix"), [(Missing.mean, "csv"), (Missing.median, "parquet")], ids=str
)
def test_missing_values_are_filled_and_marked(tmp_path: Path, policy: Missing, suffix: str) -> None:
    gaps = np.random.default_rng(1).random((3, ROWS)) < 0.08
    income = np.exp(np.array(numbers(1)) / 9).tolist()
    columns: Columns = {
        "age": [None if gap else x for x, gap in zip(numbers(), gaps[0], strict=True)],
        "income": [None if gap else x for x, gap in zip(income, gaps[1], strict=True)],
        "full": numbers(2),
        "city": [None if gap else "Bonn" if i % 3 else "Oslo" for i, gap in enumerate(gaps[2])],
    }
    source = opened(write(tmp_path / f"a.{suffix}", columns), missing=policy)
    assert titles(source) == ["age", "age (missing)", "income", "income (missing)", "full", "city"]
    assert len(source.target) == ROWS and source.inputs.shape == (ROWS, 9)
    fills = []
    for place, name in ((0, "age"), (2, "income")):
        values = np.array([np.nan if x is None else x for x in columns[name]])
        seen = values[source.train][~np.isnan(values[source.train])]
        fills.append(np.median(seen) if policy is Missing.median else seen.mean())
        expected = (np.where(np.isnan(values), fills[-1], values) - seen.mean()) / seen.std()
        assert np.allclose(source.inputs[:, place], expected, atol=1e-5)
        assert source.inputs[:, place + 1].tolist() == np.isnan(values).astype(float).tolist()
    assert source.columns[-1].values == ("", "Bonn", "Oslo")
    assert source.inputs[:, 5].tolist() == [float(cell is None) for cell in columns["city"]]
    counted = f"'income' ({gaps[1].sum()}) and 'city' ({gaps[2].sum()})"
    assert f"{policy.value}: missing cells of " in (said := chosen(source, "data.missing"))
    assert counted in said
    # other data are filled in as training data were
    new: Columns = {"age": [None, 90.0], "income": [7.0, None], "full": [None, 3.0]}
    answer = applied(source, write(tmp_path / "b.csv", new | {"city": [None, "Oslo"]}))
    age, _, pay, _, full, _ = source.columns
    filled = [(fills[0] - age.mean) / age.deviation, 1], [(fills[1] - pay.mean) / pay.deviation, 1]
    assert np.allclose(answer.inputs[0, :2], filled[0], atol=1e-5)
    assert np.allclose(answer.inputs[1, 2:4], filled[1], atol=1e-5)
    assert np.allclose(answer.inputs[0, 4], ((full.fill or 0) - full.mean) / full.deviation)
    assert answer.inputs[:, 5:].tolist() == [[1, 0, 0, 0], [0, 0, 1, 0]]
    assert not chosen(answer, "data.unknown_categories")
    drop: Any = {"missing": Missing.drop, "most_bad": 0.6}
    new["income"][1], new["city"] = 8.0, ["Oslo"] * 2
    assert len(applied(source, write(tmp_path / "b.csv", new), **drop).target) == 1


def test_preprocessing_without_newer_fields_is_read(tmp_path: Path) -> None:
    source = opened(write(tmp_path / "a.csv", {"age": numbers()}))
    content = json.loads(Preprocessing.of(Tabular(path="train", target="y"), source).dump())
    del content["ids"]
    for name in ("part", "fill", "missing", "others"):
        del content["columns"][0][name]
    old = parse_preprocessing(json.dumps(content).encode(), tmp_path)
    assert old.columns[0].fill is None and old.columns[0].mean == source.columns[0].mean
    path = write(tmp_path / "b.csv", {"age": [None, 4]})
    new = tabular(Tabular(path=str(path), target="y"), OpenOptions(fitted=old, evaluates=True))
    assert new.inputs[0].tolist() == [0]


PARTS = {
    "year": lambda t: t.year,
    "month": lambda t: t.month,
    "weekday": lambda t: t.weekday(),
    "hour": lambda t: t.hour,
    "days": lambda t: (t.date() - date(2023, 11, 20)).days,
}


@pytest.mark.parametrize("form", ["dates.csv", "times.csv", "wrong.csv", "zone.parquet"])
def test_dates_become_the_numbers_that_vary(tmp_path: Path, form: str) -> None:
    times = [datetime(2023, 11, 20, 0, 30) + timedelta(hours=31 * i) for i in range(ROWS)]
    parts, known = list(PARTS), list(range(ROWS))
    cells: list[Any] = list(times)
    changes: Any = {}
    if form == "dates.csv":
        times = [datetime(t.year, t.month, t.day) for t in times]
        cells = [t.date() for t in times]
        parts.remove("hour")
    elif form == "wrong.csv":
        cells[7] = "soon"
        known.remove(7)
        changes["types"] = {"when": ColumnType.date}
    elif form == "zone.parquet":
        cells = pyarrow.array(times, pyarrow.timestamp("ns", "UTC")).to_pylist()
    source = opened(write(tmp_path / form, {"when": cells}), **changes)
    gaps = form == "wrong.csv" and 7 in source.train
    assert [c.part for c in source.columns] == [*parts, *["missing"] * gaps]
    for place, part in enumerate(parts):
        values = np.array([PARTS[part](t) for t in times])
        seen = values[[i for i in source.train.tolist() if i in known]]
        expected = (values - seen.mean()) / seen.std()
        assert np.allclose(source.inputs[known, place], expected[known], atol=1e-4)
    assert f"when: {', '.join(parts)}" in chosen(source, "data.types")
    later: Columns = {"when": ["2031-05-04T13:00:00+00:00", "2031-05-04"]}
    new = applied(source, write(tmp_path / "later.csv", later))
    year = source.columns[0]
    assert new.inputs[0, 0] == pytest.approx((2031 - year.mean) / year.deviation)
    if not changes:
        with pytest.raises(DataError, match="line 2, column 'when': 12 is not a date"):
            applied(source, write(tmp_path / "later.csv", {"when": ["12", "13"]}))


DAYS = [date(2015, 1, 3) + timedelta(days=9 * i) for i in range(ROWS)]


@pytest.mark.parametrize(
    ("form", "described"),
    [
        ("%d/%m/%Y", "day/month/year"),
        ("%m/%d/%Y", "month/day/year"),
        ("%d.%m.%Y", "day.month.year"),
        ("%b %d, %Y", "Jan 5, 2020"),
    ],
)
def test_dates_in_another_form_are_dates_and_new_ones_are_read_in_that_form(
    tmp_path: Path, form: str, described: str
) -> None:
    iso = opened(write(tmp_path / "iso.csv", {"since": DAYS}))
    cells: list[Any] = [f'"{day:{form}}"' for day in DAYS]
    cells[iso.train[0]] = "soon"  # a mistyped cell
    declared: Any = {"types": {"since": ColumnType.date}}
    source = opened(write(tmp_path / "a.csv", {"since": cells}), **declared)
    assert titles(source) == [*titles(iso), "since (missing)"]
    assert f"since: date: its cells are {described}" in chosen(source, "data.types")
    cells[iso.train[0]] = cells[iso.train[1]]
    source = opened(write(tmp_path / "a.csv", {"since": cells}))
    assert not source.ids and {column.form for column in source.columns} == {form}
    other = iso.train[1:]
    assert np.allclose(source.inputs[other], iso.inputs[other], atol=0.1)
    # two days that fit both orders of day and month
    new = [date(2019, 4, 5), date(2020, 2, 1)]
    path = write(tmp_path / "b.csv", {"since": [f'"{day:{form}}"' for day in new]})
    as_iso = applied(source, write(tmp_path / "c.csv", {"since": new}))
    assert applied(source, path).inputs.tolist() == as_iso.inputs.tolist()


def test_dates_that_fit_two_forms_are_texts_unless_the_column_is_declared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cells = [f"{1 + i % 9:02}/{1 + i % 12:02}/2020" for i in range(ROWS)]
    path = write(tmp_path / "a.csv", {"since": cells, "age": numbers()})
    assert opened(path).columns[0].values
    assert "since: category: its dates fit day/month/year and month/day/year" in caplog.text
    assert "with '+data.types={since: date}' it is a column of dates" in caplog.text
    declared = opened(path, types={"since": ColumnType.date})
    assert declared.columns[0].form == "%d/%m/%Y"
    assert [column.part for column in declared.columns[:2]] == ["month", "weekday"]
    note = "since: date: .*; with '.data.date_formats={since: \"%m/%d/%Y\"}' it is month/day/year"
    assert re.search(note, caplog.text)
    same = [f"{1 + i % 9:02}/{1 + i % 9:02}/2020" for i in range(ROWS)]  # the same dates in both
    assert opened(write(path, {"since": same})).columns[0].form


def test_points_in_dates_do_not_hide_decimal_commas(tmp_path: Path) -> None:
    rows = [f"{day:%d.%m.%Y};{1 + i % 7}.{i + 100},{i % 90 + 10}" for i, day in enumerate(DAYS)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["since;price;y", *(f"{r};{i % 2}" for i, r in enumerate(rows))]))
    source = opened(path)
    price = next(column for column in source.columns if column.name == "price")
    expected = [1000 * (1 + i % 7) + i + 100 + (i % 90 + 10) / 100 for i in source.train.tolist()]
    assert price.mean == pytest.approx(np.mean(expected))
    assert source.columns[0].form == "%d.%m.%Y"
    with pytest.raises(ConfigError, match="data.target: .*'since' holds dates"):
        tabular(Tabular(path=str(path), target="since"))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_id_columns_are_not_inputs_and_stay_with_the_rows(tmp_path: Path, suffix: str) -> None:
    shuffled = np.random.default_rng(5).permutation(10**6)[:ROWS].tolist()
    columns: Columns = {
        "row": [1000 + 7 * i for i in range(ROWS)],
        "customer_id": shuffled,
        "PassengerId": [f"{i:05}" if suffix == "parquet" else f"{i:05}x" for i in shuffled],
        "ticket": [f"T-{i}" for i in [*shuffled[:-1], shuffled[3]]],
        "passport_id": [None if i % 3 == 0 else code for i, code in enumerate(shuffled)],
        "thrice_id": [*shuffled[:-3], *shuffled[:3]],  # more than 1 % of the cells
        "income": shuffled[::-1],  # all different, and a number like any other
        "price": [f"{i / 8}" for i in range(ROWS)],
        "group_id": [f"g{i % 9}" for i in range(ROWS)],
    }
    path = write(tmp_path / f"a.{suffix}", columns)
    source = opened(path)
    inputs = ["row", "thrice_id", "income", "price"]
    assert titles(source) == [*inputs, "group_id"]
    ids = ["customer_id", "PassengerId", "passport_id"]
    assert [*source.ids] == [*ids, "ticket"]
    assert source.ids["ticket"].take([3, 1]).to_pylist() == [f"T-{shuffled[i]}" for i in (3, 1)]
    text = chosen(source, "data.types")
    assert "ticket: left out: 2 of 240 rows have a repeated text" in text
    assert "'customer_id' is an id: its cells are all different, and its name suggests ids" in text
    assert "to use it: '+data.types={customer_id: number}'" in text
    types = {"row": ColumnType.number, "group_id": ColumnType.id, "customer_id": ColumnType.text}
    declared = opened(path, types=types)
    assert [*declared.ids] == ["PassengerId", "passport_id", "group_id", "ticket"]
    assert declared.columns[0].name == "row" and declared.columns[1].values
    few = {name: column[:48] for name, column in columns.items()}
    assert not opened(write(tmp_path / f"few.{suffix}", few)).ids
    alone = opened(write(tmp_path / f"alone.{suffix}", {"x": [*range(ROWS)]}))
    assert titles(alone) == ["x"] and not alone.ids
    with pytest.raises(ConfigError, match=r"no input column .*: number\}'"):
        opened(write(tmp_path / f"alone.{suffix}", {"row_id": [*range(ROWS)]}))


def test_texts_that_occur_once_are_no_input(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notes = [f"note {i}" if i % 12 else f"often {i % 24}" for i in range(ROWS)]
    towns = [f"t{i % 9}" if i % 5 else f"village {i}" for i in range(ROWS)]
    columns: Columns = {"note": notes, "town": towns, "age": numbers()}
    path = write(tmp_path / "a.csv", columns)
    source = opened(path)
    assert titles(source) == ["town", "age"]
    town = source.columns[0]
    assert town.values == tuple(f"t{i}" for i in range(9))
    seen = {towns[i] for i in source.train.tolist()}
    assert town.others == len(seen) - 9 and source.inputs[:, 9].sum() == ROWS / 5
    assert [*source.ids] == ["note"] and source.ids["note"].to_pylist() == notes
    assert "data.types: note: left out: 20 of 240 rows have a repeated text" in caplog.text
    assert "to use it: '+data.types={note: text}'" in chosen(source, "data.types")
    new = applied(source, write(tmp_path / "b.csv", {n: c[:4] for n, c in columns.items()}))
    assert new.ids["note"].to_pylist() == notes[:4]
    declared = opened(path, types={"note": ColumnType.text})
    assert {notes[i] for i in declared.train.tolist()} == {*declared.columns[0].values}
    with pytest.raises(ConfigError, match="no input column .*note: text"):
        opened(write(path, {"note": notes}))


def test_a_run_lists_what_each_column_was_taken_for(tmp_path: Path) -> None:
    columns: Columns = {
        "code_id": [f"c{i}" for i in range(ROWS)],
        "note": [f"note {i // 2 if i < 12 else i}" for i in range(ROWS)],
        "age": [None if i % 4 == 1 else age for i, age in enumerate(numbers())],
        "town": ["Bonn", "Oslo", "Rome"] * (ROWS // 3),
        "since": [f"{day:%d.%m.%Y}" for day in DAYS],
    }
    path, run = write(tmp_path / "a.csv", columns), tmp_path / "run"
    table = "data=tabular", f"data.path={path}", "data.target=y", "model=mlp", "model.width=4"
    summary = runs.trained(*table, "training.steps=2", "optimization=none", folder=run)
    gaps = json.loads((run / "checkpoints/last/preprocessing.json").read_text())["columns"][0]
    assert 0 < gaps["gaps"] < ROWS // 4  # of the training rows alone
    assert {row.column: (row.taken_for, row.missing) for row in summary.columns} == {
        "age": ("number", gaps["gaps"]), "town": ("category: 3 values", 0),
        "since": ("date: year, month, weekday, days", 0),
        "code_id": ("id", None), "note": ("left out", None),
    }  # fmt: skip
    page = report.render_report(summary, run)
    assert "## Columns" in page and "| since | date: year, month, weekday, days | 0 |" in page
    console = Console(width=100, file=StringIO())
    console.print(report.RunSummaryTable(summary, run))
    kinds = "1 number, 1 category, 1 date, 1 id, 1 left out (report.md)"
    assert isinstance(console.file, StringIO) and kinds in console.file.getvalue()


def test_ids_of_other_data_are_as_they_are_written_and_may_be_absent(tmp_path: Path) -> None:
    columns: Columns = {"id": [f"{i:04}" for i in range(ROWS)], "age": numbers()}
    source = opened(write(tmp_path / "a.csv", columns))
    assert titles(source) == ["age"]
    new: Columns = {"age": [1, "inf", 3, 4], "id": ["0007", "0007", "x", "0008"]}
    drop: Any = {"bad_samples": BadSamples.drop, "most_bad": 0.5}
    answer = applied(source, write(tmp_path / "b.csv", new), **drop)
    assert answer.ids["id"].to_pylist() == ["0007", "x", "0008"] and len(answer.inputs) == 3
    assert not applied(source, write(tmp_path / "c.csv", {"age": [1, 2]})).ids


def test_the_most_frequent_categories_have_inputs_and_the_others_share_one(tmp_path: Path) -> None:
    cities = [f"c{i % 60:02}" if i % 4 else f"rare {i % 120}" for i in range(ROWS)]
    path = write(tmp_path / "a.csv", {"city": cities, "age": numbers()})
    source = opened(path, categories=10)
    trained = [cities[i] for i in source.train.tolist()]
    counts = sorted((-trained.count(word), word) for word in {*trained})
    column = source.columns[0]
    assert column.values == tuple(sorted(word for _, word in counts[:10]))
    assert not chosen(source, "data.unknown_categories")
    assert column.others == len(counts) - 10 and source.inputs.shape == (ROWS, 12)
    place = {word: number for number, word in enumerate(column.values)}
    assert source.inputs[:, :11].argmax(1).tolist() == [place.get(word, 10) for word in cities]
    assert (source.inputs[:, :11].sum(1) == 1).all()
    assert f"the 10 most frequent of {len(counts)} texts" in chosen(source, "data.categories")
    new: Columns = {"city": ["Rome", counts[0][1]], "age": [1, 2]}
    answer = applied(source, write(tmp_path / "b.csv", new))
    assert answer.inputs[:, :11].argmax(1).tolist() == [10, place[counts[0][1]]]
    assert "1 of 2 rows: column 'city'" in chosen(answer, "data.unknown_categories")
