"""The module path of the process.

Imports only modules that Python has already loaded: the current folder may be first on the path.
"""

from __future__ import annotations

import os
import sys


class current_folder_last:  # noqa: N801  # read as a verb: `with current_folder_last():`
    """Take the current folder off the module path on entry; append it on exit.

    `python -m` puts it first, where a foreign `yaml.py` or folder `hydra_plugins` would be run
    before any config is read. An empty entry of PYTHONPATH, such as after a trailing colon, also
    means that folder; if it is listed by name, it stays.
    Without `restore` it is appended only if the runner lies there: libraries try to import
    packages that are not installed, and would find them there.
    """

    def __init__(self, restore: bool = True) -> None:
        self.restore = restore

    def __enter__(self) -> None:
        self.folder = folder = os.getcwd()
        if not sys.flags.safe_path and sys.path and sys.path[0] in ("", folder):
            del sys.path[0]
        typed = os.environ.get("PYTHONPATH", "")
        asked = {os.path.abspath(entry) for entry in typed.split(os.pathsep) if entry}
        if typed and "" in typed.split(os.pathsep) and folder not in asked:
            sys.path[:] = [place for place in sys.path if place not in ("", folder)]

    def __exit__(self, *failed: object) -> None:
        here = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
        wanted = self.restore or here == os.path.realpath(self.folder)
        if wanted and self.folder not in sys.path:
            sys.path.append(self.folder)
