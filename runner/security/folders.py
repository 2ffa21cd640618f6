"""Who else on this machine may read and change what a run writes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
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
        keep_within(folder)
        _close(folder)
        os.umask(os.umask(ALL_BUT_MINE) | ALL_BUT_MINE)
    return told


def keep_within(folder: Path, *names: str) -> None:
    """Raise SecurityError for a link in the folder, at any depth, that leads out of it.

    Also for what is neither a file nor a folder: reading it may never end. With `names` only links
    count, those in the paths of these names below it, and in what is there.

    A folder that is gone on with may be another's work, and what is written, renamed and deleted in
    it goes by name. A link within it, such as `last`, leads to nothing of others.
    """
    home = folder.resolve()
    for path in _inside(folder, names):
        leads_to = Path(os.path.realpath(path))
        if path.is_symlink() and not leads_to.is_relative_to(home):
            raise SecurityError(
                f"{path}: refused: it is a link that leads out of the folder that is worked in, to "
                f"{leads_to}; put there what it leads to, or remove it"
            )
        if not names and path.exists() and not (path.is_file() or path.is_dir()):
            raise SecurityError(f"{path}: refused: it is neither a file nor a folder; remove it")


def _close(folder: Path) -> None:
    """What is there already is for the owner alone, too."""
    folder.chmod(0o700)
    for path in _inside(folder):
        if not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~ALL_BUT_MINE)


def _inside(folder: Path, names: Sequence[str] = ()) -> Iterator[Path]:
    """All that lies in it, or what is called so and all in that, without going through links."""
    for name in names:
        place = folder / name
        yield from [above for above in place.parents if folder in above.parents]
        yield place
        yield from _inside(place)
    for parent, folders, files in os.walk(folder) if not names else ():
        for name in (*folders, *files):
            yield Path(parent) / name


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
