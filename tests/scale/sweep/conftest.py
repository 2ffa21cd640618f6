"""Sweeps as people start them: real processes, in a folder with a package of the user's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.core.config.groups import CONF
from tests import runs

HERE = Path(__file__).parent
NET = ["model._target_=sweep_package.Net", "security.trusted=[sweep_package]"]
SHORT = ["data=cancer", "training.steps=5", "optimization=none", "device=cpu"]
TRAP = "from pathlib import Path\nPath('trapped').touch()\n"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(CONF.parent), str(HERE / "plugins")])}


def sweep(folder: Path, *typed: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = environment()["PYTHONPATH"]
    return runs.command(folder, "-m", *SHORT, *typed, PYTHONPATH=path, **variables)


def start_sweep(folder: Path, *typed: str) -> subprocess.Popen[str]:
    """A sweep that runs, in a session of its own; the file `console` has its output."""
    command = [sys.executable, "-m", "runner", "-m", *typed]
    with open(folder / "console", "a") as console:
        return subprocess.Popen(
            command, cwd=folder, env={**environment(), "OMP_NUM_THREADS": "1"}, text=True,
            stdout=console, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def own_folder(folder: Path) -> Path:
    """With the package, and with what somebody else might have left there for Hydra to run."""
    (folder / "sweep_package.py").write_text((HERE / "sweep_package.py").read_text())
    (folder / "hydra_plugins").mkdir()
    (folder / "hydra_plugins" / "trap.py").write_text(TRAP)
    return folder


def only(folder: Path) -> Path:
    """The one sweep in it."""
    (place,) = (folder / "outputs" / "sweeps").glob("*/*")
    return place


def read(folder: Path, name: str = "sweep.json") -> dict[str, Any]:
    return runs.read(folder, name)


def statuses(folder: Path) -> list[str]:
    return [job["status"] for job in read(folder)["jobs"]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return own_folder(tmp_path)
