"""What TensorBoard shows of a sweep, as its own plug-ins answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups, metadata

from runner.benchmark.result import Attribution, Effect
from runner.record.config import MonitoringConfig
from runner.record.recorder import Recorder
from runner.report.comparison import Comparison, Row, of_benchmark
from runner.report.tensorboard_export import draw_pictures, export_comparison
from tests.report.planted_results import arm, reference, result

STATUSES = ("UNKNOWN", "SUCCESS", "FAILURE", "RUNNING")


def trained(folder: Path, lr: float, status: str = "") -> None:
    """A job's folder as a job leaves it."""
    folder.mkdir(parents=True)
    recorder = Recorder(folder, MonitoringConfig())
    with closing(recorder):
        recorder.open()
        values = {"optimizer.lr": lr}
        domains = {"optimizer.lr": [0.01, 0.1, 0.5]}
        recorder.hparams(f"{folder.name} of x/y", values, ["val/loss"], domains)
        recorder.scalars(10, "val", {"loss": lr})
        recorder.layout({"loss": ["train/loss", "val/loss"]})
        if status:
            recorder.end(status)


def row(number: int, lr: float, status: str) -> Row:
    overrides = [f"optimizer.lr={lr}", "optimization=none"]
    return Row(overrides, status, f"why {number}", folder=str(number), name=f"lr={lr}", speedup=1.0)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two jobs that ended their rows, one that was killed, one that never began."""
    home = tmp_path_factory.mktemp("sweeps") / "nights"
    trained(home / "0", 0.01, "done")
    trained(home / "1", 0.1, "failed")
    trained(home / "2", 0.5)
    rows = [row(0, 0.01, "done"), row(1, 0.1, "failed"), row(2, 0.5, "killed")]
    rows.append(row(3, -1.0, "skipped"))
    comparison = Comparison("digits", rows, reference="lr=0.01", home=home)
    for _ in range(2):  # a second time changes nothing
        export_comparison(comparison, home)
    return home


@pytest.fixture(scope="module")
def board(sweep: Path) -> Iterator[EventMultiplexer]:
    multiplexer = EventMultiplexer(tensor_size_guidance={"tensors": 0})
    yield multiplexer.AddRunsFromDirectory(str(sweep)).Reload()


def hparams_rows(board: EventMultiplexer, home: Path) -> list[dict[str, Any]]:
    context = TBContext(data_provider=MultiplexerDataProvider(board, str(home)), logdir=str(home))
    request = api_pb2.ListSessionGroupsRequest(
        slice_size=100, allowed_statuses=[getattr(api_pb2, f"STATUS_{s}") for s in STATUSES]
    )
    backend = backend_context.Context(context)
    handler = list_session_groups.Handler(RequestContext(), backend, "", request)
    return list(MessageToDict(handler.run())["sessionGroups"])


def statuses(home: Path) -> dict[str, str]:
    board = EventMultiplexer().AddRunsFromDirectory(str(home)).Reload()
    sessions = [found["sessions"][0] for found in hparams_rows(board, home)]
    return {session["name"]: session["status"] for session in sessions}


def resumed(folder: Path) -> None:
    recorder = Recorder(folder, MonitoringConfig())
    with closing(recorder):
        recorder.open()
        recorder.hparams(f"{folder.name} of x/y", {"optimizer.lr": 0.5}, ["val/loss"])
        recorder.end("done")


def test_every_job_is_a_row_with_how_it_ended(board: EventMultiplexer, sweep: Path) -> None:
    assert sorted(board.Runs()) == ["0", "1", "2", "3", "comparison"]
    rows = {found["sessions"][0]["name"]: found for found in hparams_rows(board, sweep)}
    assert {name: found["sessions"][0]["status"] for name, found in rows.items()} == {
        "0": "STATUS_SUCCESS",
        "1": "STATUS_FAILURE",
        "2": "STATUS_FAILURE",
        "3": "STATUS_FAILURE",
    }
    assert [rows[str(i)]["hparams"]["optimizer.lr"] for i in range(4)] == [0.01, 0.1, 0.5, -1.0]


def test_check_boxes_text_and_layout_are_there(board: EventMultiplexer) -> None:
    content = board.PluginRunToTagToContent("hparams")["0"]["_hparams_/experiment"]
    (info,) = metadata.parse_experiment_plugin_data(content).hparam_infos
    assert [value.number_value for value in info.domain_discrete.values] == [0.01, 0.1, 0.5]
    (report,) = board.Tensors("comparison", "comparison/report")
    assert "why 3" in report.tensor_proto.string_val[0].decode()
    assert [e.step for e in board.Tensors("comparison", "comparison/speed")] == [0]
    assert "0" in board.PluginRunToTagToContent("custom_scalars")


def test_a_killed_job_that_is_resumed_ends_its_own_row(tmp_path: Path) -> None:
    trained(tmp_path / "0", 0.5)
    home = Comparison("x", [row(0, 0.5, "killed"), row(1, 0.1, "skipped")], home=tmp_path)
    export_comparison(home, tmp_path)
    assert statuses(tmp_path) == {"0": "STATUS_FAILURE", "1": "STATUS_FAILURE"}
    for name in "01":
        resumed(tmp_path / name)
    assert statuses(tmp_path) == {"0": "STATUS_SUCCESS", "1": "STATUS_SUCCESS"}


@pytest.mark.parametrize("place", ["../other/0", ".", "link"])
def test_nothing_is_written_into_runs_of_others(tmp_path: Path, place: str) -> None:
    home = tmp_path / "sweep"
    trained(tmp_path / "other" / "0", 0.1)
    home.mkdir()
    (home / "link").symlink_to(tmp_path / "other" / "0")
    before = set(tmp_path.rglob("*"))
    killed = Comparison("x", [Row(["a=1"], "killed", folder=place)], home=home)
    export_comparison(killed, home)
    made = set(tmp_path.rglob("*")) - before
    assert {path.relative_to(home).parts[0] for path in made} == {"comparison"}


def test_pictures_are_of_one_width_and_a_bounded_height() -> None:
    long = "training.batch_size=256 optimizer=sgd optimization=advanced model.width=64 seed=1"
    many = [arm(f"{i} {long}", 1.0 + i, speedup_interval=(0.5, 2.0 + i)) for i in range(40)]
    effects = [Effect("amp", 1.5, (1.4, 1.6), 1.2, (1.1, 1.3)), Effect("compile", 0.9, None)]
    found = result(reference(), *many, noise_floor=0.5)
    found.attribution = Attribution("ultra", effects)
    pictures = draw_pictures(of_benchmark(found, None))
    assert pictures.keys() == {"speed", "attribution"}
    assert all(p.shape[1] == 640 and p.shape[0] < 1100 for p in pictures.values())
    nothing = Comparison("x", [Row([], "failed", name="a"), Row([], "killed")])
    assert draw_pictures(nothing) == {}
