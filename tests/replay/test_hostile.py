"""A capture that somebody made by hand: it runs nothing, and writes nowhere but into its folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from runner import build, compose
from runner.captures.manifest import captures
from runner.captures.opening import open_capture
from runner.checkpoint.manifest import sealed
from runner.errors import CheckpointError, NotVerified, RunnerError, SecurityError
from runner.jobs.replay import main
from runner.replay import script
from runner.replay.construction import model_code
from runner.replay.reopen import config_of

ROOT = Path(__file__).parents[2]
PLAIN = [
    "data=cancer", "model._target_=torch.nn.Linear", "+model.out_features=2",
    "optimization=none", "device.threads=2", "monitoring.progress=false",
]  # fmt: skip
CODE = "x=__import__('os').mkdir('ran'), y"  # as the name of an argument that any class takes
CALLED = {"_target_": "torch.nn.Identity", CODE: 1}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The capture of a healthy step, for which nobody needs to be trusted."""
    folder = tmp_path_factory.mktemp("kept")
    with build(compose(PLAIN), folder) as run:
        run.recorder.open(0)
        assert run.captures is not None
        run.captures.take(run, 1, "non_finite", "they said")
    return captures(folder)[0]


@pytest.fixture
def capture(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "replay").mkdir()
    return shutil.copytree(kept, tmp_path / "run/debug/captures" / kept.name)


def forge(capture: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the manifest with its digest, as an attacker would."""
    body = json.loads((capture / "manifest.json").read_text())
    del body["digest"]
    change(body)
    (capture / "manifest.json").write_bytes(sealed(body))


def replay(capture: Path, *overrides: str) -> None:
    main(
        compose(["job=replay", f"replay.path={capture}", "replay.attribute=false", *overrides]),
        Path("replay"),
    )


def named(body: dict[str, Any]) -> None:
    body["config"]["model"]["arguments"] = {"out_features": 2, "bias": CALLED}


def named_at_top(body: dict[str, Any]) -> None:
    body["config"]["objective"].update(_target_="torch.nn.MSELoss", arguments={CODE: 1})


def counted(body: dict[str, Any]) -> None:
    body["threads"] = "2), __import__('os').mkdir('ran'"


@pytest.mark.parametrize(
    ("change", "error", "code"),
    [(named, SecurityError, 3), (named_at_top, SecurityError, 3), (counted, CheckpointError, 5)],
)
def test_text_that_would_be_code_in_the_script_is_refused_before_anything_runs(
    change: Any, error: type[RunnerError], code: int, capture: Path
) -> None:
    forge(capture, change)
    before = sorted(Path().rglob("*"))
    with pytest.raises(error):
        replay(capture)
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "runner", "job=replay", f"replay.path={capture}"],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert sorted(Path().rglob("*")) == before


def test_the_script_too_refuses_a_name_that_is_no_name(capture: Path, tmp_path: Path) -> None:
    opened = open_capture(capture)
    config = config_of(opened)
    with build(config) as run:
        config.model.arguments = {"bias": CALLED}
        with pytest.raises(SecurityError, match="not the name of an argument"):
            model_code(config, run.sizes, tmp_path)


@pytest.mark.parametrize("link", ["file", "folder", "page"])
def test_the_page_is_written_through_no_link(link: str, capture: Path) -> None:
    Path("theirs").mkdir()
    theirs = Path("theirs/replay.md")
    if link == "file":
        theirs.write_text("precious")
        (capture / "replay.md").symlink_to(theirs.absolute())
    else:
        os.rename(capture, Path("theirs") / capture.name)
        moved = (Path("theirs") / capture.name).absolute()
        if link == "folder":
            capture.symlink_to(moved)
        else:  # of an earlier replay, which says where its capture is
            capture.mkdir()
            (capture / "replay.json").write_text(json.dumps({"capture": str(moved)}))
    before = sorted(Path("theirs").rglob("*"))
    with pytest.raises(NotVerified):
        replay(capture)
    assert sorted(Path("theirs").rglob("*")) == before
    if link == "file":
        assert theirs.read_text() == "precious"
        assert (capture / "replay.md").read_text() == Path("replay/replay.md").read_text()
        assert not (capture / "replay.md").is_symlink()


def test_names_in_a_capture_forge_no_lines_on_the_screen(
    capture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge(capture, lambda body: body.update(kind="exception", message="bad\x1b[2J\nverdict  well"))
    with pytest.raises(NotVerified):
        replay(capture)
    said = capsys.readouterr().out
    assert r"bad\x1b[2J" in said.replace("\n", "")
    assert "\x1b" not in said and "\nverdict" not in said


CHILDREN = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("child", "w").write(str(child.pid))
{then}
"""


@pytest.mark.parametrize("then", ["time.sleep(600)", "print('done')"])
def test_a_script_ends_with_all_that_it_started(then: str, tmp_path: Path) -> None:
    path = tmp_path / "reproduce.py"
    path.write_text(CHILDREN.format(then=then))
    hangs = "sleep" in then
    code, said = script.run_script(path, 3.0 if hangs else 60.0)
    assert (code, said) == ((None, "not done within 3 s") if hangs else (0, "done"))
    child = int((tmp_path / "child").read_text())
    end = time.monotonic() + 20.0
    while _lives(child):
        assert time.monotonic() < end


def _lives(process: int) -> bool:
    with suppress(OSError):
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat")  # one that nobody has waited for is dead too
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    return False
