"""`python -m runner` as people type it, in a folder with a package of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
OWN = [
    "data._target_=own.Data", "model._target_=own.Net", "security.trusted=[own]", "device=cpu",
    "device.threads=1", "monitoring.progress=false",
]  # fmt: skip


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blackbox")
    for name in ("own.py", "faulty.py"):
        shutil.copy(HERE / name, folder)
    return folder
