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
    would be run before any config is read. PYTHONPATH is left as it is: it was asked for.
    """
    folder = os.getcwd()
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", folder):
        del sys.path[0]
    try:
        yield
    finally:
        if folder not in sys.path:
            sys.path.append(folder)
