"""What TensorBoard shows of a sweep, from the answers of its own server."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from runner.build import build
from runner.composing import compose
from runner.report.comparison import Comparison, Row
from runner.report.tensorboard_export import export_comparison
from runner.training.loop import train
from runner.training.summary import Summary

PATIENCE_S = 60.0
SWEPT = "++monitoring.domains={optimizer.lr:[0.01,0.1,-1.0,0.5],optimization:[none,basic]}"


class Server:
    """A running TensorBoard."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, body: Any = None) -> Any:
        """What it answers, parsed."""
        return json.loads(self.raw(path, None if body is None else json.dumps(body).encode()))

    def raw(self, path: str, body: bytes | None = None) -> bytes:
        """The same, as it is."""
        connection = HTTPConnection(self.address.removeprefix("http://"), timeout=PATIENCE_S)
        try:
            how = "GET" if body is None else "POST"
            connection.request(how, f"/data/{path}", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, (path, answer.status)
            return answer.read()
        finally:
            connection.close()

    def rows(self) -> list[dict[str, Any]]:
        """The rows of HParams."""
        statuses = [f"STATUS_{s}" for s in ("UNKNOWN", "SUCCESS", "FAILURE", "RUNNING")]
        body = {
            "experimentName": "", "allowedStatuses": statuses, "colParams": [], "startIndex": 0,
            "sliceSize": 100,
        }  # fmt: skip
        return list(self.get("plugin/hparams/session_groups", body)["sessionGroups"])

    def columns(self) -> dict[str, Any]:
        """The columns of HParams."""
        return dict(self.get("plugin/hparams/experiment", {"experimentName": ""}))


@contextmanager
def tensorboard(folder: Path, runs: int, *flags: str) -> Iterator[Server]:
    """TensorBoard on a folder, once it has read so many runs."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", "0",
               "--host", "127.0.0.1", *flags]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"http://[\d.]+:\d+", line):
                break
        else:
            raise AssertionError("".join(said))
        server = Server(found[0])
        end = time.monotonic() + PATIENCE_S
        while len(server.get("runs")) < runs and time.monotonic() < end:
            pass
        yield server
    finally:
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    """With all that it started, and at once where it does not go."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 15)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def job(home: Path, number: int, *overrides: str, speedup: float) -> Row:
    """A job of a sweep that trains."""
    folder = home / str(number)
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps([*overrides, SWEPT]))
    small = ("model=mlp", "model.width=8", "training.steps=30", "monitoring.progress=false")
    with build(compose([*overrides, *small, SWEPT, "checkpoint.enabled=false"]), folder) as run:
        train(run)
    summary = json.loads((folder / "summary.json").read_text())
    return Row(list(overrides), "done", "", summary, speedup, name=" ".join(overrides),
               folder=str(number), command="python -m runner " + " ".join(overrides))  # fmt: skip


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two jobs that are done, one that was never built, one that was killed as it began."""
    home = tmp_path_factory.mktemp("sweeps") / "nights"
    rows = [
        job(home, 0, "optimizer.lr=0.01", "optimization=none", speedup=1.0),
        job(home, 1, "optimizer.lr=0.1", "optimization=basic", speedup=1.25),
    ]
    reason = "optimizer.lr: -1.0 is <no> rate | at all"
    (home / "2").mkdir()
    Summary("failed", reason).write(home / "2")
    (home / "3").mkdir()
    rows += [
        Row(["optimizer.lr=-1.0", "optimization=none"], "failed", reason, name="two", folder="2"),
        Row(["optimizer.lr=0.5", "optimization=none"], "killed", "signal 9", name="three",
            folder="3"),
    ]  # fmt: skip
    comparison = Comparison(
        "digits", rows, reference=rows[0].name, notes=["one run each"], home=home
    )
    for _ in range(2):  # a second time changes nothing
        export_comparison(comparison, home)
    return home


@pytest.fixture(scope="module")
def server(sweep: Path) -> Iterator[Server]:
    with tensorboard(sweep, runs=5) as running:
        yield running


def test_every_job_is_a_run_and_the_comparison_is_one_more(server: Server) -> None:
    assert server.get("runs") == ["0", "1", "2", "3", "comparison"]


def test_every_job_is_a_row_with_its_status_and_the_comparison_is_none(server: Server) -> None:
    rows = {row["sessions"][0]["name"]: row for row in server.rows()}
    assert list(rows) == ["0", "1", "2", "3"]
    assert [len(row["sessions"]) for row in rows.values()] == [1, 1, 1, 1]
    told = {name: (row["sessions"][0]["status"], row["hparams"]["status"])
            for name, row in rows.items()}  # fmt: skip
    assert told == {
        "0": ("STATUS_SUCCESS", "done"),
        "1": ("STATUS_SUCCESS", "done"),
        "2": ("STATUS_FAILURE", "failed"),
        "3": ("STATUS_FAILURE", "killed"),
    }
    assert [row["hparams"]["optimizer.lr"] for row in rows.values()] == [0.01, 0.1, -1.0, 0.5]
    assert [row["hparams"]["optimization"] for row in rows.values()] == [
        "none", "basic", "none", "none",
    ]  # fmt: skip


def test_what_was_swept_has_check_boxes_for_every_value_and_comes_first(server: Server) -> None:
    columns = server.columns()["hparamInfos"]
    boxes = {c["name"]: c["domainDiscrete"] for c in columns if "domainDiscrete" in c}
    assert boxes == {
        "optimizer.lr": [-1.0, 0.01, 0.1, 0.5],
        "optimization": ["none", "basic"],
        "status": ["done", "failed", "killed"],
    }
    assert {c["name"] for c in columns if c.get("differs")} == boxes.keys()
    assert {"seed", "model.width"} <= {c["name"] for c in columns}


def test_the_final_metrics_are_the_columns(server: Server, sweep: Path) -> None:
    tags = [column["name"]["tag"] for column in server.columns()["metricInfos"]]
    assert tags[:5] == [
        "val/best/accuracy", "val/accuracy", "result/speedup", "result/samples_per_second",
        "result/peak_memory_mib",
    ]  # fmt: skip
    done = server.rows()[1]
    found = {value["name"]["tag"]: value["value"] for value in done["metricValues"]}
    assert found.keys() == set(tags)  # no column that is empty everywhere
    summary = Summary.read(sweep / "1")
    assert found["result/speedup"] == pytest.approx(1.25)
    assert found["result/step_ms_p50"] == pytest.approx(summary.throughput.step_ms.p50, rel=1e-5)
    assert found["val/best/accuracy"] == pytest.approx(summary.best, rel=1e-5)
    assert found["result/peak_memory_mib"] == pytest.approx(
        summary.memory.peak_process_bytes / 2**20, rel=1e-5
    )


def test_the_pictures_and_the_text_are_there_once(server: Server) -> None:
    tags = server.get("plugin/images/tags")["comparison"]
    assert {tag: about["samples"] for tag, about in tags.items()} == {
        "comparison/speed": 1, "comparison/memory": 1, "comparison/loss": 1,
    }  # fmt: skip
    for tag in tags:
        (entry,) = server.get(f"plugin/images/images?run=comparison&tag={tag}&sample=0")
        png = server.raw(f"plugin/images/individualImage?{entry['query']}")
        picture = Image.open(io.BytesIO(png))
        assert picture.width == 640 and 200 < picture.height < 1000
    (text,) = server.get("plugin/text/text?run=comparison&tag=comparison%2Freport")
    assert "1.25×" in text["text"] and "signal 9" in text["text"]
    assert "<no>" not in text["text"]  # what an error says is not markup


def test_charts_are_laid_out_once_however_many_runs_lay_them_out(server: Server) -> None:
    (category,) = server.get("plugin/custom_scalars/layout")["category"]
    titles = [chart["title"] for chart in category["chart"]]
    assert {"loss", "accuracy", "learning rate"} <= set(titles)
    assert len(titles) == len(set(titles))
