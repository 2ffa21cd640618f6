"""What is added to a run's event files afterwards, and what becomes of it at a resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams import api_pb2, metadata

from runner.record.config import MonitoringConfig
from runner.record.recorder import Recorder
from runner.record.tensorboard import TensorBoard, append_events, prepend_events, read_session

END = "_hparams_/session_end_info"


def run(folder: Path, start_step: int = 0, status: str | None = "done") -> None:
    folder.mkdir(exist_ok=True)
    recorder = Recorder(folder, MonitoringConfig())
    recorder.open(start_step)
    recorder.hparams("0 of a/b", {"lr": 0.1, "amp": True, "kind": "mlp"}, ["val/loss"])
    recorder.scalars(start_step + 10, "train", {"loss": 1.0})
    if status:
        recorder.end(status)
    recorder.close()


def add(folder: Path, speedup: float, status: str = "done") -> None:
    with prepend_events(folder) as events:
        events.experiment({"arm": "x"}, ["result/speedup"], {"arm": ["x", "y"]}, ["arm"])
        events.session("row", {"arm": "x"})
        events.end(status)
    with append_events(folder) as events:
        events.scalars(0, "result", {"speedup": speedup})
        events.end(status)


def first(folder: Path) -> dict[str, Any]:
    """By tag, what readers of TensorBoard are told first."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("events*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, value.metadata.plugin_data.content)
    return found


def test_what_is_added_says_more_of_a_row_and_nothing_of_the_run_is_touched(
    tmp_path: Path,
) -> None:
    run(tmp_path)
    (own,) = tmp_path.glob("events*")
    before = own.read_bytes()
    add(tmp_path, 2.0)
    assert own.read_bytes() == before
    start = metadata.parse_session_start_info_plugin_data(
        first(tmp_path)["_hparams_/session_start_info"]
    )
    assert start.hparams["arm"].string_value == "x"
    reader = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in reader.Scalars("result/speedup")] == [(0, 2.0)]
    assert [e.step for e in reader.Scalars("train/loss")] == [10]


def test_adding_again_replaces_what_was_added(tmp_path: Path) -> None:
    run(tmp_path)
    for speedup in (1.0, 2.0, 3.0):
        add(tmp_path, speedup)
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("events*"))]
    assert len(sizes) == 4 and sizes.count(0) == 1  # one that a TensorBoard may be reading
    reader = EventAccumulator(str(tmp_path)).Reload()
    assert [e.value for e in reader.Scalars("result/speedup")] == [3.0]


def test_a_resumed_run_is_as_if_nothing_had_been_added(tmp_path: Path) -> None:
    run(tmp_path, status=None)  # killed
    add(tmp_path, 2.0, "killed")
    assert metadata.parse_session_end_info_plugin_data(first(tmp_path)[END]).status == (
        api_pb2.STATUS_FAILURE
    )
    run(tmp_path, start_step=10)
    found = first(tmp_path)
    assert metadata.parse_session_end_info_plugin_data(found[END]).status == api_pb2.STATUS_SUCCESS
    start = metadata.parse_session_start_info_plugin_data(found["_hparams_/session_start_info"])
    assert start.group_name == "0 of a/b" and "arm" not in start.hparams
    assert "result/speedup" not in found


def scalar(reader: EventAccumulator, tag: str) -> list[float]:
    return [event.value for event in reader.Scalars(tag)]


def test_a_reader_that_is_open_learns_of_the_end_and_of_the_results_and_goes_on_at_a_resume(
    tmp_path: Path,
) -> None:
    run(tmp_path, status=None)  # killed
    reader = EventAccumulator(str(tmp_path)).Reload()
    add(tmp_path, 2.0, "interrupted")
    reader.Reload()
    assert scalar(reader, "result/speedup") == [2.0]
    assert END not in reader.PluginTagToContent("hparams")
    run(tmp_path, start_step=10)
    add(tmp_path, 3.0)
    reader.Reload()
    assert [e.step for e in reader.Scalars("train/loss")] == [10, 20]
    assert scalar(reader, "result/speedup")[-1] == 3.0  # what HParams shows
    end = metadata.parse_session_end_info_plugin_data(reader.PluginTagToContent("hparams")[END])
    assert end.status == api_pb2.STATUS_SUCCESS


def test_a_job_that_had_never_begun_begins_its_own_row_when_it_is_run_again(
    tmp_path: Path,
) -> None:
    add(tmp_path, 1.0, "failed")
    assert read_session(tmp_path) is None
    run(tmp_path)
    session = read_session(tmp_path)
    assert session is not None
    assert (session.name, session.metrics) == ("0 of a/b", ["val/loss"])
    assert session.values == {"lr": 0.1, "amp": True, "kind": "mlp"}


@pytest.mark.parametrize("added", [prepend_events, append_events])
def test_an_error_while_adding_leaves_what_was_there(
    tmp_path: Path, added: Callable[[Path], AbstractContextManager[TensorBoard]]
) -> None:
    run(tmp_path)
    add(tmp_path, 2.0)
    before = Counter(path.name for path in tmp_path.iterdir())
    with pytest.raises(ZeroDivisionError), added(tmp_path) as events:
        events.scalars(0, "result", {"speedup": 1 / 0})
    assert Counter(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("damage", [b"", b"\x00" * 40, b"_hparams_/session_start_info" * 9])
def test_a_damaged_event_file_tells_of_no_row(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "events.out.tfevents.0000000009.1").write_bytes(damage)
    assert read_session(tmp_path) is None


def test_nothing_is_written_through_a_planted_link(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    run(folder, status=None)
    add(folder, 1.0, "killed")
    for path in list(folder.glob("events*")):
        (folder / f".{path.name.removeprefix('events.out.tfevents.')}.tmp").symlink_to(victim)
    (folder / "events.out.tfevents.0000000008.added").symlink_to(victim)
    add(folder, 2.0, "killed")
    run(folder, start_step=10)
    assert victim.read_text() == "precious"
