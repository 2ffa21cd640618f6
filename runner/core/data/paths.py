"""Files and folders that a user names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from runner.core.errors import ConfigError, SecurityError
from runner.core.format import join_names, nearest
from runner.core.schemas.security import SecurityLevel
from runner.core.security.files.policy import FilePolicy


def existing_path(path: str, key: str = "data.path") -> Path:
    """Return the file or folder `path`; raise a ConfigError that suggests similar names."""
    target = Path(os.path.expanduser(path))
    if target.is_file() or target.is_dir():
        return target
    if target.exists():
        raise ConfigError(key, f"{path} is a pipe, a socket or a device", "name a file")
    if str(target).startswith("~") and not target.parent.is_dir():
        raise ConfigError(key, f"the home folder in {path} is not known", "name the full path")
    folder = target.parent
    if not folder.is_dir():
        raise ConfigError(key, f"{path} does not exist, nor does its folder {folder.absolute()}")
    names = (p.name for p in folder.iterdir())
    near = suggestion(target.name, names, f"{folder.absolute()} has")
    raise ConfigError(key, f"{path} does not exist", near)


def suggestion(name: str, names: Iterable[str], introduction: str) -> str:
    """Return "did you mean …?" for a close name, else `introduction` and the first of `names`."""
    sorted_names = sorted(names)
    if near := nearest(name, sorted_names):
        return f"did you mean {near!r}?"
    return f"{introduction} {join_names(sorted_names, 10) if sorted_names else 'nothing'}"


def check_link(path: Path, root: Path, policy: FilePolicy | None) -> Path:
    """Return `path`; raise SecurityError for a symlink out of `root`, unless security=off."""
    if policy is not None and policy.level is SecurityLevel.off:
        return path
    if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
        problem = f"{path} is refused: symlink to {path.resolve()}, outside {root}"
        raise SecurityError(f"data.path: {problem}; copy the files there, or use security=off")
    return path
