"""What tests of secrets share."""

from __future__ import annotations

import pytest

from runner import masking
from runner.security import secrets


@pytest.fixture
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """No value that was read before is hidden now, nor one of now afterwards."""
    monkeypatch.setattr(masking, "_spellings", {})
    monkeypatch.setattr(masking, "_pattern", None)
    for name in ("_shown", "_values"):
        monkeypatch.setattr(secrets, name, {})
