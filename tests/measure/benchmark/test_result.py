"""A result survives its file, and a file that is damaged says where."""

import json
import math
import os
from pathlib import Path

import pytest

from runner.core.errors import StorageError
from runner.measure.benchmark.result import (
    FILE,
    ArmResult,
    Attribution,
    BenchmarkResult,
    Control,
    Effect,
    Load,
)


def result() -> BenchmarkResult:
    none = ArmResult("none", [], "done", step_ms=1.5, per_sample_ms=[0.1, 0.2], losses=[2.0, 1.0])
    ultra = ArmResult(
        "ultra", ["optimization=ultra"], "killed", "by SIGKILL", folder="ultra", speedup=2.0,
        speedup_interval=(1.9, 2.1), summary={"device": {"kind": "cpu"}},
    )  # fmt: skip
    effects = [Effect("amp", added=1.2, added_interval=(1.1, 1.3), note="x")]
    return BenchmarkResult(
        "digits", "none", [none, ultra], Control(1.0, (0.99, 1.01)), 0.01, 8, 20.0, "narrow",
        {"cpu": "x"}, Load(others=0.1), ["a note"], Attribution("ultra", effects, ["amp is worth"]),
        {"path": "y"},
    )  # fmt: skip


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    result().write(tmp_path)
    assert BenchmarkResult.read(tmp_path) == result()
    assert BenchmarkResult.read(tmp_path / FILE) == result()
    assert os.listdir(tmp_path) == [FILE]


def test_numbers_that_json_has_not_and_keys_of_a_newer_version_are_read(tmp_path: Path) -> None:
    changed = result()
    changed.arms[0].losses = [1.0, math.nan]
    changed.arms[1].speedup_interval = (0.5, math.inf)
    changed.write(tmp_path)
    tree = json.loads((tmp_path / FILE).read_text(), parse_constant=pytest.fail)
    tree["arms"][0]["news"] = tree["news"] = 1
    (tmp_path / FILE).write_text(json.dumps(tree))
    read = BenchmarkResult.read(tmp_path)
    assert math.isnan(read.arms[0].losses[1])
    assert read.arms[1].speedup_interval == (0.5, math.inf)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: "{", "is damaged"),
        (lambda d: "[" * 100_000, "is damaged"),
        (lambda d: json.dumps({"status": "done"}), "not a result of job=benchmark"),
        (lambda d: json.dumps(d | {"schema": 99}), "newer version"),
        (lambda d: json.dumps(d | {"arms": [{"name": 1}]}), r"arms\[0\]\.name"),
        (lambda d: json.dumps(d | {"control": {"ratio": 1, "interval": [1]}}), "control.interval"),
    ],
)
def test_a_file_that_is_damaged_or_foreign_says_so(tmp_path: Path, change, says: str) -> None:  # type: ignore[no-untyped-def]
    result().write(tmp_path)
    path = tmp_path / FILE
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(StorageError, match=says) as caught:
        BenchmarkResult.read(tmp_path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_or_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        BenchmarkResult.read(tmp_path)
    (tmp_path / "f").write_text("")
    with pytest.raises(StorageError, match="not written"):
        result().write(tmp_path / "f")
