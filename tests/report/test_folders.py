"""What is made of folders that nobody has vetted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from runner.checkpoint.lock import lock
from runner.errors import StorageError, UsageError
from runner.report import comparison as report
from runner.report.discover import of_folders
from tests.report.planted_results import arm, reference, result
from tests.report.planted_runs import job, run, sweep, texts


def test_a_sweep_is_compared_as_one_run_each(tmp_path: Path) -> None:
    folder = sweep(
        tmp_path / "sweep",
        [job(0, "basic"), job(1, "none"), job(2, "ultra", "oom", "no memory"), job(3, "maximum")],
    )
    run(folder / "0", ["optimization=basic"], 1500.0)
    run(folder / "1", ["optimization=none"], 1000.0)
    run(folder / "2", ["optimization=ultra"], 900.0, "failed", reason="RuntimeError")
    run(folder / "3", ["optimization=maximum"], 3000.0, "stopped")
    found = of_folders([folder])
    assert found.kind == "sweep"
    assert found.reference == "none"
    assert [row.name for row in found.rows] == ["basic", "none", "ultra", "maximum"]
    assert [row.speedup for row in found.rows] == [1.5, 1.0, None, 3.0]
    assert {(row.speedup_interval, row.parity) for row in found.rows} == {(None, None)}
    assert (found.rows[2].status, found.rows[2].reason) == ("oom", "no memory")
    assert any("job=benchmark measures" in note for note in found.notes)
    assert "hint" in texts(found)[0] and "3.00×" in texts(found)[0]


def test_a_sweep_that_was_killed_leaves_no_job_running(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", [job(i, level, "running") for i, level in enumerate("abc")])
    run(folder / "0", ["optimization=a"])
    run(folder / "1", ["optimization=b"], status="running")
    assert [row.status for row in of_folders([folder]).rows] == ["done", "killed", "killed"]
    with lock(folder):
        assert of_folders([folder]).rows[2].status == "running"


DAMAGE = {
    "deep": "[" * 100_000,
    "deep values": '{"device": ' + "[" * 400 + "]" * 400 + "}",
    "empty": "",
    "half": '{"status": "done", "metr',
    "a list": "[1, 2]",
    "wrong types": '{"status": 7, "metrics": [], "throughput": "fast"}',
    "no text": "\x00\x01\x02",
}


def test_a_damaged_summary_is_a_row_that_says_so(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", [job(i, what, "") for i, what in enumerate(DAMAGE)])
    for i, text in enumerate(DAMAGE.values()):
        run(folder / str(i), [f"optimization={i}"])
        (folder / str(i) / "summary.json").write_text(text)
    for row in of_folders([folder]).rows:
        assert row.status == "failed"
        assert "summary.json" in row.reason and str(tmp_path) not in row.reason
    assert len(report.write(of_folders([folder]), folder)) >= 4


def test_an_odd_folder_in_a_sweep_is_a_row_that_says_so(tmp_path: Path) -> None:
    places = ("a\0b", "x" * 5000, "../s/0", "/", "0/summary.json/x")
    odd = [{**job(i, f"level{i}", ""), "folder": place} for i, place in enumerate(places)]
    folder = sweep(tmp_path / "s", [job(0, "none"), *odd])
    run(folder / "0", ["optimization=none"])
    _, *rows = of_folders([folder]).rows
    assert len(rows) == len(places)
    assert all(row.status in ("failed", "skipped") and row.reason for row in rows)
    assert len(report.write(of_folders([folder]), folder)) >= 4


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_belongs_to_another_user_is_a_row_or_passed_over_with_a_note(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "sweeps" / "s", [job(0, "none"), job(1, "ultra", "")])
    run(folder / "0", ["optimization=none"])
    closed = run(folder / "1", ["optimization=ultra"]), run(tmp_path / "sweeps" / "t", [])
    for place in closed:
        place.chmod(0)
    try:
        found = of_folders([tmp_path / "sweeps"])
        assert folder / "comparison" in report.write(of_folders([folder]), folder)
    finally:
        for place in closed:
            place.chmod(0o700)
    assert [row.status for row in found.rows] == ["done", "failed"]
    assert "Permission denied" in found.rows[1].reason
    assert found.notes == ["t is skipped: Permission denied"]


ODD = {
    "status": ["x"], "reason": 3, "metrics": {"a": "b", "c": None, "d": True, "e": 10**400},
    "throughput": {"samples_per_second": "many", "step_ms": {"p50": None}}, "memory": {},
    "techniques": [{"name": "amp", "requested": 1, "engaged": 0, "reason": {}}], "device": "cpu",
    "command": 7, "name": [], "monitor": {}, "best": "good",
}  # fmt: skip


def test_a_summary_with_odd_values_is_shown_all_the_same(tmp_path: Path) -> None:
    run(tmp_path / "a", ["seed=1"])
    run(tmp_path / "b", ["seed=2"])
    (tmp_path / "b" / "summary.json").write_text(json.dumps(ODD))
    found = of_folders([tmp_path])
    assert [row.name for row in found.rows] == ["seed=1", "seed=2"]
    assert len(report.write(found, tmp_path)) >= 4


def test_a_run_whose_process_is_gone_was_killed(tmp_path: Path) -> None:
    run(tmp_path / "a", ["seed=1"], status="running", steps=17)
    run(tmp_path / "b", ["seed=2"], status="running")
    (tmp_path / "c" / ".hydra").mkdir(parents=True)
    (tmp_path / "c" / ".hydra" / "overrides.yaml").write_text("[seed=3]")
    with lock(tmp_path / "b"):
        rows = of_folders([tmp_path]).rows
    assert [row.status for row in rows] == ["killed", "running", "killed"]
    assert "step 17" in rows[0].reason
    assert "summary.json" in rows[2].reason


def test_a_parent_folder_gives_runs_of_all_that_is_in_it(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    first = sweep(
        outputs / "sweeps" / "digits-mlp" / "2026-11-20_10-00-00-aaaaaa", [job(0, "none")]
    )
    run(first / "0", ["optimization=none"])
    run(outputs / "runs" / "digits-mlp" / "2026-11-21_10-00-00-bbbbbb", ["optimization=ultra"])
    bench = outputs / "benchmarks" / "digits-mlp" / "2026-11-21_11-00-00-cccccc"
    run(bench / "basic", ["optimization=basic"])
    result(reference(), arm("basic", 1.5)).write(bench)
    (first / "0" / "checkpoints" / "step_00000001").mkdir(parents=True)
    found = of_folders([outputs])
    assert found.kind == "runs"
    assert sorted(row.name for row in found.rows) == ["none", "ultra"]
    assert f"{bench.name} is a benchmark, which is compared by itself: left out" in found.notes
    assert (outputs / found.rows[0].folder / "summary.json").is_file()
    alone = of_folders([bench])
    assert (alone.kind, [row.name for row in alone.rows]) == ("benchmark", ["none", "basic"])
    (bench / "benchmark.json").write_text('{"schema": 1')
    with pytest.raises(StorageError, match="is damaged"):
        of_folders([bench])


def test_a_ratio_needs_the_same_data_model_and_device_and_steps_enough(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", [job(i, str(i)) for i in range(7)])
    data, model = {"kind": "digits", "workers": 0}, {"kind": "mlp", "width": 8}
    configs: list[dict[str, Any]] = [
        {"data": data, "model": model},
        {"data": data | {"workers": 2}, "model": model},  # reads the same samples
        {"data": {"kind": "stdlib_text"}, "model": model},
        {"data": data, "model": model | {"width": 9}},
    ]
    for number, config in enumerate([*configs, configs[0], configs[0]]):
        more: dict[str, Any] = {"device": {"kind": "cuda", "name": "x"}} if number == 4 else {}
        more |= {"steps": 2} if number == 5 else {}
        place = run(folder / str(number), [], 1000.0 * (number + 1), **more)
        (place / ".hydra" / "config.yaml").write_text(json.dumps(config))
    run(folder / "6", ["data=digits"], 9e4)  # its config is gone
    found = of_folders([folder])
    assert [row.speedup for row in found.rows] == [1.0, 2.0, None, None, None, None, None]
    assert any("fewer than 10 steps" in note for note in found.notes)


@pytest.mark.parametrize("what", ["missing", "a file", "empty"])
def test_nothing_to_compare_is_one_line(tmp_path: Path, what: str) -> None:
    place = tmp_path / "there"
    if what == "a file":
        place.write_text("")
    elif what == "empty":
        place.mkdir()
    with pytest.raises(UsageError) as error:
        of_folders([place])
    assert "there: n" in str(error.value) and "\n" not in str(error.value)


LR = ["optimizer.lr=1"], ["optimizer.lr=0.1"]
DIGITS, OWN = ["data=digits"], ["data=digits", "objective._target_=mine.focal"]
NOT = "so the runs' metrics are not compared."
HEADLINES = {
    "what they learn": (
        (*LR, {}, {}),
        "Best val/accuracy: from 0.5000 (lr=1) to 0.6000 (lr=0.1).",
    ),
    "data": (
        (["data=digits"], ["data=digits", "data._target_=mine.Waves"], {}, {}),
        f"Judged on different data (digits and mine.Waves), {NOT}",
    ),
    "metrics": (
        (DIGITS, OWN, {"monitor": "val/accuracy"}, {"monitor": "val/mae"}),
        f"Judged by different metrics (val/accuracy and val/mae), {NOT}",
    ),
    "losses": (
        (DIGITS, OWN, {"monitor": "val/loss"}, {"monitor": "val/loss"}),
        f"Judged on different data (digits and digits with mine.focal), {NOT}",
    ),
}


@pytest.mark.parametrize("name", HEADLINES)
def test_metrics_are_compared_only_where_they_are_of_the_same(tmp_path: Path, name: str) -> None:
    (one, other, first, second), expected = HEADLINES[name]
    run(tmp_path / "a", one, best=0.5, **first)
    run(tmp_path / "b", other, 2000.0, best=0.6, **second)
    sentences = texts(of_folders([tmp_path]))
    assert sentences[0] == expected
    if name == "what they learn":
        assert "as fast as" in sentences[1]


def test_rows_are_named_by_what_was_typed(tmp_path: Path) -> None:
    own = "model._target_=my.Net"
    run(tmp_path / "a", [own, "+model.arguments.width=64", "seed=1"])
    run(tmp_path / "b", [own, "+model.arguments.width=32", "seed=2"])
    names = [row.name for row in of_folders([tmp_path]).rows]
    assert names == ["width=64 seed=1", "width=32 seed=2"]
