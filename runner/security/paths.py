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

from runner.errors import SecurityError
from runner.security.config import SecurityLevel

ROOTS = ("outputs", "multirun")  # the second is Hydra's default
OTHERS_WRITE = 0o002
ALL_BUT_MINE = 0o077


class _Started(NamedTuple):
    resumed: Path | None
    chosen: bool  # whether the output folder was typed
    own: list[Path]  # output roots, relative to the original current folder


_started: ContextVar[_Started | None] = ContextVar("_started", default=None)


def roots() -> list[Path]:
    """Return the resolved output roots of the current folder."""
    return [Path(os.path.realpath(name)) for name in ROOTS]


@contextmanager
def resumed_at(folder: Path | None, chosen: bool = True) -> Iterator[None]:
    """While entered, `folder` is that of a resumed run, which is not trusted.

    `chosen=False`: nor is the folder of a resumed sweep's job. The output roots are resolved now,
    in case a job changes the current folder.
    """
    token = _started.set(_Started(folder and folder.resolve(), chosen, roots()))
    try:
        yield
    finally:
        _started.reset(token)


def own_trees(folder: Path | None) -> list[Path]:
    """Return the folders of this run tree, in which files count as written by us.

    These are the output roots and, for a run in a typed folder, the nearest `outputs` above it, or
    the folder itself. A run or sweep resumed by path may be anyone's, so its folder is not
    included.
    """
    started = _started.get() or _Started(None, True, roots())
    if folder is None or not started.chosen or folder.resolve() == started.resumed:
        return started.own
    place = folder.absolute()
    return [*started.own, next((p for p in (place, *place.parents) if p.name == "outputs"), place)]


def check_place(
    key: str, value: object, allowed: Sequence[Path] = (), strict: bool = False
) -> None:
    """Raise SecurityError if the resolved path lies outside the output roots and `allowed`."""
    text = str(value)
    try:
        path = Path(os.path.realpath(text))
    except (OSError, ValueError) as error:
        raise SecurityError(f"{key}: {text!r} is not a valid path: {error}") from error
    if any(path.is_relative_to(folder) for folder in (*roots(), *allowed)):
        return
    where = f", which is {path}" if str(path) != text else ""
    who = "security=strict" if strict else "a config"
    way = "use a folder in there" if strict else f"if you mean it, type {key}=…"
    raise SecurityError(
        f"{key}: {text}{where} is refused: {who} may only write below {roots()[0]}; {way}"
    )


def check_below(key: str, inner: str, folder: Path) -> None:
    """Raise SecurityError unless the resolved path `inner` lies strictly below `folder`."""
    home, path = (os.path.realpath(one) for one in (folder, folder / inner))
    if home not in (str(parent) for parent in Path(path).parents):
        raise SecurityError(
            f"{key}: {inner} is refused: it is the name of a job's folder in {folder}"
        )


@contextmanager
def own_files() -> Iterator[None]:
    """While entered, new files are not world-writable, whatever the umask."""
    before = os.umask(OTHERS_WRITE)
    os.umask(before | OTHERS_WRITE)
    try:
        yield
    finally:
        os.umask(before)


def keep_private(folder: Path, level: SecurityLevel) -> list[str]:
    """Under strict, restrict a run's folder and its content to the owner (0700).

    Otherwise return warnings for folders in which others can replace the run's files; under strict
    these raise SecurityError.
    """
    if level is SecurityLevel.off:
        return []
    warnings = [
        f"{place} is writable by every user, who could replace checkpoints in it; chmod o-w {place}"
        for place in _parents_of_ours(folder)
        if _others_may_replace(place)
    ]
    if level is SecurityLevel.strict:
        if warnings:
            raise SecurityError(f"hydra.run.dir: {warnings[0]}")
        keep_within(folder)
        folder.chmod(0o700)
        for path in _files_in(folder):
            if not path.is_symlink():
                path.chmod(stat.S_IMODE(path.stat().st_mode) & ~ALL_BUT_MINE)
        os.umask(os.umask(ALL_BUT_MINE) | ALL_BUT_MINE)
    return warnings


def keep_within(folder: Path, *names: str) -> None:
    """Raise SecurityError for a link in the folder, at any depth, that leads out of it.

    Also for special files, since reading one may block. With `names` only links count: those on the
    paths of these names below the folder, and in their content. A resumed folder may be another
    user's, and files in it are written, renamed and deleted by name.
    """
    home = folder.resolve()
    for path in _named_in(folder, names) if names else _files_in(folder):
        target = Path(os.path.realpath(path))
        if path.is_symlink() and not target.is_relative_to(home):
            raise SecurityError(
                f"{path}: refused: it is a link out of the working folder, to "
                f"{target}; replace it by its target, or remove it"
            )
        if not names and path.exists() and not (path.is_file() or path.is_dir()):
            raise SecurityError(f"{path}: refused: it is neither a file nor a folder; remove it")


def _named_in(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    for place in (folder / name for name in names):
        yield from [parent for parent in place.parents if folder in parent.parents]
        yield place
        yield from _files_in(place)


def _files_in(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent) / name for name in (*folders, *files))


def _parents_of_ours(folder: Path) -> list[Path]:
    """Return the folder and its parents below the current one; outside it, folder and parent."""
    folder, current = folder.absolute(), Path.cwd()
    if not folder.is_relative_to(current):
        return [folder, folder.parent]
    return [place for place in (folder, *folder.parents) if place.is_relative_to(current)][:-1]


def _others_may_replace(place: Path) -> bool:
    """Whether it is world-writable without the sticky bit, so that others may rename files."""
    try:
        mode = place.stat().st_mode
    except OSError:
        return False
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX
