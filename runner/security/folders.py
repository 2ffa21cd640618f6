"""Who else on this machine may read and change what a run writes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.errors import SecurityError
from runner.security.config import SecurityLevel

OTHERS_WRITE = 0o002
ALL_BUT_MINE = 0o077


@contextmanager
def own_files() -> Iterator[None]:
    """While entered, nothing that is made can be written by everybody, whatever the umask says."""
    before = os.umask(OTHERS_WRITE)
    os.umask(before | OTHERS_WRITE)
    try:
        yield
    finally:
        os.umask(before)


def keep_private(folder: Path, level: SecurityLevel) -> list[str]:
    """Under strict a run's folder, and all that comes into it, is for its owner alone (0700).

    Else the umask decides, and what is worth a warning comes back. SecurityError under strict for
    a folder in which others can put something in the place of what a run wrote.
    """
    if level is SecurityLevel.off:
        return []
    open_to_all = [place for place in _places(folder) if _others_may_replace(place)]
    told = [
        f"{place} can be written by everybody on this machine, so checkpoints in it can be "
        f"replaced; chmod o-w {place}"
        for place in open_to_all
    ]
    if level is SecurityLevel.strict:
        if told:
            raise SecurityError(f"hydra.run.dir: {told[0]}")
        _close(folder)
        os.umask(os.umask(ALL_BUT_MINE) | ALL_BUT_MINE)
    return told


def _close(folder: Path) -> None:
    """What is there already is for the owner alone, too.

    A folder that is resumed may be another's work: nothing in it leads elsewhere.
    """
    home = folder.resolve()
    folder.chmod(0o700)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent) / name
            if path.is_symlink() and not path.resolve().is_relative_to(home):
                raise SecurityError(
                    f"{path}: refused: it is a link that leads out of the run's folder; remove it, "
                    "or use security=standard"
                )
            if not path.is_symlink():
                path.chmod(stat.S_IMODE(path.stat().st_mode) & ~ALL_BUT_MINE)


def _places(folder: Path) -> list[Path]:
    """The folder and those above it that are ours: up to the current one, else one further."""
    folder, here = folder.absolute(), Path.cwd()
    if not folder.is_relative_to(here):
        return [folder, folder.parent]
    return [place for place in (folder, *folder.parents) if place.is_relative_to(here / "")][:-1]


def _others_may_replace(place: Path) -> bool:
    """In a folder with the sticky bit, such as /tmp, only owners rename and remove."""
    try:
        mode = place.stat().st_mode
    except OSError:
        return False
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX
