"""Code of a user's own beside the tests, runs that are captured once, attempts in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.diagnose.replay import job
from tests.diagnose.replay.replays import HERE, Captured, capture_first


@pytest.fixture(autouse=True)
def _own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts are made in this process, which takes a tenth of the time."""

    def attempt(path: Path, trusted: Any, limit_s: float, log: Path, without: Any) -> Any:
        return job.make_captured_attempt(path, trusted, without)

    monkeypatch.setattr(job, "attempt_in_process", attempt)


@pytest.fixture(scope="session")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    made: dict[tuple[str, ...], Path] = {}

    def make(*overrides: str) -> Path:
        if overrides not in made:
            made[overrides] = capture_first(tmp_path_factory.mktemp("run"), *overrides)
        return made[overrides]

    return make
