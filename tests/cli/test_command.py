"""The command itself: answers, exit codes, sweeps, folders. Each test is one or two processes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from runner.core.config.groups import CONF, group_options
from runner.core.record.summary import Summary
from tests import runs

PACKAGE = """
import json, os, sys
from pathlib import Path

import runner
import torch

def frames():
    frame, found = sys._getframe(), []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(runner.__path__[0]):
            found.insert(0, f"{path.stem}.{frame.f_code.co_name}")
        frame = frame.f_back
    return found

class Net(torch.nn.Module):
    def __init__(self, in_features, classes, width=4, fail=False):
        super().__init__()
        if fail:
            raise ValueError("told to fail")
        self.width = width
        self.layer = torch.nn.Linear(in_features, classes)

    def forward(self, x):
        Path("frames.json").write_text(json.dumps(frames()))
        return self.layer(x.flatten(1))

class Fails(runner.Hook):
    def on_step(self, run, step):
        raise ValueError("told to fail")
"""


run = runs.command


@pytest.fixture(autouse=True)
def own_package(folder: Path) -> None:
    (folder / "own_package.py").write_text(PACKAGE)


def shell(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": str(CONF.parent), "PYTHON": sys.executable}
    command = ["bash", "-c", f"set -o pipefail; {line}"]
    return subprocess.run(command, cwd=folder, env=variables, text=True, capture_output=True)


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


def errors(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if not line.startswith("import time:")]


def test_help_names_every_option_and_imports_neither_torch_nor_hydra(folder: Path) -> None:
    done = run(folder, "--help", flags=("-X", "importtime"))
    assert done.returncode == 0
    for group, found in group_options().items():
        assert group in done.stdout
        for option, what in found.items():
            assert option in done.stdout and what in done.stdout
    for word in ("optimization_level=", "debug_mode=", "--cfg", "-m", "130"):
        assert word in done.stdout
    assert done.stdout.count("python -m runner") >= 6
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert not imported(done) & {"torch", "hydra", "omegaconf", "numpy", "rich"}


def test_a_typing_mistake_costs_no_torch_no_folder_and_one_line(folder: Path) -> None:
    done = run(folder, "optimisation=baisc", flags=("-X", "importtime"))
    assert done.returncode == 2
    (line,) = errors(done)
    assert line.startswith("error: optimisation: no config group or key 'optimisation'; did you")
    assert line.endswith("did you mean optimization=basic?")
    assert "omegaconf" in imported(done)
    assert not imported(done) & {"torch", "numpy", "hydra"}
    assert [path.name for path in folder.iterdir()] == ["own_package.py"]


def test_a_folder_of_plugins_and_a_shadow_of_a_library_are_not_run(folder: Path) -> None:
    trap = "from pathlib import Path\nPath('ran').touch()\n"
    (folder / "hydra_plugins").mkdir()
    (folder / "hydra_plugins" / "trap.py").write_text(trap)
    for name in ("yaml", "hydra", "omegaconf", "antlr4", "rich"):
        (folder / f"{name}.py").write_text(trap)
    assert run(folder, "seed=x").returncode == 2
    assert run(folder, "--cfg", "job").returncode == 0
    assert not (folder / "ran").exists()


def test_showing_a_config_ends_quietly_on_a_closed_pipe(folder: Path) -> None:
    done = shell(folder, "$PYTHON -m runner --cfg job | head -n 1")
    assert done.stdout.count("\n") == 1 and done.stderr == ""


@pytest.mark.parametrize("where", [pytest.param(">&-", marks=pytest.mark.slow), "| true"])
def test_a_finished_run_is_done_also_where_stdout_takes_nothing(folder: Path, where: str) -> None:
    done = shell(folder, f"$PYTHON -m runner training.steps=1 hydra.run.dir=outputs/one {where}")
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    assert runs.read(folder / "outputs/one")["status"] == "done"


def test_a_run_leaves_its_command_and_a_failure_its_code(folder: Path) -> None:
    typed = ["model._target_=own_package.Net", "security.trusted=[own_package]", "device=cpu",
             "training.steps=2", "monitoring=quiet"]  # fmt: skip
    done = run(folder, *typed, "+model.width=5")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and "digits-Net" not in done.stderr  # quiet: without the end table
    (made,) = (folder / "outputs" / "runs" / "digits-Net").iterdir()
    assert "+model.width=5" in (made / "summary.json").read_text()
    frames = json.loads((folder / "frames.json").read_text())
    between = frames[1 : frames.index("loop.train")]
    assert frames[0] == "__main__.<module>" and len(between) <= 6, between

    done = run(folder, *typed, "+model.fail=true")
    assert done.returncode == 1
    (line,) = errors(done)
    assert "ValueError: told to fail" in line and "own_package.py:" in line and "run.log" in line


def test_a_python_that_hydra_cannot_start_on_is_said_in_the_first_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from runner import __main__

    monkeypatch.setattr(__main__, "UNSUPPORTED_PYTHON", sys.version_info[:2])
    assert __main__.main() == 2
    assert "use Python 3.11, 3.12 or 3.13" in capsys.readouterr().err


def test_ctrl_c_before_the_run_begins_is_130_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from runner import __main__

    def interrupted(typed: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(__main__, "_main", interrupted)
    assert __main__.main() == 130
    assert "interrupted by Ctrl-C before the run started" in capsys.readouterr().err


@pytest.mark.parametrize("typed", [["job=doctor"], ["-m", "seed=0,1", "training.steps=1"]])
def test_a_folder_that_cannot_be_made_is_answered_with_the_key(
    typed: list[str], folder: Path
) -> None:
    (folder / "outputs").write_text("a file")
    done = run(folder, *typed)
    assert done.returncode == 5
    key = "hydra.sweep.dir" if "-m" in typed else "hydra.run.dir"
    assert f"set another folder: {key}=" in done.stderr


@pytest.mark.slow
def test_a_run_that_fails_keeps_its_exit_code_where_nothing_can_be_printed(folder: Path) -> None:
    hook = ["security.trusted=[own_package]", "+debug.hooks=[{_target_: own_package.Fails}]"]
    typed = [*runs.QUICK, *runs.TABLE, *hook, "hydra.run.dir=run"]
    done = shell(folder, f"$PYTHON -m runner {shlex.join(typed)} > /dev/full 2>&1")
    assert "told to fail" in Summary.read(folder / "run").reason
    assert done.returncode == 1
