"""The module path of the process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def current_folder_last() -> Iterator[None]:
    """Take the current folder off the module path, and put it back as the last one on it.

    `python -m` puts it first, where a `yaml.py` or a folder `hydra_plugins` of somebody else's
    would be run before any config is read. An empty entry of PYTHONPATH, such as a colon at its
    end leaves, means that folder too; what is named there stays: it was asked for.
    """
    folder = os.getcwd()
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", folder):
        del sys.path[0]
    typed = os.environ.get("PYTHONPATH", "")
    asked = {os.path.abspath(entry) for entry in typed.split(os.pathsep) if entry}
    if typed and "" in typed.split(os.pathsep) and folder not in asked:
        sys.path[:] = [place for place in sys.path if place not in ("", folder)]
    try:
        yield
    finally:
        if folder not in sys.path:
            sys.path.append(folder)
