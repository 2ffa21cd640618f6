"""Files of libraries that open them by name: in a new folder, or only where there is no link."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.core.record.storage import link_refusal, open_folder, remove_folder, rename


@contextmanager
def private_folder(folder: Path, owned: bool = False) -> Iterator[Path]:
    """Yield a new folder for a library that opens files itself; they move to `folder` at the end.

    `folder` is created if it is missing. After an exception the files are deleted; if `folder` is
    `owned` by this process, so are those of one that was killed.
    """
    with open_folder(folder, create=True) as descriptor:
        for leftover in folder.glob(".tmp-*") if owned else ():
            shutil.rmtree(leftover.name, ignore_errors=True, dir_fd=descriptor)
        name = f".tmp-{os.urandom(8).hex()}"
        os.mkdir(name, 0o700, dir_fd=descriptor)
        try:
            yield folder / name
            for path in (folder / name).iterdir():
                remove_folder(folder / path.name, ignore_errors=True)  # a file stays, to replace
                rename(path, folder / path.name)
        finally:
            shutil.rmtree(name, ignore_errors=True, dir_fd=descriptor)


def refuse_links(path: Path) -> None:
    """Raise SecurityError if a link has this path, or one beside it that begins with it.

    For libraries that keep files open by name: databases have others beside theirs.
    """
    for file in path.parent.iterdir():
        if file.name.startswith(path.name) and file.is_symlink():
            raise link_refusal(file)
