"""TensorBoard's names: what differs between runs, by links that follow the folders."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from runner.core.record.tensorboard import open_event_file
from runner.measure.tensorboard_server import EVENT_FILE_PREFIX, link_runs


def run_in(folder: Path, *overrides: str) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra/overrides.yaml").write_text("".join(f"- {text}\n" for text in overrides))
    (folder / f"{EVENT_FILE_PREFIX}1").write_text("curve")
    return folder


def test_runs_are_named_by_what_differs_and_new_ones_are_added(tmp_path: Path) -> None:
    outputs, home = tmp_path / "outputs", tmp_path / "home"
    home.mkdir()
    first = run_in(outputs / "runs/digits/2026-01-01_00-00-00-aaa", "optimizer.lr=0.1", "name=a")
    assert link_runs([outputs], home) == ["digits"]
    assert (home / "digits").readlink() == first
    second = run_in(outputs / "runs/digits/2026-01-02_00-00-00-bbb", "optimizer.lr=0.2", "name=b")
    sweep = outputs / "sweeps/rates/2026-01-03_00-00-00-ccc"
    for i, (rate, seed) in enumerate([("0.1", 0), ("0.1", 1), ("0.2", 0)]):
        typed = (f"optimizer.lr={rate}", f"seed={seed}", "model.weights=a/b")
        job = run_in(sweep / str(i), *typed, f"hydra.run.dir=outputs/{i}")
        (job / "checkpoints").mkdir()
        (job / "checkpoints" / f"{EVENT_FILE_PREFIX}2").touch()  # not a run
    run_in(sweep / "comparison")
    names = ["digits/lr=0.1", "digits/lr=0.2", "rates/comparison"]
    names += [f"rates/lr={x}" for x in ("0.1 seed=0", "0.1 seed=1", "0.2 seed=0")]
    assert sorted(link_runs([outputs], home)) == names
    assert (home / "digits/lr=0.2").readlink() == second
    links = [path for path in home.rglob("*") if path.is_symlink()]
    assert len(links) == 6 and all((link / f"{EVENT_FILE_PREFIX}1").is_file() for link in links)
    assert sorted(link_runs([first], home)) == ["digits"]  # a run by itself has a name, too
    assert [path.name for path in home.iterdir()] == ["digits"]
    own = [run_in(outputs / place, "seed=1") for place in ("tuned", "mine/tuned")]
    assert sorted(link_runs(own, home)) == ["tuned mine", "tuned outputs"]
    assert link_runs(own[:1], home) == ["tuned"]  # a folder that the user named


def test_names_hold_nothing_that_leads_out_of_the_folder(tmp_path: Path) -> None:
    (home := tmp_path / "home").mkdir()
    for i, value in enumerate(("../../x", "\\x1b[2J", "", "y" * 400)):
        run_in(tmp_path / "runs" / str(i), f"data.path={value}", "seed=1")
    for name in link_runs([tmp_path / "runs"], home):
        assert (home / name).is_symlink() and (home / name).parent.parent == home
        assert len(name) < 200 and name.isprintable()


@pytest.mark.slow
def test_tensorboard_itself_shows_these_names(tmp_path: Path) -> None:
    for rate in ("0.1", "0.2"):
        folder = run_in(tmp_path / "runs" / rate, f"optimizer.lr={rate}")
        (folder / f"{EVENT_FILE_PREFIX}1").unlink()
        events = open_event_file(folder)
        events.scalars(1, "train", {"loss": 1.0})
        events.scalars(1, "faults", {"seen": 1.0})
        events.close()
    command = [sys.executable, "-m", "runner.report", "--tensorboard", str(tmp_path / "runs")]
    options = ["--host=127.0.0.1", "--port=0", "--load_fast=false"]
    with (tmp_path / "log").open("wb") as file:
        board = subprocess.Popen([*command, *options], stderr=file, stdout=file)
    try:
        deadline, tags = time.monotonic() + 120, {}
        while len(tags) < 2 and time.monotonic() < deadline:
            time.sleep(0.5)
            if found := re.search(r"http://127\.0\.0\.1:\d+", (tmp_path / "log").read_text()):
                with urlopen(f"{found[0]}/data/plugin/scalars/tags") as answer:  # noqa: S310
                    tags = json.load(answer)
        assert set(tags) == {"runs/lr=0.1", "runs/lr=0.2"}
        assert sorted(tags["runs/lr=0.1"]) == ["watch_faults/seen", "watch_train/loss"]
    finally:
        os.kill(board.pid, signal.SIGINT)
        assert board.wait(60) == 130
