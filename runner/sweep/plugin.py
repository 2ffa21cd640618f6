"""Where Hydra finds our launcher: it accepts plugins of the namespace `hydra_plugins` only."""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = str(Path(__file__).resolve().parents[1] / "plugins")


def make_known() -> None:
    """Put our part of the namespace last on the module path, for this process.

    To be called before Hydra looks for plugins, which it does once.
    """
    if FOLDER not in sys.path:
        sys.path.append(FOLDER)


def make_known_to_others() -> None:
    """For processes that other launchers start, which read back the list of plugins.

    They look for them on a path without the current folder, which `python -m` would put first.
    """
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    root = Path(FOLDER).parents[1]
    ours = [FOLDER, *([str(root)] if root == Path.cwd().resolve() else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, *ours]))
    os.environ["PYTHONSAFEPATH"] = "1"
