"""Earlier names of modules, the table by which rooms reach each other, and a missing room."""

import shutil
import subprocess
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from runner import rooms
from tests.runs import python

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("earlier", rooms.MOVED)
def test_a_module_has_its_earlier_name_too(earlier: str) -> None:
    assert import_module(earlier) is import_module(rooms.MOVED[earlier])


def test_only_earlier_names_in_the_list_are_forwarded() -> None:
    assert find_spec("runner.objectives") is not None
    assert find_spec("runner.objectives.classification") is None
    assert find_spec("runner.training") is None


def test_replay_step_has_its_earlier_name_too() -> None:
    from runner.library.stability import replay_step as earlier  # type: ignore[import-not-found]

    from runner.diagnose.replay.step import replay_step

    assert earlier is replay_step


@pytest.mark.parametrize("kind, name", [(k, name) for k, v in rooms.NAMES.items() for name in v])
def test_every_name_of_the_table_is_found(kind: str, name: str) -> None:
    assert callable(rooms.find(kind, name))


@pytest.mark.parametrize(
    "room, typed, needed_by",
    [
        ("scan", "job=scan scan.path=x", "job=scan"),
        ("measure", "job=benchmark", "job=benchmark"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (
            ("datasets", "data=tabular data.path=x.csv data.target=y", "data=tabular"),
            ("diagnose", "job=doctor", "job=doctor"),
            ("scale", "distributed=ddp", "distributed=ddp"),
            ("scale", "-m seed=1,2", "a sweep (-m)"),
            ("loops", "-m optimization=none,basic sweep.benchmark_s=1 training.steps=2", ""),
        )),
    ],
)  # fmt: skip
def test_a_missing_room_is_named_and_the_rest_works(
    room: str, typed: str, needed_by: str, tmp_path: Path
) -> None:
    for name in ("conf", "runner"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "runner" / room)
    (tmp_path / "x.csv").write_text("a,y\n" + "".join(f"{i},{i % 2}\n" for i in range(40)))

    def run(*overrides: str) -> subprocess.CompletedProcess[str]:
        command = ("-P", "-m", "runner", "device=cpu", *overrides)
        return python(*command, folder=tmp_path, PYTHONPATH=str(tmp_path))

    refused = run(*typed.split())
    if needed_by:
        assert refused.returncode == 2
        assert refused.stderr.splitlines()[-1].endswith(f"{needed_by} needs runner.{room}")
    else:  # nothing of the command line needs it
        assert refused.returncode == 0, refused.stderr
    trained = run("training.steps=2", "optimization=none")
    assert trained.returncode == 0, trained.stderr
    assert ("needs runner.measure" in trained.stderr) == (room == "measure")
