"""`python -m runner` as people type it, in a folder with a package of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
OWN = [
    "data._target_=own.Data", "model._target_=own.Net", "security.trusted=[own]", "device=cpu",
    "device.threads=1", "monitoring.progress=false",
]  # fmt: skip

Done = subprocess.CompletedProcess[str]


def command(folder: Path, *typed: str, **variables: str) -> Done:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "runner", *typed],
        cwd=folder, env=environment | variables, text=True, capture_output=True, timeout=300,
    )  # fmt: skip


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blackbox")
    shutil.copy(HERE / "own.py", folder)
    return folder
