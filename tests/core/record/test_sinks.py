"""`monitoring.sinks`: MLflow's and W&B's own stores hold what metrics.jsonl holds."""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from runner.core.build.build import build
from runner.core.config.composing import compose
from runner.core.errors import ConfigError
from runner.core.hooks import sinks as hook
from runner.core.record.recorder import Recorder
from runner.core.record.sinks.base import MetricsRow, RunDescription, Sink, SinkWriter
from runner.core.schemas.monitoring import MonitoringConfig
from runner.core.train.loop import train
from tests.runs import read, wait_until

SHORT = ["training.steps=40", "training.validate_every=20", "monitoring.tensorboard=false"]
Points = set[tuple[str, int, float]]


class Listed(Sink):
    """Holds its rows in memory; the class is what a user would write."""

    name = "listed"

    def __init__(self, fails_at: int | None = None, hangs: bool = False) -> None:
        self.rows: list[MetricsRow] = []
        self.fails_at, self.hangs = fails_at, hangs
        self.closed: tuple[str, list[str]] | None = None
        self.released = threading.Event()

    def open(self, run: RunDescription) -> dict[str, int]:
        assert run.params["optimizer.lr"] is not None
        return {}

    def write(self, rows: Sequence[MetricsRow]) -> None:
        for row in rows:
            if self.hangs:
                self.released.wait()
            if row.step == self.fails_at:
                raise ConnectionError("nobody listens")
            self.rows.append(row)

    def close(self, status: str, files: Sequence[Path]) -> None:
        self.closed = status, [path.name for path in files]


def record(folder: Path, but: str = "") -> Points:
    """All finite numbers of metrics.jsonl, each of them once."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    points = [
        (f"{row['split']}/{key}", row["step"], float(value))
        for row in rows
        for key, value in row.items()
        if key not in ("step", "split", "nonfinite") and value is not None and row["split"] != but
    ]
    assert len(points) == len(set(points))
    return set(points)


def mlflow_points(folder: Path, uri: str, but: str = "") -> Points:
    """Those of MLflow's store, read by its own client; none is there twice."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    run_id = (folder / "mlflow-run-id").read_text().strip()
    points = [
        (key, entry.step, entry.value)
        for key in client.get_run(run_id).data.metrics
        for entry in client.get_metric_history(run_id, key)
        if not key.startswith(f"{but}/")
    ]
    assert [x for x, count in Counter(points).items() if count > 1] == []
    return set(points)


def wandb_points(folder: Path, but: str = "") -> Points:
    """Those of the files that W&B wrote; none is there twice."""
    from runner.core.record.sinks.wandb_sink import read_history

    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    rows = [row for file in files for row in read_history(file)]
    assert [row["_step"] for row in rows] == list(range(len(rows)))  # one run, when it is synced
    points = [
        (key, row["step"], float(value))
        for row in rows
        for key, value in row.items()
        if "/" in key and math.isfinite(float(value)) and row["split"] != but
    ]
    assert len(points) == len(set(points))
    return set(points)


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    address = f"sqlite:///{tmp_path}/store.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    return address


def command(folder: Path, sinks: str, *more: str) -> list[str]:
    typed = [*SHORT, f"monitoring.sinks=[{sinks}]", f"hydra.run.dir={folder}", "device=cpu", *more]
    return [sys.executable, "-m", "runner", *typed]


def test_a_class_of_the_users_gets_every_row_the_report_and_the_end(tmp_path: Path) -> None:
    target = f"{{_target_: {__name__}.Listed}}"
    package = __name__.partition(".")[0]
    config = compose([*SHORT, f"monitoring.sinks=[{target}]", f"security.trusted=[{package}]"])
    with build(config, tmp_path) as run:
        sink = next(x for x in run.hooks if isinstance(x, hook.Sinks)).writers[0].sink
        summary = train(run)
    assert isinstance(sink, Listed)
    points = {(key, row.step, x) for row in sink.rows for key, x in row.tagged.items()}
    assert points == record(tmp_path)
    assert sink.closed == ("done", ["summary.json"])  # the job writes the report, not this loop
    assert "sink_listed" not in summary.faults


def mirror(recorder: Recorder, sink: Sink, folder: Path, timeout_s: float) -> SinkWriter:
    writer = SinkWriter(sink, timeout_s)
    writer.start(RunDescription("mine", "now", folder, {"optimizer.lr": 0.1}), recorder.position())
    recorder.sink_writers.append(writer)
    return writer


@pytest.mark.parametrize("trouble", [{"fails_at": 5}, {"hangs": True}])
def test_a_sink_that_fails_or_hangs_is_one_warning_and_a_count(
    trouble: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Listed(**trouble)
    recorder = Recorder(tmp_path, MonitoringConfig(tensorboard=False))
    recorder.open()
    writer = mirror(recorder, sink, tmp_path, 0.5)
    with caplog.at_level(logging.WARNING, "runner"):
        for step in range(1, 21):
            recorder.scalars(step, "train", {"loss": 1.0})
        started = time.monotonic()
        writer.flush()
        recorder.close()
        assert time.monotonic() - started < 30  # it does not wait for what hangs
    sink.released.set()
    assert len(record(tmp_path)) == 20  # the record itself has all
    assert 1 <= writer.undelivered_rows <= 20
    warnings = [x.message for x in caplog.records if "monitoring.sinks: listed" in x.message]
    assert len(warnings) == 1 and "the run continues without it" in warnings[0]


def test_a_sink_that_is_resumed_gets_what_it_lacks_and_nothing_twice(tmp_path: Path) -> None:
    """Held up to step 30, the checkpoint was at 20, the record lacks nothing up to there."""

    class Resumed(Listed):
        def open(self, run: RunDescription) -> dict[str, int]:
            return {"train": 30, "val": 10}

    recorder = Recorder(tmp_path, MonitoringConfig(tensorboard=False))
    recorder.open()
    for step in (10, 20):
        recorder.scalars(step, "train", {"loss": step / 7})
        recorder.scalars(step, "val", {"loss": math.inf if step == 20 else 1.0})
    sink = Resumed()
    writer = mirror(recorder, sink, tmp_path, 30)
    for step in (30, 40, 35, 40):  # the last two after a rollback
        recorder.scalars(step, "train", {"loss": step / 7})
    writer.flush()
    recorder.close()
    found = [(row.split, row.step) for row in sink.rows]
    assert found == [("val", 20), ("train", 40), ("train", 35), ("train", 40)]
    assert sink.rows[0].values == {"loss": math.inf}


def test_a_missing_package_and_a_wrong_name_are_said_with_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hook, "find_spec", lambda name: None)
    for name in ("mlflow", "wandb"):
        said = rf"^monitoring.sinks: .*pip install 'hydra-torch-runner\[{name}\]'"
        with pytest.raises(ConfigError, match=said):
            hook.make_sinks([name], lambda target, key: None)
    with pytest.raises(ConfigError, match=r"^monitoring.sinks: .*'comet'; mlflow\|wandb"):
        compose(["monitoring.sinks=[comet]"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of their libraries
@pytest.mark.skipif(not (find_spec("mlflow") and find_spec("wandb")), reason="needs the extras")
def test_a_run_that_is_killed_and_resumed_is_one_run_in_both_with_its_numbers_and_no_secret(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    table = tmp_path / "hush-hush-1234567.csv"
    table.write_text("x,y\n" + "".join(f"{i % 17},{i % 2}\n" for i in range(200)))
    monkeypatch.setenv("TABLE", str(table))
    folder = tmp_path / "outputs" / "run"
    more = (
        "training.steps=4000 checkpoint.every=100 training.validate_every=100 name=mine "
        "data=tabular data.target=y data.path=${oc.env:TABLE} security.environment=[TABLE]"
    ).split()
    typed = command(folder, "mlflow,wandb", *more)
    process = subprocess.Popen(typed, cwd=tmp_path, stderr=subprocess.DEVNULL)
    store = folder / "mlflow-run-id"

    def begun() -> object:
        return (
            store.is_file()
            and list(folder.glob("wandb/offline-run-*/*.wandb"))
            and mlflow_points(folder, uri)
            and wandb_points(folder)
            and list(folder.glob("checkpoints/step_*"))
        )

    try:
        wait_until(begun, process)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    first = store.read_text()
    again = [*typed, f"checkpoint.resume={folder}"]
    done = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert store.read_text() == first and len(list(folder.glob("wandb/offline-run-*"))) == 2
    expected = record(folder, but="system")  # those rows are at other steps where a run is repeated
    assert mlflow_points(folder, uri, but="system") == expected
    assert wandb_points(folder, but="system") == expected
    summary = read(folder)
    assert "sink" not in summary["faults"]
    client = MlflowClient(tracking_uri=uri)
    run = client.get_run(first.strip())
    assert (run.info.status, run.data.tags["name"]) == ("FINISHED", "mine")
    assert run.data.tags["config_hash"] == summary["config_hash"]
    assert run.data.params["optimizer.lr"] == "0.001"
    assert {x.path for x in client.list_artifacts(run.info.run_id)} == {"report.md", "summary.json"}
    files = {path.name for path in folder.glob("wandb/offline-run-*/files/*")}
    assert {"report.md", "summary.json"} <= files
    for path in [tmp_path / "store.db", *folder.glob("wandb/**/*"), *tmp_path.glob("mlruns/**/*")]:
        if path.is_file():
            assert b"hush-hush-1234567" not in path.read_bytes(), path
