"""A table with planted flaws: each is found, named and acted on; honest columns are left alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runner import train
from runner.core.data.dataset import Dataset, TensorsDataset
from runner.core.data.embedded import cancer
from runner.core.data.order import split
from runner.core.errors import ConfigError, DataError
from runner.core.interfaces.batch import Sizes
from runner.core.record.history import History
from runner.core.record.summary import Summary
from runner.core.schemas.checks import CheckPolicy, TableConfig
from runner.core.schemas.data import Cancer, SplitRule
from runner.datasets.table_checks import (
    TableFindings,
    _repeated_skill,
    _repeated_variance,
    check_data_table,
)
from tests import runs
from tests.datasets.tables import opened, write_columns


def looked_at(source: TensorsDataset, **policies: Any) -> tuple[Dataset, TableFindings]:
    found, (report,) = check_data_table(source, TableConfig(**policies))
    assert report.findings is not None
    return found, report.findings


def leaks(source: TensorsDataset) -> list[tuple[str, str]]:
    """The codes and places of what is found."""
    return codes(looked_at(source)[1])


def table(
    columns: dict[str, Sequence[Any]], target: Sequence[Any], folder: Path, **changes: Any
) -> TensorsDataset:
    path = write_columns(folder / "flows.csv", {**columns, "y": [*target]})
    return opened(path, **changes)


def codes(looked: TableFindings) -> list[tuple[str, str]]:
    return [(reason.code, reason.where) for reason in looked.reasons]


DROP = {kind: CheckPolicy.drop for kind in ("constant", "leak", "shared")}
N = 600
RNG = np.random.default_rng(0)
Y = (RNG.random(N) < 0.3).astype(int)
HONEST = {
    "bytes": RNG.lognormal(0, 3, N).round(6),
    "packets": (Y + RNG.normal(0, 1, N)).round(6),
    "proto": RNG.choice(["tcp", "udp", "icmp"], N),
}
NAMES = np.array(["benign", "attack"])[Y]
BANDS = np.linspace(0.05, 0.95, 19)

LEAKS = {
    "the label in numbers": Y * 3 + 1,
    "the label in words": np.array(["no", "yes"])[Y],
    "the label with noise": (Y + RNG.normal(0, 0.05, N)).round(6),
    "any of several values for each label": np.where(
        Y, RNG.choice([1, 5, 9], N), RNG.choice([2, 4, 7], N)
    ),
    "a quantity that only one label has": np.where(Y, RNG.lognormal(0, 2, N).round(6) + 1, 0),
}


def test_an_honest_table_is_left_alone(tmp_path: Path) -> None:
    source = table(HONEST, NAMES, tmp_path)
    found, looked = looked_at(source, **DROP)
    assert codes(looked) == [] and found is source


def test_the_strong_columns_of_an_easy_data_set_are_not_accused() -> None:
    """One column of cancer alone is right for some 92 % of biopsies."""
    _, looked = looked_at(cancer(Cancer()))
    assert codes(looked) == []
    best = max(column["skill"] for column in looked.facts["columns"])
    assert 0.6 < best < 0.9


@pytest.mark.parametrize("kind", LEAKS)
def test_a_column_that_gives_the_label_away_is_named_or_dropped(kind: str, tmp_path: Path) -> None:
    source = table({**HONEST, "after": LEAKS[kind]}, NAMES, tmp_path)
    _, looked = looked_at(source)
    assert codes(looked) == [("table.leak", "column 'after'")]
    evidence = looked.reasons[0].evidence
    assert "the next best column, 'packets'" in evidence and "100.0" not in evidence
    assert evidence.startswith("alone predicts the target in every row: it may contain the target;")
    assert "data.ignore=[after]" in looked.reasons[0].way_out
    dropped, looked = looked_at(source, leak=CheckPolicy.drop)
    honest = table(HONEST, NAMES, tmp_path)
    assert dropped.sizes == honest.sizes
    every = np.arange(N)
    for a, b in zip(dropped.fetch(every, None), honest.fetch(every, None), strict=True):
        assert torch.equal(a, b)
    assert [c.value for c in looked.choices] == ["without after"]


def test_a_row_number_is_accused_where_the_rows_are_sorted_by_the_label(tmp_path: Path) -> None:
    order = np.argsort(Y, kind="stable")
    sorted_columns = {name: np.asarray(x)[order] for name, x in HONEST.items()}
    place = 3 * np.arange(N) + RNG.integers(0, 2, N)  # one that counts up is known as an id
    source = table({"place": place, **sorted_columns}, NAMES[order], tmp_path)
    assert leaks(source) == [("table.leak", "column 'place'")]
    shuffled = table({"place": place, **HONEST}, NAMES, tmp_path)
    assert leaks(shuffled) == []  # rows in any other order tell nothing


def test_too_few_rows_give_no_finding(tmp_path: Path) -> None:
    few = {"x": Y[:40], "z": RNG.random(40).round(6)}
    _, looked = looked_at(table(few, NAMES[:40], tmp_path))
    assert codes(looked) == []
    assert [column["skill"] for column in looked.facts["columns"]] == [None, None]


def test_constant_columns_are_named_with_their_value_and_dropped(tmp_path: Path) -> None:
    columns = {**HONEST, "flag": [0.1] * N, "version": ["v4"] * N}
    source = table(columns, NAMES, tmp_path)
    dropped, looked = looked_at(source, constant=CheckPolicy.drop)
    assert codes(looked) == [("table.constant", f"column {name!r}") for name in ("flag", "version")]
    assert looked.reasons[0].evidence == "is 0.1 in all 480 training rows"
    assert "'v4'" in looked.reasons[1].evidence
    assert dropped.sizes.in_features == (source.sizes.in_features or 0) - 3  # one has categories
    assert "flag" not in {c.name for c in dropped.named_columns()}  # type: ignore[attr-defined]


def with_copies(other_label: bool) -> tuple[dict[str, Any], Any, np.ndarray, np.ndarray]:
    """The table with five validation rows that are training rows."""
    train, validation = split(N, 0.2, 0)
    columns = {name: np.array(x) for name, x in HONEST.items()}
    labels = NAMES.copy()
    for theirs, ours in zip(train[:5], validation[:5], strict=True):
        for x in columns.values():
            x[ours] = x[theirs]
        same = labels[theirs]
        labels[ours] = ("attack" if same == "benign" else "benign") if other_label else same
    return columns, labels, train, validation


@pytest.mark.parametrize("other_label", [False, True])
def test_rows_in_both_parts_are_named_and_left_out(other_label: bool, tmp_path: Path) -> None:
    columns, labels, train, validation = with_copies(other_label)
    columns["id"] = np.arange(7, 7 + N)  # makes every row another one, and is left out
    source = table(columns, labels, tmp_path, split=SplitRule.random)
    found, looked = looked_at(source, shared=CheckPolicy.drop)
    assert codes(looked) == [("table.shared", "")]
    said = looked.reasons[0].evidence
    assert "5 of 120 validation rows (4.2%)" in said
    assert f"line {validation[0] + 2}, equal to line {train[0] + 2}" in said  # below the header
    assert found.validation.tolist() == validation[5:].tolist()
    assert found.train.tolist() == train.tolist()
    warned, _ = looked_at(source)
    assert warned.validation.tolist() == validation.tolist()


def test_the_same_inputs_with_another_quantity_are_no_finding(tmp_path: Path) -> None:
    columns, _, _, _ = with_copies(other_label=False)
    assert leaks(table(columns, RNG.normal(0, 1, N).round(6), tmp_path)) == []


def test_rows_of_few_kinds_are_alike_by_chance_and_no_leak(tmp_path: Path) -> None:
    own = np.random.default_rng(2)
    kinds = {"class": 3, "sex": 2, "age": 80}
    columns = {name: own.integers(0, most, 900) for name, most in kinds.items()}
    source = table(columns, own.choice(["no", "yes"], 900), tmp_path)
    found, looked = looked_at(source, shared=CheckPolicy.drop)
    assert codes(looked) == [] and found is source
    assert leaks(table(columns, own.integers(0, 3, 900) / 2, tmp_path, task="regression")) == []


def test_nothing_left_to_validate_with_is_an_error() -> None:
    x = torch.arange(300.0).sin().reshape(100, 3).repeat(2, 1)
    sizes = Sizes("classification", 3, classes=2)
    halves = np.arange(100), np.arange(100, 200)
    source = TensorsDataset(x, torch.arange(200) % 3 % 2, sizes, halves)
    with pytest.raises(DataError, match="leaves no validation rows"):
        looked_at(source, shared=CheckPolicy.drop)
    source = TensorsDataset(torch.ones(200, 3), torch.arange(200) % 2, sizes, split(200, 0.2, 0))
    with pytest.raises(DataError, match="no input columns would be left"):
        looked_at(source, constant=CheckPolicy.drop)


def test_stop_names_every_finding_and_off_finds_nothing(tmp_path: Path) -> None:
    source = table({**HONEST, "flag": [1] * N, "after": Y + 1}, NAMES, tmp_path)
    both = r"'flag'.*'after'.*: checks.table.constant=warn checks.table.leak=warn$"
    with pytest.raises(DataError, match=both):
        looked_at(source, constant=CheckPolicy.stop, leak=CheckPolicy.stop)
    with pytest.raises(DataError, match="^((?!'flag').)*$"):
        looked_at(source, leak=CheckPolicy.stop)
    _, looked = looked_at(source, constant=CheckPolicy.off, leak=CheckPolicy.off)
    assert codes(looked) == []
    assert check_data_table(source, TableConfig(enabled=False)) == (source, [])
    with pytest.raises(ConfigError, match="checks.table.leak: cannot be skip: a table has no b"):
        TableConfig(leak=CheckPolicy.skip)


def test_a_large_table_is_judged_by_a_sample_that_is_always_the_same() -> None:
    n = 60_000
    rng = np.random.default_rng(1)
    y = (rng.random(n) < 0.01).astype(np.int64)
    x = rng.random((n, 40), dtype=np.float32)
    x[:, 7] = y * 2 + rng.random(n)
    x[:, 8] = 5
    x[100, 8] = 6  # in no sample: only a look at every row shows that it is not constant
    train, validation = split(n, 0.2, 0)
    assert 100 in train
    sizes = Sizes("classification", 40, classes=2)
    source = TensorsDataset(torch.from_numpy(x), torch.from_numpy(y), sizes, (train, validation))
    found = [looked_at(source)[1] for _ in range(2)]
    assert found[0].facts["rows_judged"] == 37_500
    assert codes(found[0]) == [("table.leak", "column 'x[7]'")]
    assert found[0].reasons == found[1].reasons


@pytest.mark.parametrize("order", ["shuffled", "sorted"])
def test_every_column_that_leaks_is_named_in_any_order(order: str, tmp_path: Path) -> None:
    """As in a table of films: a code with the label in it, some of whose values occur once."""
    rows = np.argsort(Y, kind="stable") if order == "sorted" else np.arange(N)
    years = RNG.integers(1970, 2012, N)
    code = np.array([f"{year}{'PASS' if y else 'FAIL'}" for year, y in zip(years, Y, strict=True)])
    after = np.array(["ok" if y else "nowomen" for y in Y])
    columns = {name: values[rows] for name, values in {**HONEST, "code": code}.items()}
    for more in ({}, {"after": after[rows]}, {"after": after[rows], "1": Y[rows], "2": Y[rows]}):
        _, looked = looked_at(table({**columns, **more}, NAMES[rows], tmp_path))
        named = {where for _, where in codes(looked)}
        assert named == {f"column {name!r}" for name in ("code", *more)}


@pytest.mark.parametrize("order", ["shuffled", "sorted"])
def test_a_column_that_gives_a_quantity_away_is_named_in_any_order(
    order: str, tmp_path: Path
) -> None:
    price = RNG.lognormal(3, 1, N).round(3)
    rows = np.argsort(price) if order == "sorted" else np.arange(N)
    net = (price / 1.19 + RNG.normal(0, 0.01, N)).round(4)
    band = np.array([f"band {int(b)}" for b in np.digitize(price, np.quantile(price, BANDS))])
    target = np.digitize(price, np.quantile(price, BANDS)) * 10.5
    noise = RNG.normal(size=N).round(4)
    area = (price * RNG.lognormal(0, 0.5, N)).round(6)  # strong, and no leak
    columns = {"net": net[rows], "area": area[rows], "rooms": RNG.integers(1, 9, N)}
    assert leaks(table(columns, price[rows], tmp_path)) == [("table.leak", "column 'net'")]
    source = table({"band": band[rows], "noise": noise}, target[rows], tmp_path, task="regression")
    assert leaks(source) == [("table.leak", "column 'band'")]


def test_a_column_with_a_value_per_row_has_no_skill_by_chance() -> None:
    labels = RNG.integers(0, 2, N)
    assert _repeated_skill(np.arange(N), labels) == 0  # no value occurs again
    assert abs(_repeated_skill(np.arange(N) // 2, labels)) < 0.15  # pairs of random labels
    assert _repeated_skill(labels, labels) == 1
    assert abs(_repeated_variance(np.arange(N) // 2, RNG.normal(size=N))) < 1.5
    assert _repeated_variance(labels, labels.astype(float)) == pytest.approx(1)


def test_a_quantity_may_follow_the_time_but_nothing_else(tmp_path: Path) -> None:
    day, noise = np.arange(N), RNG.normal(size=N).round(4)
    price = (0.5 * day + RNG.normal(size=N) * 5).round(4)
    for time in (day, 2000 + day // 30):
        source = table({"time": time, "other": noise}, price, tmp_path)
        found, looked = looked_at(source, leak=CheckPolicy.drop)
        assert codes(looked) == [] and found is source
    copy = (3 * price + 1 + RNG.normal(size=N) * 0.1).round(4)
    source = table({"day": day, "other": noise, "after": copy}, price, tmp_path)
    assert leaks(source) == [("table.leak", "column 'after'")]


def test_a_run_tells_of_it_everywhere_and_once_or_is_not_begun(tmp_path: Path) -> None:
    columns, labels, _, _ = with_copies(other_label=False)
    table({**columns, "flag": [0] * N, "<b>after": Y + 1}, labels, tmp_path)
    typed = ("data=tabular", f"data.path={tmp_path / 'flows.csv'}", "data.target=y",
             "model=mlp", "training.steps=4", "checkpoint=off", "optimization=none")  # fmt: skip
    folder = tmp_path / "run"
    with pytest.raises(DataError, match="column '<b>after'"):
        runs.opened(*typed, "checks=strict", folder=folder).__enter__()
    assert not (folder / "metrics.jsonl").exists()
    drop = "checks.table.leak=drop", "checks.table.shared=drop"
    with runs.opened(*typed, *drop, folder=folder) as run:
        assert run.sizes.in_features == 7
        batches = map(run.validation.indices, range(run.validation.steps_per_epoch))
        assert sum(map(len, batches)) == 115
        train(run)
    kinds = {fault.kind: fault for fault in History.read(folder)}
    assert {"table_constant", "table_leak", "table_shared"} <= set(kinds)
    leak = kinds["table_leak"]
    assert (leak.category, leak.action) == ("data", "left out of the inputs")
    assert kinds["table_shared"].count == 1
    summary = Summary.read(folder)
    assert {c.key for c in summary.choices} >= {"checks.table.leak", "checks.table.shared"}
    assert summary.faults["table_leak"] == 1
    found = [finding["code"] for finding in runs.debug_file(folder, "table")["findings"]]
    assert found == ["table.constant", "table.leak", "table.shared"]
