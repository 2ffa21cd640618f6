"""Checks of the folder that a caller of the library names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from runner.core.errors import UsageError


def check_folder(caller: str, folder: Any) -> Path:
    """Return the folder as a path; UsageError for what cannot be one."""
    if not isinstance(folder, str | os.PathLike):
        raise UsageError(f"{caller}: folder must be a path, got {folder!r}")
    text = os.fspath(folder)
    if not isinstance(text, str) or not text or "\0" in text:
        raise UsageError(f"{caller}: folder must be the name of a folder, got {folder!r}")
    path = Path(text)
    try:
        nearest = next(part for part in (path, *path.parents, Path()) if part.exists())
    except OSError as error:  # too long a name
        raise UsageError(f"{caller}: folder={text}: {error.strerror}") from None
    if not nearest.is_dir():
        raise UsageError(f"{caller}: folder={text}: {nearest} is a file; name a folder")
    return path
