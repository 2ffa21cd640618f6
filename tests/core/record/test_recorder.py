import json
import logging
import math
import os
import resource
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from runner.core.record.recorder import Recorder
from runner.core.record.storage import replace_text
from runner.core.schemas.monitoring import MonitoringConfig
from tests.runs import python, scalars

JSON_ONLY = MonitoringConfig(tensorboard=False)


def opened(
    folder: Path | None, step: int = 0, offset: int | None = None, config: Any = JSON_ONLY
) -> Recorder:
    recorder = Recorder(folder, config)
    recorder.open(step, offset)
    return recorder


def write(recorder: Recorder, steps: Iterable[int], loss: float = 1.0) -> None:
    for step in steps:
        recorder.scalars(step, "train", {"loss": loss})


def rows(folder: Path) -> list[dict[str, object]]:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def steps(folder: Path) -> list[object]:
    return [row["step"] for row in rows(folder)]


def test_a_row_is_one_line_of_strict_json_and_names_what_was_not_finite(tmp_path: Path) -> None:
    recorder = opened(tmp_path)
    recorder.scalars(10, "train", {"loss": 0.5, "lr": 1e-3})
    assert steps(tmp_path) == [10]  # before it is closed
    recorder.scalars(20, "train", {"loss": math.nan, "grad_norm": -math.inf, "lr": 1e-3})
    recorder.close()
    assert rows(tmp_path) == [
        {"step": 10, "split": "train", "loss": 0.5, "lr": 1e-3},
        {"step": 20, "split": "train", "loss": None, "grad_norm": None, "lr": 1e-3,
         "nonfinite": {"loss": "nan", "grad_norm": "-inf"}},
    ]  # fmt: skip


def test_a_resume_cuts_off_exactly_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    first = opened(tmp_path)
    write(first, [10])
    first.scalars(10, "val", {"loss": 1.0})
    before, offset = (tmp_path / "metrics.jsonl").read_bytes(), first.position()
    write(first, [20])
    first.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 30, "spl')  # the process was killed here
    second = opened(tmp_path, 10, offset)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert second.position() == offset
    write(second, [20])
    second.close()
    assert steps(tmp_path) == [10, 10, 20]


@pytest.mark.parametrize("offset", [None, 10**9, 2**61, 5])
@pytest.mark.parametrize("torn", [b"", bytes(3 * 2**20)], ids=["whole", "no line ends"])
def test_an_offset_that_does_not_fit_is_replaced_by_the_steps_in_the_file(
    tmp_path: Path, offset: int | None, torn: bytes
) -> None:
    first = opened(tmp_path)
    write(first, [10, 20, 30])
    first.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    opened(tmp_path, 30 if torn else 20, offset).close()
    assert steps(tmp_path) == [10, 20, 30][: 3 if torn else 2]


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recorder = opened(None, config=MonitoringConfig())
    write(recorder, [1])
    recorder.text("a", "b", 1)
    recorder.end("done")
    recorder.close()
    assert recorder.position() == 0 and list(tmp_path.iterdir()) == []


def test_a_deleted_folder_is_logged_once_per_file_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder := tmp_path / "run").mkdir()
    recorder = opened(folder, config=MonitoringConfig())
    write(recorder, [1])
    shutil.rmtree(folder)
    for step in range(2, 6):
        write(recorder, [step])
        recorder.image("picture", np.zeros((2, 2, 3), np.uint8), step)
    recorder.close()
    assert recorder.faults == {"metrics": 4, "tensorboard": 8}
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 2
    assert all("deleted during the run" in text for text in warned)


CHILD = """
import json, resource, sys
from pathlib import Path
from runner.core.schemas.monitoring import MonitoringConfig
from runner.core.record.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]), MonitoringConfig())
recorder.open()
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 10**6))
for step in range(1, 200):
    if step == int(sys.argv[2]):  # there is room again
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
    recorder.scalars(step, "train", {"loss": 0.123456789, "grad_norm": 1.0})
recorder.close()
print(json.dumps([recorder.faults, recorder.position()]))
"""


def record_on_a_full_disk(folder: Path, room_again: int) -> tuple[dict[str, int], int, str]:
    """Faults, position and warnings of 199 rows, of which the first 5,000 bytes fit at first."""
    done = python("-c", CHILD, str(folder), str(room_again))
    assert done.returncode == 0, done.stderr
    return *json.loads(done.stdout), done.stderr


def test_a_disk_that_fills_up_leaves_whole_rows_and_a_readable_event_file(tmp_path: Path) -> None:
    faults, position, warned = record_on_a_full_disk(tmp_path, 0)
    size, written = (tmp_path / "metrics.jsonl").stat().st_size, steps(tmp_path)
    assert written == list(range(1, len(written) + 1))
    assert 4900 < size <= 5000 < position
    assert faults["metrics"] == 199 - len(written) and 0 < faults["tensorboard"] < 199
    assert warned.count("cannot be written, the run continues") == 2


def test_rows_that_a_full_disk_refused_are_written_when_there_is_room_again(tmp_path: Path) -> None:
    faults, position, warned = record_on_a_full_disk(tmp_path, 150)
    assert faults == {} and position == (tmp_path / "metrics.jsonl").stat().st_size
    assert steps(tmp_path) == list(range(1, 200))
    (path,) = tmp_path.glob("events.*")
    written = [event.step for event in EventFileLoader(str(path)).Load() if event.step]
    assert written == list(range(1, 200))
    assert warned.count("is written again, no data is lost") == 2


@pytest.mark.parametrize("resumed", [False, True])
def test_files_that_could_not_be_opened_at_the_start_are_opened_later(
    tmp_path: Path, resumed: bool
) -> None:
    first = opened(tmp_path, config=MonitoringConfig())
    write(first, range(1, 8))
    first.close()
    begin, limits = 6 if resumed else 1, resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        recorder = opened(tmp_path, begin - 1, config=MonitoringConfig())
        write(recorder, [begin], 2.0)
        assert recorder.faults == {"metrics": 1, "tensorboard": 2 + resumed}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    write(recorder, [begin + 1], 2.0)
    assert recorder.faults == {}
    recorder.close()
    losses = [row["loss"] for row in rows(tmp_path)]
    assert losses == [1.0] * (begin - 1) + [2.0, 2.0]
    assert recorder.position() == (tmp_path / "metrics.jsonl").stat().st_size
    assert [value for _, value in scalars(tmp_path, "watch_train/loss")] == losses


def test_a_text_that_cannot_be_put_in_place_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **folders: int) -> None:
        raise OSError("no space")

    path = tmp_path / "summary.json"
    path.write_text("before")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no space"):
        replace_text(path, "after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
