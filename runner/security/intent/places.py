"""Where a run may write: under the output root, unless somebody typed another place."""

from __future__ import annotations

import os
from pathlib import Path

from runner.errors import SecurityError

ROOTS = ("outputs", "multirun")  # the second one is Hydra's own, for configs that name no other


def roots() -> list[Path]:
    """Where everything is written: in the current folder, wherever they lead."""
    return [Path(os.path.realpath(name)) for name in ROOTS]


def check_place(key: str, value: object, allowed: tuple[Path, ...] = ()) -> None:
    """Raise SecurityError for a path that leads out of the output root and of `allowed`.

    Symbolic links are followed, those on the way too.
    """
    text = str(value)
    try:
        path = Path(os.path.realpath(text))
    except (OSError, ValueError) as error:
        raise SecurityError(f"{key}: {text!r} is no path: {error}") from error
    if any(path.is_relative_to(folder) for folder in (*roots(), *allowed)):
        return
    where = f", which is {path}" if str(path) != text else ""
    raise SecurityError(
        f"{key}: {text}{where} is refused: a config writes nothing outside {roots()[0]}; "
        f"if you mean it, type {key}=…"
    )


def typed_place(text: str) -> Path | None:
    """The folder that a typed path lies in for certain, whatever its references come to.

    None where all of it is a reference.
    """
    fixed = text.partition("${")[0]
    if fixed == text:
        return Path(os.path.realpath(text))
    folder = fixed.rpartition("/")[0] if "/" in fixed else ""
    if fixed.startswith("/"):
        folder = folder or "/"
    return Path(os.path.realpath(folder)) if folder else None
