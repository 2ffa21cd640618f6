"""Restrict where a run may write: under the output roots unless another path is typed.

Also restricts who else on this machine may read and change its files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from runner.core.errors import SecurityError
from runner.core.schemas.security import SecurityLevel

OUTPUT_ROOTS = ("outputs", "multirun")  # the second is Hydra's default
OTHERS_WRITE = 0o002
GROUP_AND_OTHERS = 0o077


class _RunOrigin(NamedTuple):
    resumed_folder: Path | None
    folder_typed: bool  # whether the output folder was typed
    output_roots: list[Path]  # output roots, relative to the original current folder


_run_origin: ContextVar[_RunOrigin | None] = ContextVar("_run_origin", default=None)


def output_roots() -> list[Path]:
    """Return the resolved output roots of the current folder."""
    return [Path(os.path.realpath(name)) for name in OUTPUT_ROOTS]


@contextmanager
def distrust_resumed_folder(folder: Path | None, chosen: bool = True) -> Iterator[None]:
    """While entered, `folder` is that of a resumed run, which is not trusted.

    `chosen=False`: nor is the folder of a resumed sweep's job. The output roots are resolved now,
    in case a job changes the current folder.
    """
    token = _run_origin.set(_RunOrigin(folder and folder.resolve(), chosen, output_roots()))
    try:
        yield
    finally:
        _run_origin.reset(token)


def run_tree_folders(folder: Path | None) -> list[Path]:
    """Return the folders of this run tree, in which files count as written by us.

    These are the output roots and, for a run in a typed folder, the nearest `outputs` above it, or
    the folder itself; but not that of a run or sweep resumed by path, which may be anyone's.
    """
    origin = _run_origin.get() or _RunOrigin(None, True, output_roots())
    if folder is None or not origin.folder_typed or folder.resolve() == origin.resumed_folder:
        return origin.output_roots
    path = folder.absolute()
    outputs = (parent for parent in (path, *path.parents) if parent.name == "outputs")
    return [*origin.output_roots, next(outputs, path)]


def check_output_path(
    key: str, value: object, allowed: Sequence[Path] = (), strict: bool = False
) -> None:
    """Raise SecurityError if the resolved path lies outside the output roots and `allowed`."""
    text = str(value)
    try:
        path = Path(os.path.realpath(text))
    except (OSError, ValueError) as error:
        raise SecurityError(f"{key}: {text!r} is not a valid path: {error}") from error
    roots = (*output_roots(), *(Path(os.path.realpath(f)) for f in allowed))
    if any(path.is_relative_to(folder) for folder in roots):
        return
    where = f", which is {path}" if str(path) != text else ""
    who = "security=strict" if strict else "a config"
    fix = "use a folder in there" if strict else f"if you mean it, type {key}=…"
    problem = f"{who} may only write below {output_roots()[0]}"
    raise SecurityError(f"{key}: {text}{where} is refused: {problem}; {fix}")


def check_subfolder(key: str, inner: str, folder: Path) -> None:
    """Raise SecurityError unless the resolved path `inner` lies strictly below `folder`."""
    root, path = (os.path.realpath(place) for place in (folder, folder / inner))
    if root not in (str(parent) for parent in Path(path).parents):
        is_link = (folder / inner).is_symlink()
        problem = f"a link, to {path}" if is_link else "the name of a job's folder"
        raise SecurityError(f"{key}: {inner} is refused: in {folder} it is {problem}")


@contextmanager
def restrict_umask() -> Iterator[None]:
    """While entered, new files are not writable by others, whatever the umask."""
    previous = os.umask(OTHERS_WRITE)
    os.umask(previous | OTHERS_WRITE)
    try:
        yield
    finally:
        os.umask(previous)


def restrict_run_folder(folder: Path, level: SecurityLevel) -> list[str]:
    """Under strict, restrict a run's folder and its content to the owner (0700).

    Otherwise return warnings for folders in which others can replace the run's files; under strict
    these raise SecurityError.
    """
    if level is SecurityLevel.off:
        return []
    absolute, current = folder.absolute(), Path.cwd()
    parents = [absolute, absolute.parent]
    if absolute.is_relative_to(current):
        parents = [p for p in (absolute, *absolute.parents) if p.is_relative_to(current)][:-1]
    warnings = [
        f"{parent} is writable by every user, who could replace checkpoints in it; "
        f"chmod o-w {parent}"
        for parent in parents
        if _others_may_replace(parent)
    ]
    if level is SecurityLevel.strict:
        if warnings:
            raise SecurityError(f"hydra.run.dir: {warnings[0]}")
        check_links(folder)
        folder.chmod(0o700)
        for path in _walk_paths(folder):
            if not path.is_symlink():
                path.chmod(stat.S_IMODE(path.stat().st_mode) & ~GROUP_AND_OTHERS)
        os.umask(os.umask(GROUP_AND_OTHERS) | GROUP_AND_OTHERS)
    return warnings


def check_links(folder: Path, *names: str) -> None:
    """Raise SecurityError for a link out of the folder, at any depth, and for special files.

    With `names` only links count, on the paths of these names and in their content. A resumed
    folder may be another user's, and files in it are written, renamed and deleted by name.
    """
    root = folder.resolve()
    for path in _paths_of(folder, names) if names else _walk_paths(folder):
        target = Path(os.path.realpath(path))
        if path.is_symlink() and not target.is_relative_to(root):
            problem = f"it is a link out of the working folder, to {target}"
            raise SecurityError(f"{path}: refused: {problem}; replace or remove it")
        if not names and path.exists() and not (path.is_file() or path.is_dir()):
            raise SecurityError(f"{path}: refused: it is neither a file nor a folder; remove it")


def _paths_of(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    for path in (folder / name for name in names):
        yield from [parent for parent in path.parents if folder in parent.parents]
        yield path
        yield from _walk_paths(path)


def _walk_paths(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent) / name for name in (*folders, *files))


def _others_may_replace(folder: Path) -> bool:
    """Whether others may write to it and rename files: it has no sticky bit."""
    try:
        mode = folder.stat().st_mode
    except OSError:
        return False
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX
