"""No config key goes without a line in CHANGELOG.md that says what to do instead."""

import re
from pathlib import Path

from runner import compose
from runner.core.config.run_config import WrittenConfig

TESTS = Path(__file__).parent


def test_each_earlier_key_exists_or_stands_in_the_changelog_under_removed() -> None:
    """`earlier_keys.txt` has the keys of `--cfg job` of 2026-11-21 and later, without groups."""
    earlier = (TESTS / "earlier_keys.txt").read_text().split()
    keys = WrittenConfig(compose([])).flat().keys()
    gone = [key for key in earlier if not any(f"{x}.".startswith(f"{key}.") for x in keys)]
    missing = set(gone) - _removed_keys()
    assert not missing, "name each in CHANGELOG.md under Removed, with what to do instead"


def _removed_keys() -> set[str]:
    """Return the keys named under Removed; `.key` belongs to the group of the one before."""
    text = (TESTS.parent / "CHANGELOG.md").read_text()
    keys, group = set[str](), ""
    for section in re.findall(r"^### Removed\n(.*?)(?=^#)", text, re.M | re.S):
        for name in re.findall(r"`(\.?[a-z][\w.]*)(?:=[^`]*)?`", section):
            key = group + name if name.startswith(".") else name
            group = key.rpartition(".")[0]
            keys.add(key)
    return keys
