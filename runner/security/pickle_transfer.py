"""Objects for a process of our own: copied, where a pipe would share the memory of their tensors.

What is read was written by a process of our own: the parent, or a worker for its parent.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from runner.errors import UsageError
from runner.record.text import shorten


def packed(parts: Mapping[str, Any]) -> bytes:
    """All of them; what they have in common stays so. UsageError names the one that cannot."""
    parcel = _dumps(dict(parts))
    if isinstance(parcel, bytes):
        return parcel
    failures = ((name, _dumps(value)) for name, value in parts.items())
    first = ((name, error) for name, error in failures if isinstance(error, Exception))
    name, cause = next(first, ("what was given", parcel))
    raise UsageError(
        f"{name} cannot be sent to another process ({type(cause).__name__}: "
        f"{shorten(str(cause), 300)}): each arm has one of its own; use classes and functions "
        "that stand at the top of a module, no lambda, nested function, open file or lock"
    ) from cause


def _dumps(value: Any) -> bytes | Exception:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever a `__reduce__` of the user's raises
        return error


def opened(parcel: bytes) -> dict[str, Any]:
    """What `packed` was given. UsageError where its classes cannot be imported here."""
    try:
        parts: dict[str, Any] = pickle.loads(parcel)  # noqa: S301  # our own parent's
    except (AttributeError, ImportError) as error:
        raise UsageError(
            f"what was given cannot be made in another process: {error}; put its class into a "
            "module (a .py file) and import it from there"
        ) from error
    return parts


def dumps_outline(value: Any, outline: Callable[[Any], Any]) -> bytes:
    """`value` for `loads_outline`; what `outline` returns, unless None, stands for an object."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.persistent_id = outline  # type: ignore[method-assign]
    pickler.dump(value)
    return buffer.getvalue()


def loads_outline(parcel: bytes, fill: Callable[[Any], Any]) -> Any:
    """The value that a process of ours pickled; `fill` makes the objects that were outlined."""
    unpickler = pickle.Unpickler(io.BytesIO(parcel))  # noqa: S301  # our own
    unpickler.persistent_load = fill  # type: ignore[method-assign]
    return unpickler.load()
