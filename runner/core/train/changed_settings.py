"""Which settings differ between two runs. Imported where they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FREE_MAPPINGS = (
    *(f"{group}.arguments" for group in ("data", "model", "objective")),
    *("optimizer.options", "data.types", "data.date_formats"),
)
"""Keys below which a user adds keys; all others are of the schema."""
NOT_SET = "not set"
MAX_KEYS = 8  # in a message


def changed_settings(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    """Return the values, as text, of each key that differs, before and after.

    A user's key that one of them lacks is `NOT_SET` there. A key of the schema that one of them
    lacks is left out: another version or option of the program has it, with its default.
    """
    changed = {}
    for key in [*after, *(before.keys() - after.keys())]:
        is_users = key.startswith(tuple(f"{name}." for name in FREE_MAPPINGS))
        if is_users or key in before and key in after and key not in FREE_MAPPINGS:
            pair = str(before.get(key, NOT_SET)), str(after.get(key, NOT_SET))
            if pair[0] != pair[1]:
                changed[key] = pair
    return changed


def describe_changes(before: Mapping[str, str], after: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return what differs from a resumed run, for a message, and each key for the record."""
    changed = changed_settings(before, after)
    texts = [f"{key}={now} (was {was})" for key, (was, now) in changed.items()]
    more = f", and {len(texts) - MAX_KEYS} more" * (len(texts) > MAX_KEYS)
    return (", ".join(texts[:MAX_KEYS]) or "keys that its version did not have") + more, texts
