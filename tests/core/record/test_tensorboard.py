import errno
import io
import os
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams import api_pb2, metadata

from runner.core.record import storage
from runner.core.record.recorder import Recorder
from runner.core.record.tensorboard import truncate_events
from runner.core.schemas.monitoring import MonitoringConfig
from tests.runs import scalars as points


def opened(folder: Path, start_step: int = 0) -> Recorder:
    folder.mkdir(exist_ok=True)
    recorder = Recorder(folder, MonitoringConfig())
    recorder.open(start_step)
    return recorder


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0}).Reload()


def test_after_a_resume_no_step_appears_twice(tmp_path: Path) -> None:
    first = opened(tmp_path)
    for step in (10, 20, 30):
        first.scalars(step, "train", {"loss": 1.0})
    first.close()
    (path,) = tmp_path.glob("events*")
    with path.open("ab") as file:  # it was torn
        file.write(path.read_bytes()[:20])
    second = opened(tmp_path, start_step=20)
    second.scalars(30, "train", {"loss": 2.0, "lr": 0.25})
    second.close()
    third = opened(tmp_path, start_step=30)  # in the same second, so names must still sort
    third.scalars(40, "train", {"loss": 3.0})
    third.close()
    files = sorted(tmp_path.glob("events*"))
    assert len(files) == 3
    (row,) = [event for event in EventFileLoader(str(files[1])).Load() if event.summary.value]
    assert [value.tag for value in row.summary.value] == ["watch_train/loss", "watch_train/lr"]
    assert points(tmp_path, "watch_train/loss") == [(10, 1.0), (20, 1.0), (30, 2.0), (40, 3.0)]


def test_a_resumed_run_truncates_its_event_file_to_the_checkpoint_and_deletes_later_ones_of_its_own(
    tmp_path: Path,
) -> None:
    first = opened(tmp_path)
    first.text("faults/history", "a", 10)
    first.scalars(20, "train", {"loss": 1.0})
    position = first.event_position()
    first.end("failed", 20, {"accuracy": 0.5})  # at the step of the checkpoint
    first.text("faults/history", "b", 20)
    first.close()
    others = tmp_path / f"events.out.tfevents.{int(time.time()) + 5}.host.1.0"
    others.write_bytes(b"")  # of a writer of the user's
    for _ in range(2):  # the file of the session before is later than the checkpoint
        again = Recorder(tmp_path, MonitoringConfig())
        again.open(20, None, position)
        assert again.continues_events
        again.end("done", 20, {"accuracy": 0.5})
        again.text("faults/history", "c", 20)
        again.close()
    assert points(tmp_path, "val/best/accuracy") == [(20, 0.5)]
    assert [event.step for event in read(tmp_path).Tensors("watch_faults/history")] == [10, 20]
    assert len(list(tmp_path.glob("events*"))) == 3 and others.exists()


@pytest.mark.parametrize("position", [None, 3, ["../x", 1], ["metrics.jsonl", 1], ["a", "b"]])
def test_a_position_that_names_no_event_file_leaves_all_files(
    position: object, tmp_path: Path
) -> None:
    first = opened(tmp_path)
    first.scalars(1, "train", {"loss": 1.0})
    first.close()
    assert truncate_events(tmp_path, position) is False
    assert points(tmp_path, "watch_train/loss") == [(1, 1.0)]
    assert (tmp_path / "metrics.jsonl").read_text().count("step") == 1


def test_a_run_is_one_row_of_hparams_however_often_it_is_resumed(tmp_path: Path) -> None:
    given = {"lr": 0.1, "name": "a\udcff", "amp": True}
    for start, status in ((0, "failed"), (10, "done")):
        recorder = opened(tmp_path, start)
        recorder.hparams("trial/1", given, {"val/accuracy": "accuracy (last)"}, ["name"])
        recorder.end(status)
        recorder.close()
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    tags = read(tmp_path).PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(tags["_hparams_/session_start_info"])
    assert start.group_name == "trial/1"
    assert start.hparams["lr"].number_value == 0.1
    assert start.hparams["amp"].bool_value is True
    end = metadata.parse_session_end_info_plugin_data(tags["_hparams_/session_end_info"])
    assert end.status == api_pb2.STATUS_SUCCESS  # the failure before is no longer true
    experiment = metadata.parse_experiment_plugin_data(tags["_hparams_/experiment"])
    assert [info.name for info in experiment.hparam_infos if info.differs] == ["name"]
    (metric,) = experiment.metric_infos
    assert (metric.name.tag, metric.display_name) == ("val/accuracy", "accuracy (last)")


def test_a_row_of_hparams_that_had_to_wait_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, write, refused = opened(tmp_path), os.write, [True]

    def full_once(descriptor: int, data: bytes) -> int:
        if refused and refused.pop():
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(storage.os, "write", full_once)
    recorder.hparams("trial/1", {"lr": 0.1}, {"val/accuracy": "accuracy (last)"})
    recorder.close()
    assert not refused
    tags = read(tmp_path).PluginTagToContent("hparams")
    assert tags.keys() == {"_hparams_/experiment", "_hparams_/session_start_info"}


def test_texts_and_pictures_come_back_as_they_went_in(tmp_path: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    recorder = opened(tmp_path)
    recorder.text("about/config", "# größe\udcff", 0)
    recorder.image("val/confusion", picture, 3)
    recorder.close()
    accumulator = read(tmp_path)
    assert accumulator.PluginTagToContent("text").keys() == {"about/config"}
    assert accumulator.PluginTagToContent("images").keys() == {"val/confusion"}
    (text,) = accumulator.Tensors("about/config")
    assert text.tensor_proto.string_val[0].decode() == "# größe?"
    (image,) = accumulator.Tensors("val/confusion")
    width, height, png = image.tensor_proto.string_val
    assert (int(width), int(height), image.step) == (7, 5, 3)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png))), picture)


def test_a_run_that_begins_again_in_its_folder_shows_no_step_twice(tmp_path: Path) -> None:
    for run in (1.0, 2.0):
        recorder = opened(tmp_path)
        for step in (0, 10):
            recorder.scalars(step, "train", {"loss": run})
        recorder.text("about/config", "text", 0)
        recorder.close()
    assert points(tmp_path, "watch_train/loss") == [(0, 2.0), (10, 2.0)]
    assert len(read(tmp_path).Tensors("about/config")) == 1
