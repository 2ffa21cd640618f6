"""A quantity may follow the time: no leak, whatever the policy; what gives it away is one still."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runner.checks.config import Policy
from tests.checks.test_table import codes, looked_at, table

N = 600
RNG = np.random.default_rng(0)
DAY = np.arange(N)
NOISE = RNG.normal(size=N).round(4)
Y = (0.5 * DAY + RNG.normal(size=N) * 5).round(4)

TIMES = {
    "days": DAY,
    "days back": DAY[::-1],
    "moments": np.cumsum(RNG.exponential(size=N)).round(4),
    "years": 2000 + DAY // 30,
}


@pytest.mark.parametrize("time", TIMES)
def test_a_trend_is_noted_and_kept(time: str, tmp_path: Path) -> None:
    source = table({"time": TIMES[time], "other": NOISE}, Y, tmp_path)
    for policy in (Policy.warn, Policy.drop, Policy.stop):
        found, looked = looked_at(source, leak=policy)
        assert codes(looked) == [("table.trend", "column 'time'")]
        (reason,) = looked.reasons
        assert reason.severity.word == "note" and "of how the target's values" in reason.evidence
        assert looked.actions == ["kept"] and found is source


LEAKS = {
    "a copy": Y,
    "in another unit": 3 * Y + 1,
    "with a little noise": (Y + RNG.normal(size=N) * 0.1).round(4),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_beside_a_trend_is_found(leak: str, tmp_path: Path) -> None:
    columns = {"day": DAY, "other": NOISE, "after": LEAKS[leak]}
    _, looked = looked_at(table(columns, Y, tmp_path), leak=Policy.drop)
    assert codes(looked) == [("table.trend", "column 'day'"), ("table.leak", "column 'after'")]
    assert looked.drop == [2]


def test_where_the_rows_are_sorted_by_the_quantity_their_number_is_a_leak(tmp_path: Path) -> None:
    y = np.sort(RNG.lognormal(size=N)).round(6)
    for columns in ({"id": DAY}, {"log": np.log(y).round(6)}):
        _, looked = looked_at(table({**columns, "other": NOISE}, y, tmp_path))
        assert codes(looked) == [("table.leak", f"column {next(iter(columns))!r}")]
