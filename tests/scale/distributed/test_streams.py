"""Several processes read a stream without doubles, and go on where each of them was."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.core import fork_server
from runner.core.errors import ConfigError
from tests.scale.distributed.runs import digest, run

pytestmark = pytest.mark.skipif(not fork_server.available(), reason="forks on Linux alone")
STREAM = ("data._target_=faulty.Numbers", "data.validation_samples=20")


def test_two_processes_with_two_workers_each_read_every_sample_once(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    started = run(
        tmp_path / "run", "", *STREAM, "data.workers=2", "data.prefetch=1", steps=5, SEEN=str(seen)
    )
    assert started.code == 0, started.output
    # of each reader; the first samples were read before, to know what they are like
    assert sorted(path.name for path in seen.iterdir()) == ["0", "1", "2", "3"]
    for path in seen.iterdir():
        numbers = {int(text) for text in path.read_text().split()}
        assert {number % 4 for number in numbers} == {int(path.name)}
        assert len(numbers) >= 16


@pytest.mark.parametrize("target", ["Numbers", "Unsaved"])
def test_a_killed_process_has_all_go_on_in_the_stream_to_the_same_weights(
    tmp_path: Path, target: str
) -> None:
    typed = (*STREAM, f"data._target_=faulty.{target}")
    whole = run(tmp_path / "whole", "", *typed)
    killed = run(tmp_path / "killed", "1:forward:kill:10", *typed, "distributed.restarts=1")
    assert whole.code == killed.code == 0, killed.output
    assert killed.summary["distributed"]["attempt"] == 1
    assert digest(killed.folder) == digest(whole.folder)
    stopped = run(tmp_path / "stopped", "1:forward:term:7", *typed)
    assert stopped.code == 143, stopped.output
    resumed = run(tmp_path / "stopped", "", *typed, "checkpoint.resume=auto")
    assert digest(resumed.folder) == digest(whole.folder), resumed.output


def test_a_batch_is_the_same_for_all_processes(tmp_path: Path) -> None:
    started = run(tmp_path / "run", "", *STREAM, "training.batch_size=15", steps=2)
    assert started.code == ConfigError.exit_code
    assert "training.batch_size: 15 samples are not equally many for each" in started.output
