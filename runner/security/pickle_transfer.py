"""Objects for a process of our own: copied, where a pipe would share the memory of their tensors.

What is opened was packed by the parent of this process and came through its pipe.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from runner.errors import UsageError
from runner.record.text import shorten


def packed(parts: Mapping[str, Any]) -> bytes:
    """All of them; what they have in common stays so. UsageError names the one that cannot."""
    try:
        return pickle.dumps(dict(parts), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever a `__reduce__` of the user's raises
        raise UsageError(_refusal(parts, error)) from error


def opened(parcel: bytes) -> dict[str, Any]:
    """What `packed` was given. UsageError where its classes cannot be imported here."""
    try:
        found: dict[str, Any] = pickle.loads(parcel)  # noqa: S301  # our own parent's
    except (AttributeError, ImportError) as error:
        raise UsageError(
            f"what was given cannot be made in another process: {error}; put its class into a "
            "module (a .py file) and import it from there"
        ) from error
    return found


def _refusal(parts: Mapping[str, Any], error: Exception) -> str:
    name, cause = "what was given", error
    for part, value in parts.items():
        try:
            pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except Exception as own:
            name, cause = part, own
            break
    gist = shorten(str(cause), 300)
    return (
        f"{name} cannot be sent to another process ({type(cause).__name__}: {gist}): each arm has "
        "one of its own; use classes and functions that stand at the top of a module, no lambda, "
        "nested function, open file or lock"
    )
