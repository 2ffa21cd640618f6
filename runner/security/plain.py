"""Configs from files: their names and values are data, and stay data.

What a run was composed of is resolved and holds no code. One that was made by hand might: the name
of an argument is put into a script and into Hydra's language, where it could be anything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from keyword import iskeyword
from typing import Any

from runner.errors import SecurityError
from runner.security.secrets import STANDS


def check_name(name: Any, key: str) -> str:
    """The name of an argument or of a key, if it is no more than that; `key` is what it stands in.

    Raises SecurityError.
    """
    if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
        raise SecurityError(
            f"{key}: {name!r} is refused: it is not the name of an argument, and could be code; "
            "somebody may have made that file by hand"
        )
    return name


def check_plain(
    value: Any, key: str = "", free: bool = False, may_read: Collection[str] | None = ()
) -> None:
    """Raise SecurityError where a key cannot be a name, or a value asks to be worked out.

    Below an argument (`free`) a mapping is a value, whose keys may be any text, unless its
    `_target_` makes a call of it. `${oc.env:NAME}` stands in a capture for what was not to be
    written; it may be read where NAME is in `may_read` (None: any).
    """
    if isinstance(value, Mapping):
        called = not free or "_target_" in value
        free = free or key.endswith(".arguments") or key.startswith("debug.hooks.")
        for name, inner in value.items():
            if called:
                check_name(name, key or "config")
            check_plain(name, key, free)
            check_plain(inner, f"{key}.{name}" if key else str(name), free, may_read)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            check_plain(inner, f"{key}.{i}", free, may_read)
    elif isinstance(value, str) and "${" in STANDS.sub("", value):  # could be anything
        raise SecurityError(f"{key}: {value!r} is refused: it stands for another value")
    elif isinstance(value, str) and may_read is not None:
        for name in STANDS.findall(value):
            if name not in may_read:
                raise SecurityError(
                    f"{key}: {value!r} is refused: it stands for a variable's value; if it may be "
                    f"read, add security.environment=[{name}]"
                )
