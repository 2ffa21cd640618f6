"""The option of which an optimizer's constructor complains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def find_wrong_option(
    make: Callable[..., Any], arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> str | None:
    """Return the option without which the constructor does not raise the same error, if any."""
    error = _error_of(make, arguments)
    for option in options:
        others = {name: value for name, value in arguments.items() if name != option}
        if _error_of(make, others) != error:
            return option
    return None


def _error_of(make: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    try:
        make(**arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return ""
