"""Each test and proof that docs/measured/faults.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_fault_has_a_test_or_a_proof_that_exists() -> None:
    rows = re.findall(r"^\| (\d+) \|.*`([^`]+)` \|$", _text(), re.M)
    assert [int(number) for number, _ in rows] == [*range(1, 69)]
    missing = [named for _, named in rows if not _exists(named)]
    assert missing == []


def test_the_guarantees_of_security_name_tests_that_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)`", _text().partition("\n## Security\n")[2])
    assert len(named) > 15
    assert [name for name in named if not (ROOT / "tests" / name).is_file()] == []


def _text() -> str:
    return (ROOT / "docs" / "measured" / "faults.md").read_text()


def _exists(named: str) -> bool:
    if "::" not in named:
        return (ROOT / "scripts" / named.split()[0]).exists()
    path, _, function = named.partition("::")
    return f"def {function}(" in (ROOT / "tests" / path).read_text()
