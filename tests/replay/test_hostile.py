"""A capture that somebody made by hand: it runs nothing, and writes nowhere but into its folder."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner import build, compose
from runner.captures.manifest import captures
from runner.checkpoint.manifest import sealed
from runner.errors import CheckpointError, NotVerified, RunnerError, SecurityError
from runner.jobs.replay import main
from runner.replay.investigation import write_script

ROOT = Path(__file__).parents[2]
PLAIN = (
    "data=cancer model._target_=torch.nn.Linear +model.out_features=2 "
    "optimization=none device.threads=2 monitoring.progress=false"
).split()
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
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == code, done.stderr
    assert sorted(Path().rglob("*")) == before


def test_text_of_a_capture_is_a_string_in_the_script(capture: Path, tmp_path: Path) -> None:
    hostile = ['"""\n' + CODE, "'); " + CODE + "#", "{0}{finding}\\"]
    for text in hostile:
        path = write_script(tmp_path, capture / text, text, [text], [text])
        tree = ast.parse(path.read_text())
        calls = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        assert calls == {
            "sys.exit",
            "open_capture",
            "Path",
            "len",
            "reopened",
            "make_attempt",
            "print",
        }
        assert text in {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}


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
