"""The runner's version and folder, and the module path of the process.

Only modules that Python has already imported are used: the current folder may be first.
"""

from __future__ import annotations

import os
import sys

__version__ = "0.1.0"
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
# the first entry, that of `python -m` or of a script, is what -P leaves out
_SAFE = _ROOT in [os.path.realpath(entry) for entry in sys.path[not sys.flags.safe_path :] if entry]


def python_command(module: str = "runner") -> list[str]:
    """Return the words of the command that runs `module`, for messages and records.

    -P keeps the current folder off the front of the module path, where a folder `tensorboard` would
    shadow the package. It is left out if the runner is found nowhere but in the current folder.
    """
    return ["python", *(["-P"] if _SAFE else []), "-m", module]


class current_folder_last:  # noqa: N801  # read as a verb: `with current_folder_last():`
    """Remove the current folder from the module path while entered; append it afterwards.

    `python -m` puts it first, so that a foreign `yaml.py` or folder `hydra_plugins` in it would run
    before any config is read. An empty entry of PYTHONPATH, as after a trailing colon, means the
    current folder as well; folders named explicitly are kept.
    Without `restore` it is appended only if the runner is in it: libraries try to import optional
    packages, and would find foreign ones there.
    """

    def __init__(self, restore: bool = True) -> None:
        self.restore = restore

    def __enter__(self) -> None:
        self.folder = folder = os.getcwd()
        if not sys.flags.safe_path and sys.path and sys.path[0] in ("", folder):
            del sys.path[0]
        pythonpath = os.environ.get("PYTHONPATH", "")
        explicit_folders = {os.path.abspath(p) for p in pythonpath.split(os.pathsep) if p}
        if pythonpath and "" in pythonpath.split(os.pathsep) and folder not in explicit_folders:
            sys.path[:] = [entry for entry in sys.path if entry not in ("", folder)]

    def __exit__(self, *exc_info: object) -> None:
        restores = self.restore or os.path.realpath(self.folder) == _ROOT
        if restores and self.folder not in sys.path:
            sys.path.append(self.folder)
