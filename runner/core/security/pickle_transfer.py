"""Pickle objects for processes of our own, copying tensors instead of sharing their memory.

Only data written by our own parent or worker is unpickled.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from runner.core.errors import UsageError
from runner.core.record.text import shorten


def pickle_parts(parts: Mapping[str, Any]) -> bytes:
    """Pickle all parts together, keeping shared objects. UsageError names a part that fails."""
    data = _dumps(dict(parts))
    if isinstance(data, bytes):
        return data
    failures = ((name, _dumps(value)) for name, value in parts.items())
    first = ((name, error) for name, error in failures if isinstance(error, Exception))
    name, cause = next(first, ("an argument", data))
    problem = f"{name} cannot be sent to another process ({type(cause).__name__}: "
    fix = "use classes and functions of a module, no lambda, nested function, open file or lock"
    raise UsageError(f"{problem}{shorten(str(cause), 300)}); {fix}") from cause


def _dumps(value: Any) -> bytes | Exception:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # any exception of a user's `__reduce__`
        return error


def unpickle_parts(data: bytes) -> dict[str, Any]:
    """Unpickle the parts of `pickle_parts`. UsageError if a class cannot be imported."""
    try:
        parts: dict[str, Any] = pickle.loads(data)  # noqa: S301  # our own parent's
    except (AttributeError, ImportError) as error:
        fix = "move its class to a module (a .py file) and import it from there"
        problem = f"an argument cannot be rebuilt in another process: {error}"
        raise UsageError(f"{problem}; {fix}") from error
    return parts


def dumps_persistent(value: Any, persistent_id: Callable[[Any], Any]) -> bytes:
    """Pickle for `loads_persistent`; a non-None result of `persistent_id` replaces an object."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.persistent_id = persistent_id  # type: ignore[method-assign]
    pickler.dump(value)
    return buffer.getvalue()


def loads_persistent(data: bytes, persistent_load: Callable[[Any], Any]) -> Any:
    """Unpickle a value of `dumps_persistent`; `persistent_load` restores the replaced objects."""
    unpickler = pickle.Unpickler(io.BytesIO(data))  # noqa: S301  # our own
    unpickler.persistent_load = persistent_load  # type: ignore[method-assign]
    return unpickler.load()
