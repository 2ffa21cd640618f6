"""What tests of several parts of measuring share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def parity_mutants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Techniques that are wrong (`parity_mutants`) can be named in a config."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "parity"))
