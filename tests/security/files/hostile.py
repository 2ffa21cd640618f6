"""All files that must be refused."""

from __future__ import annotations

from tests.security.files import (
    bombs,
    hostile_archives,
    hostile_calls,
    hostile_kinds,
    hostile_opcodes,
    malformed,
)
from tests.security.files.sample import Sample


def hostile() -> list[Sample]:
    """Those that would do something, and those that are made to mislead."""
    parts = (hostile_calls, hostile_opcodes, hostile_archives, hostile_kinds)
    return [sample for part in parts for sample in part.samples()]


def broken() -> list[Sample]:
    """Those that are damaged or do not keep to their format."""
    return malformed.samples()


def heavy() -> list[Sample]:
    """Those that ask for too much."""
    return bombs.samples()
