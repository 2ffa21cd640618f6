"""What is written for TensorBoard; what it shows of that is in test_tensorboard_server.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2, metadata

from runner.benchmark.result import ArmResult, BenchmarkResult
from runner.record.config import MonitoringConfig
from runner.record.recorder import Recorder
from runner.report.comparison import Comparison, Row, of_benchmark
from runner.report.tensorboard_export import export_comparison

START, END = "_hparams_/session_start_info", "_hparams_/session_end_info"


def trained(folder: Path, status: str | None = "done", **hparams: Any) -> None:
    """A run's folder as a run leaves it."""
    folder.mkdir(parents=True)
    recorder = Recorder(folder, MonitoringConfig())
    recorder.open()
    recorder.hparams(f"{folder.name} of x/y", {"seed": 0, **hparams}, ["val/best/r2", "train/loss"])
    recorder.scalars(10, "train", {"loss": 0.5})
    if status:
        recorder.end(status)
    recorder.close()


def tags(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()


def hparams_of(folder: Path) -> tuple[dict[str, Any], int | None, dict[str, list[Any]], list[str]]:
    """A run's row as TensorBoard takes it: values, status, check boxes, metrics."""
    content = tags(folder).PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(content[START])
    experiment = metadata.parse_experiment_plugin_data(content["_hparams_/experiment"])
    status = None
    if END in content:
        status = metadata.parse_session_end_info_plugin_data(content[END]).status
    boxes = {
        info.name: [plain(value) for value in info.domain_discrete.values]
        for info in experiment.hparam_infos
        if info.domain_discrete.values
    }
    values = {name: plain(value) for name, value in start.hparams.items()}
    return values, status, boxes, [info.name.tag for info in experiment.metric_infos]


def plain(value: Any) -> Any:
    return getattr(value, value.WhichOneof("kind"))


def sweep(home: Path, *rows: Row, **more: Any) -> Comparison:
    return Comparison("x", list(rows), home=home, **more)


def test_boxes_come_from_what_was_typed_where_no_launcher_named_them(tmp_path: Path) -> None:
    trained(tmp_path / "0", **{"optimizer.lr": 0.1})
    trained(tmp_path / "1", **{"optimizer.lr": 0.2})
    export_comparison(
        sweep(
            tmp_path,
            Row(["optimizer.lr=0.1", "optimization=none", "seed=0"], "done", folder="0"),
            Row(["optimizer.lr=2e-1", "optimization=ultra", "seed=0"], "done", folder="1"),
        ),
        tmp_path,
    )
    values, status, boxes, _ = hparams_of(tmp_path / "1")
    assert values == {"optimizer.lr": 0.2, "optimization": "ultra", "seed": 0.0}
    assert status == api_pb2.STATUS_SUCCESS
    assert boxes == {"optimizer.lr": [0.1, 0.2], "optimization": ["none", "ultra"]}


def test_every_row_has_the_same_columns_since_tensorboard_believes_any_one(tmp_path: Path) -> None:
    trained(tmp_path / "0", depth=2)
    rows = [Row(["seed=0"], "done", folder="0"), Row(["seed=1"], "oom", "no memory", folder="1")]
    export_comparison(sweep(tmp_path, *rows), tmp_path)
    first, second = (hparams_of(tmp_path / name) for name in "01")
    assert first[2:] == second[2:]
    assert first[2] == {"seed": [0.0, 1.0], "status": ["done", "oom"]}
    assert second[:2] == ({"seed": 1.0, "status": "oom"}, api_pb2.STATUS_FAILURE)


@pytest.mark.parametrize(
    ("status", "expected"),
    [("killed", api_pb2.STATUS_FAILURE), ("timeout", api_pb2.STATUS_FAILURE),
     ("skipped", api_pb2.STATUS_FAILURE), ("interrupted", None),
     ("running", None)],
)  # fmt: skip
def test_a_job_that_ended_its_row_itself_or_not_has_its_status(
    tmp_path: Path, status: str, expected: int | None
) -> None:
    trained(tmp_path / "0", status=None)
    export_comparison(sweep(tmp_path, Row(["a=1"], status, folder="0")), tmp_path)
    assert hparams_of(tmp_path / "0")[1] == expected


def test_what_differs_in_many_values_is_a_range_if_it_is_a_number(tmp_path: Path) -> None:
    rows = [Row([f"lr={i}", f"name=n{i}"], "done", folder=str(i)) for i in range(12)]
    export_comparison(sweep(tmp_path, *rows), tmp_path)
    assert hparams_of(tmp_path / "3")[2] == {"name": [f"n{i}" for i in range(12)]}


def test_a_run_that_kept_no_event_file_has_its_final_metrics(tmp_path: Path) -> None:
    summary = {"metrics": {"val/r2": 0.75, "val/r2/a": 1.0}, "steps": 40, "best": 0.75}
    export_comparison(sweep(tmp_path, Row(["a=1"], "done", "", summary, folder="0")), tmp_path)
    point = tags(tmp_path / "0").Scalars("val/r2")[0]
    assert (point.step, point.value) == (40, 0.75)
    assert hparams_of(tmp_path / "0")[3] == ["val/r2"]


def test_arms_are_rows_with_what_was_measured_also_those_that_never_had_a_folder(
    tmp_path: Path,
) -> None:
    trained(tmp_path / "none")
    arms = [
        ArmResult("none", ["optimization=none"], "done", folder="none", speedup=1.0, step_ms=2.0,
                  samples_per_second=500.0, peak_process_bytes=3 << 20, metrics={"flops": 7.0}),
        ArmResult("../a b", ["model=gpt"], "failed", "RuntimeError"),
    ]  # fmt: skip
    export_comparison(of_benchmark(BenchmarkResult("x", "none", arms), tmp_path), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a_b", "comparison", "none"]
    values, _, boxes, metrics = hparams_of(tmp_path / "none")
    assert values["arm"] == "none" and boxes["arm"] == ["none", "../a b"]
    assert metrics == ["result/speedup", "result/step_ms_p50", "result/samples_per_second",
                       "result/peak_memory_mib", "train/loss", "result/flops"]  # fmt: skip
    found = {tag: tags(tmp_path / "none").Scalars(tag)[0].value for tag in metrics}
    assert list(found.values()) == [1.0, 2.0, 500.0, 3.0, 0.5, 7.0]
    assert hparams_of(tmp_path / "a_b")[1] == api_pb2.STATUS_FAILURE


def test_a_second_time_nothing_grows(tmp_path: Path) -> None:
    trained(tmp_path / "0")
    row = Row(["seed=0"], "done", folder="0", speedup=1.0)
    for speedup in (1.0, 2.0):
        row.speedup = speedup
        export_comparison(sweep(tmp_path, row), tmp_path)
    filled = [path for path in tmp_path.rglob("events*") if path.stat().st_size]
    assert len(filled) == 4  # its own, one before and one after it, the comparison
    assert [e.value for e in tags(tmp_path / "0").Scalars("result/speedup")] == [2.0]
    assert len(tags(tmp_path / "comparison").Tensors("comparison/report")) == 1


@pytest.mark.parametrize("place", ["../other/0", ".", "link"])
def test_nothing_is_written_into_runs_of_others(tmp_path: Path, place: str) -> None:
    home = tmp_path / "sweep"
    trained(tmp_path / "other" / "0")
    home.mkdir()
    (home / "link").symlink_to(tmp_path / "other" / "0")
    before = sorted(tmp_path.rglob("*"))
    export_comparison(sweep(home, Row(["a=1"], "done", folder=place)), home)
    made = set(tmp_path.rglob("*")) - set(before)
    assert {path.relative_to(home).parts[0] for path in made} == {"comparison"}


def test_runs_put_together_by_hand_keep_their_rows(tmp_path: Path) -> None:
    trained(tmp_path / "0")
    export_comparison(sweep(tmp_path, Row(["seed=0"], "done", folder="0"), kind="runs"), tmp_path)
    assert len(list((tmp_path / "0").glob("events*"))) == 1
    assert (tmp_path / "comparison").is_dir()
