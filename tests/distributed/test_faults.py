"""A fault of one process, at any point of a step, ends or continues all of them the same way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import runs

NO_WORKERS = "data.workers=0"


@pytest.mark.parametrize(
    ("fault", "code", "cause"),
    [
        ("1:backward:raise:6", 1, "process 1: ValueError: planted (faulty.py:"),
        ("0:on_report:usage:2", 2, "planted"),
    ],
)
def test_an_error_of_one_process_is_the_error_of_the_run(
    tmp_path: Path, fault: str, code: int, cause: str
) -> None:
    done = runs.run(tmp_path / "run", fault)
    assert done.code == code, done.output
    assert cause in done.message.replace(str(runs.HERE) + "/", "")
    assert done.summary["status"] == "failed"
    assert cause in done.summary["reason"].replace(str(runs.HERE) + "/", "")
