"""A capture that somebody made by hand: it runs nothing, and writes nowhere but into its folder."""

import ast
import shutil
from pathlib import Path
from typing import Any

import pytest

from runner import compose
from runner.core.captures.manifest import list_captures, read_manifest
from runner.core.config.composing import config_from_plain
from runner.core.errors import CheckpointError, NotVerified, RunnerError, SecurityError
from runner.diagnose.replay.investigation import write_script
from runner.diagnose.replay.job import main
from tests import runs
from tests.core.checkpoint.test_checkpoint_damage import forge

PLAIN = (
    "data=cancer model._target_=torch.nn.Linear +model.out_features=2 optimization=none"
).split()
CODE = "x=__import__('os').mkdir('ran'), y"  # as the name of an argument that any class takes
CALLED = {"_target_": "torch.nn.Identity", CODE: 1}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The capture of a healthy step, for which nobody needs to be trusted."""
    folder = tmp_path_factory.mktemp("kept")
    with runs.opened(*PLAIN, folder=folder) as run:
        run.recorder.open(0)
        assert run.captures is not None
        run.captures.take(run, 1, "non_finite", "they said")
    return list_captures(folder)[0]


@pytest.fixture
def capture(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "replay").mkdir()
    return shutil.copytree(kept, tmp_path / "run/debug/captures" / kept.name)


def replay(capture: Path, *overrides: str) -> None:
    main(
        compose(["job=replay", f"replay.path={capture}", "replay.attribute=false", *overrides]),
        Path("replay"),
    )


CHANGES: list[tuple[Any, type[RunnerError]]] = [
    (
        lambda body: body["config"]["model"].update(arguments={"out_features": 2, "bias": CALLED}),
        SecurityError,
    ),
    (
        lambda body: body["config"]["objective"].update(
            _target_="torch.nn.MSELoss", arguments={CODE: 1}
        ),
        SecurityError,
    ),
    (lambda body: body["config"]["optimizer"].update(options={CODE: 1}), SecurityError),
    (lambda body: body.update(threads="2), __import__('os').mkdir('ran'"), CheckpointError),
]


@pytest.mark.parametrize(("change", "error"), CHANGES)
def test_text_that_would_be_code_in_the_script_is_refused_before_anything_runs(
    change: Any, error: type[RunnerError], capture: Path
) -> None:
    forge(capture, change)
    before = sorted(Path().rglob("*"))
    with pytest.raises(error):
        replay(capture)
    assert sorted(Path().rglob("*")) == before


def test_the_command_refuses_it_too_and_leaves_nothing(capture: Path) -> None:
    forge(capture, CHANGES[0][0])
    before = sorted(Path().rglob("*"))
    done = runs.command(Path(), "job=replay", f"replay.path={capture}")
    assert done.returncode == SecurityError.exit_code == 3, done.stderr
    assert sorted(Path().rglob("*")) == before


def test_a_mapping_that_is_an_argument_may_have_any_keys(capture: Path) -> None:
    config = read_manifest(capture).config
    config["model"]["arguments"]["names"] = {"a b": 1}
    assert config_from_plain(config).model.arguments["names"] == {"a b": 1}


def test_text_of_a_capture_is_a_string_in_the_script(capture: Path, tmp_path: Path) -> None:
    for text in ['"""\n' + CODE, "'); " + CODE + "#", "{0}{finding}\\"]:
        tree = ast.parse(write_script(tmp_path, capture / text, text, [text], [text]).read_text())
        calls = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        assert calls == {"open_capture", "reopen_run", "make_attempt"} | {
            *("sys.exit", "Path", "len", "print", "os.chdir", "Path(sys.argv[1]).absolute")
        }
        assert text in {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}


@pytest.mark.usefixtures("here")
def test_names_in_a_capture_forge_no_lines_on_the_screen(
    capture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge(capture, lambda body: body.update(kind="exception", message="bad\x1b[2J\nverdict  well"))
    with pytest.raises(NotVerified):
        replay(capture)
    screen = capsys.readouterr().out
    assert r"bad\x1b[2J" in screen.replace("\n", "")
    assert "\x1b" not in screen and "\nverdict" not in screen
