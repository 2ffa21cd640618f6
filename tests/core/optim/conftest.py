"""What tests of optimizers share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own optimizers and models of this folder can be imported."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
