"""Code of a user's own, and one run with two captures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnose.captures.captured_runs import SKIPPED, Taker, trained

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.syspath_prepend(HERE.parents[1])


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with captures of step 13, after which weights moved on, and of 17, after which not."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        patch.syspath_prepend(HERE.parents[1])
        trained(folder, Taker([13, 17], SKIPPED))
    return folder
