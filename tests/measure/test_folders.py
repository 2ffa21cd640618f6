"""What is made of folders that nobody has vetted, and that nothing outside of them is changed."""

import json
import os
from pathlib import Path

import pytest

from runner.core.checkpoint.lock import lock
from runner.core.errors import StorageError
from runner.measure import page
from runner.measure.comparison import metric_rises
from runner.measure.discover import compare_folders
from runner.report import main
from tests.measure.planted import arm, job, reference, result, run, sweep, texts


def test_a_sweep_is_compared_as_one_run_each(tmp_path: Path) -> None:
    jobs = [job(0, "basic"), job(1, "none"), job(2, "ultra", "oom", "no memory"), job(3, "maximum")]
    folder = sweep(tmp_path / "sweep", jobs)
    run(folder / "0", ["optimization=basic"], 1500.0)
    run(folder / "1", ["optimization=none"], 1000.0)
    run(folder / "2", ["optimization=ultra"], 900.0, "failed", reason="RuntimeError")
    run(folder / "3", ["optimization=maximum"], 3000.0, "stopped")
    found = compare_folders([folder])
    assert (found.kind, found.reference) == ("sweep", "")
    assert [row.name for row in found.rows] == ["basic", "none", "ultra", "maximum"]
    assert {(x.speedup, x.speedup_interval, x.parity) for x in found.rows} == {(None, None, None)}
    assert (found.rows[2].status, found.rows[2].reason) == ("oom", "no memory")
    assert any("not interleaved" in note for note in found.notes)
    assert not [text for text in texts(found) if "fast" in text or "×" in text]


def test_a_sweep_that_was_killed_leaves_no_job_running(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", [job(i, level, "running") for i, level in enumerate("abc")])
    run(folder / "0", ["optimization=a"])
    run(folder / "1", ["optimization=b"], status="running")
    assert [row.status for row in compare_folders([folder]).rows] == ["done", "killed", "killed"]
    with lock(folder):
        assert compare_folders([folder]).rows[2].status == "running"


def test_a_run_whose_process_is_gone_was_killed(tmp_path: Path) -> None:
    run(tmp_path / "a", ["seed=1"], status="running", steps=17)
    run(tmp_path / "b", ["seed=2"], status="running")
    (tmp_path / "c" / ".hydra").mkdir(parents=True)
    (tmp_path / "c" / ".hydra" / "overrides.yaml").write_text("[seed=3]")
    with lock(tmp_path / "b"):
        rows = compare_folders([tmp_path]).rows
    assert [row.status for row in rows] == ["killed", "running", "killed"]
    assert "step 17" in rows[0].reason and "summary.json" in rows[2].reason


DAMAGE = {
    "deep": "[" * 100_000,
    "deep values": '{"device": ' + "[" * 400 + "]" * 400 + "}",
    "empty": "",
    "half": '{"status": "done", "metr',
    "a list": "[1, 2]",
    "wrong types": '{"status": 7, "metrics": [], "throughput": "fast"}',
    "no text": "\x00\x01\x02",
}
PLACES = ("a\0b", "x" * 5000, "../s/0", "/", "0/summary.json/x")
ODD = {
    "status": ["x"], "reason": 3, "metrics": {"a": "b", "c": None, "d": True, "e": 10**400},
    "throughput": {"samples_per_second": "many", "step_ms": {"p50": None}}, "memory": {},
    "techniques": [{"name": "amp", "requested": 1, "engaged": 0, "reason": {}}], "device": "cpu",
    "command": 7, "name": [], "monitor": {}, "best": "good",
}  # fmt: skip


def test_damaged_records_and_unexpected_paths_are_rows_with_the_reason(tmp_path: Path) -> None:
    damage = [*DAMAGE.values(), json.dumps(ODD)]
    jobs = [job(i, str(i), "") for i in range(len(damage))]
    jobs += [{**job(0, f"level{i}", ""), "folder": place} for i, place in enumerate(PLACES)]
    folder = sweep(tmp_path / "s", jobs)
    for i, text in enumerate(damage):
        run(folder / str(i), [f"optimization={i}"])
        (folder / str(i) / "summary.json").write_text(text)
    rows = compare_folders([folder]).rows
    assert len(rows) == len(jobs)
    for row in rows[: len(DAMAGE)]:
        assert row.status == "failed"
        assert "summary.json" in row.reason and str(tmp_path) not in row.reason
    assert all(row.status in ("failed", "skipped") and row.reason for row in rows[len(damage) :])
    assert len(page.write_comparison(compare_folders([folder]), folder)) >= 4


def test_a_folder_that_cannot_be_read_is_a_row_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        run(tmp_path / name, [f"seed={name}"])
    honest = os.listdir

    def listdir(path: Path) -> list[str]:
        if path == tmp_path / "b":
            raise OSError(5, "Input/output error")
        return honest(path)

    monkeypatch.setattr(os, "listdir", listdir)
    good, bad = compare_folders([tmp_path]).rows
    assert good.status == "done" and bad.status == "failed"
    assert bad.reason == "its folder cannot be read: Input/output error"


def test_a_parent_folder_gives_runs_of_all_that_is_in_it(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    first = sweep(outputs / "sweeps/digits-mlp/2026-11-20_10-00-00-aaaaaa", [job(0, "none")])
    run(first / "0", ["optimization=none"])
    run(outputs / "runs/digits-mlp/2026-11-21_10-00-00-bbbbbb", ["optimization=ultra"])
    bench = outputs / "benchmarks/digits-mlp/2026-11-21_11-00-00-cccccc"
    run(bench / "basic", ["optimization=basic"])
    result(reference(), arm("basic", 1.5)).write(bench)
    (first / "0/checkpoints/step_00000001").mkdir(parents=True)
    found = compare_folders([outputs])
    assert (found.kind, sorted(row.name for row in found.rows)) == ("runs", ["none", "ultra"])
    assert f"{bench.name} is a benchmark, compared by itself: left out" in found.notes
    assert (outputs / found.rows[0].folder / "summary.json").is_file()
    alone = compare_folders([bench])
    assert (alone.kind, [row.name for row in alone.rows]) == ("benchmark", ["none", "basic"])
    (bench / "benchmark.json").write_text('{"schema": 1')
    with pytest.raises(StorageError, match="is damaged"):
        compare_folders([bench])


def headline(folder: Path, one: str, other: str, first: str, second: str) -> str:
    run(folder / "a", one.split(), best=0.5, monitor=first)
    run(folder / "b", other.split(), 2000.0, best=0.6, monitor=second)
    return texts(compare_folders([folder]))[0]


def test_metrics_are_compared_only_where_they_are_of_the_same(tmp_path: Path) -> None:
    accuracy, loss, own = "val/accuracy", "val/loss", "data=digits objective._target_=mine.focal"
    text = headline(tmp_path / "1", "optimizer.lr=1", "optimizer.lr=0.1", accuracy, accuracy)
    assert text == "Best val/accuracy: from 0.5000 (lr=1) to 0.6000 (lr=0.1)."
    rest = "so the runs' metrics are not compared."
    waves = "data=digits data._target_=mine.Waves"
    text = headline(tmp_path / "2", "data=digits", waves, accuracy, accuracy)
    assert text == f"Judged on different data (digits and mine.Waves), {rest}"
    text = headline(tmp_path / "3", "data=digits", own, accuracy, "val/mae")
    assert text == f"Judged by different metrics (val/accuracy and val/mae), {rest}"
    text = headline(tmp_path / "4", "data=digits", own, loss, loss)
    other = "With training.monitor=val/accuracy they would be."
    how = "val/loss is not the same loss in each"
    assert text == f"{how} (digits and digits with mine.focal), {rest} {other}"


@pytest.mark.parametrize("own", ["data.target_transform=log", "objective.label_smoothing=0.1"])
def test_a_loss_in_another_unit_is_not_ranked(tmp_path: Path, own: str) -> None:
    same, loss = "data=mine data.target_transform=standardise", "val/loss"
    text = headline(tmp_path / "1", "data=mine", f"data=mine {own}", loss, loss)
    assert text.startswith("val/loss is not the same") and own.partition(".")[2] in text
    assert metric_rises(compare_folders([tmp_path / "1"])) is None
    assert "from 0.5000" in headline(
        tmp_path / "2", "data=mine", f"data=mine {own}", *2 * ["val/mae"]
    )
    assert "from 0.5000" in headline(tmp_path / "3", "data=mine", same, loss, loss)
    assert metric_rises(compare_folders([tmp_path / "3"])) is False


# a folder of somebody else's


@pytest.fixture
def handed(tmp_path: Path) -> Path:
    folder = sweep(tmp_path / "handed", [job(0, "basic"), job(1, "none")])
    for number, level in enumerate(("basic", "none")):
        run(folder / str(number), [f"optimization={level}"])
    return folder


@pytest.mark.parametrize("link", ["comparison", "comparison/events.out.tfevents.1.added"])
def test_a_link_that_leads_out_is_refused_and_nothing_is_written(
    handed: Path, link: str, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = handed.parent / "victim"
    victim.mkdir()
    (victim / "events.out.tfevents.0000000007.added").write_text("precious")
    (handed / link).parent.mkdir(exist_ok=True)
    (handed / link).symlink_to(victim if link == "comparison" else next(victim.iterdir()))
    before = sorted(handed.rglob("*"))
    assert main([str(handed)]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{link}: refused: it is a link out of" in line
    assert sorted(handed.rglob("*")) == before
    assert [path.read_text() for path in victim.iterdir()] == ["precious"]


PIPES = ["sweep.json", "0/summary.json", "0/metrics.jsonl", "0/.lock", "0/.hydra/overrides.yaml",
         "0/.hydra/config.yaml", "0/events.out.tfevents.1", "comparison.json"]  # fmt: skip


def test_a_temporary_name_is_not_written_through_and_a_pipe_is_not_waited_for(handed: Path) -> None:
    victim, out = handed.parent / "victim", handed.parent / "out"
    victim.write_text("precious")
    (out / "comparison").mkdir(parents=True)
    for name in ("comparison.json", "comparison.html"):
        (out / f".{name}.tmp").hardlink_to(victim)
    assert main([str(handed), "--out", str(out)]) == 0
    assert victim.read_text() == "precious" and (out / "comparison.html").stat().st_nlink == 1
    for name in PIPES:
        (handed / name).unlink(missing_ok=True)
        os.mkfifo(handed / name)
    assert main([str(handed)]) == 0
