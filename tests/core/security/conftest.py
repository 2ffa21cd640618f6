"""What tests of secrets share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runner.core import masking
from runner.core.security import secrets
from runner.scan.sandbox import Sandbox
from tests import shared_sandbox


@pytest.fixture(autouse=True)
def _sandbox_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the process that examines files starts and ends as it does for users."""
    for name, original in shared_sandbox.ORIGINAL.items():
        monkeypatch.setattr(Sandbox, name, original)


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """One process for the files of all tests: it takes seconds to start."""
    with Sandbox() as opened:
        yield opened


@pytest.fixture
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """No value that was read before is hidden now, nor one of now afterwards."""
    monkeypatch.setattr(masking, "_variable_by_text", {})
    monkeypatch.setattr(masking, "_pattern", None)
    for name in ("_masked_by_key", "_values"):
        monkeypatch.setattr(secrets, name, {})
