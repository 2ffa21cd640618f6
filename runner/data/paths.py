"""Files and folders that a user names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path

from runner.errors import ConfigError, SecurityError
from runner.security.config import SecurityLevel
from runner.security.files.policy import FilePolicy


def existing(path: str, key: str = "data.path") -> Path:
    """The file or folder `path`, or a ConfigError that suggests what lies beside it."""
    found = Path(path).expanduser()
    if found.is_file() or found.is_dir():
        return found
    if found.exists():
        what = "is a pipe, a socket or a device, which can be read only once"
        raise ConfigError(key, f"{path} {what}", "name a file")
    folder = found.parent
    if not folder.is_dir():
        raise ConfigError(key, f"{path} is not there, nor is its folder {folder.absolute()}")
    raise ConfigError(
        key,
        f"{path} is not there",
        suggestion(found.name, (p.name for p in folder.iterdir()), f"{folder.absolute()} has"),
    )


def suggestion(name: str, known: Iterable[str], has: str) -> str:
    """The nearest of the `known` names, else all of them after the word `has`."""
    names = sorted(known)
    near = get_close_matches(name, names, 1)
    if near:
        return f"did you mean {near[0]!r}?"
    listed = ", ".join(names[:10]) + (f", … ({len(names)} in all)" if len(names) > 10 else "")
    return f"{has} {listed}" if names else f"{has} nothing"


def check_link(path: Path, root: Path, policy: FilePolicy | None) -> Path:
    """`path`; SecurityError if it is a link out of the data folder `root`, unless security=off."""
    if policy is not None and policy.level is SecurityLevel.off:
        return path
    if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
        raise SecurityError(
            f"data.path: {path} is refused: it is a link to {path.resolve()}, outside of {root}; "
            "copy the files there, or follow links with security=off"
        )
    return path


def class_files(root: Path, policy: FilePolicy | None) -> dict[Path, list[Path]]:
    """The folders in `root`, one for each class, and their files at any depth, sorted by name.

    SecurityError for a link out of `root`.
    """
    folders = _inside(root, root.iterdir(), policy, Path.is_dir)
    if len(folders) < 2:
        raise ConfigError(
            "data.path",
            f"{root} has {len(folders)} folders in it",
            "put the files of each class into a folder with the class's name, two or more of them",
        )
    return {f: _inside(root, f.rglob("*"), policy, Path.is_file) for f in folders}


def _inside(
    root: Path, paths: Iterable[Path], policy: FilePolicy | None, kind: Callable[[Path], bool]
) -> list[Path]:
    shown = (path for path in paths if kind(path) and not path.name.startswith("."))
    return sorted(check_link(path, root, policy) for path in shown)
