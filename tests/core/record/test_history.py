"""What went wrong in a run: said once, counted, and kept."""

import json
from pathlib import Path

import pytest

from runner.core.record import history
from runner.core.record.history import HISTORY_FILE, History


def test_a_repeated_fault_is_logged_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults = History(tmp_path)
    assert History.read(tmp_path) == []
    for step in range(1, 31):
        text = f"the loss is {step / 7:.3g}"
        faults.add("spike", text, step=step, category="numerics", action="skipped")
    faults.add("spike", "the loss is 3", step=31, category="numerics", action="rolled back")
    lines = [r.getMessage() for r in caplog.records]
    assert lines == ["step 1: the loss is 0.143; skipped", "step 31: the loss is 3; rolled back"]
    faults.write()
    found = json.loads((tmp_path / HISTORY_FILE).read_text())
    assert found["counts"] == {"spike": 31}
    first = found["faults"][0]
    assert (first["count"], first["steps"], first["last_step"]) == (30, list(range(1, 21)), 30)
    assert History.read(tmp_path) == list(faults.faults.values())
    (tmp_path / HISTORY_FILE).write_text('{"faults": [{"kind": ')
    assert History.read(tmp_path) == []


def test_counters_in_a_checkpoint_continue(tmp_path: Path) -> None:
    before, after = History(tmp_path), History(tmp_path)
    before.add("leak", "grows by 5 KB", step=5, category="memory", say=False)
    before.explain(8, "x has a NaN in sample 3")  # its numbers have not reached the host yet
    after.load(before.state())
    after.add("leak", "grows by 6 KB", step=9, category="memory", say=False)
    (fault,) = after.faults.values()
    assert (fault.count, fault.steps, after.counts) == (2, [5, 9], {"leak": 2})
    assert after.causes == {8: "x has a NaN in sample 3"} and after.explained_steps == {8}


def test_many_different_faults_stay_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MAX_FAULTS", 3)
    faults = History(tmp_path)
    for letter in "abcde":
        faults.add("error", letter, step=1, category="data", say=False)
    assert len(faults.faults) == 3 and faults.counts == {"error": 5}
