"""Reads hostile files as they want to be read, so that the tests know that they are not inert.

    python careless.py PLAN    PLAN: JSON, a list of {"path", "marker", "reader"}

Each file is read in a process of its own, whose output is thrown away. Prints as JSON the places
in the list of those whose marker was made. Only for the files beside this module: what they do is
to make their marker.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[3])
)  # the runner is a library to misuse, too

SECONDS = 20  # for one file


def _pickle(path: Path) -> None:
    pickle.loads(path.read_bytes())  # noqa: S301


def _stream(path: Path) -> None:
    with path.open("rb") as file:
        while file.peek(1):
            pickle.load(file)  # noqa: S301


def _torch(path: Path) -> None:
    torch.load(path, weights_only=False, map_location="cpu")


def _numpy(path: Path) -> None:
    found = np.load(path, allow_pickle=True)
    if not isinstance(found, np.ndarray):
        for name in found.files:
            found[name]


def _metadata(path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    FileSystemReader(path).read_metadata()


READERS = {
    "pickle": _pickle,
    "stream": _stream,
    "torch": _torch,
    "numpy": _numpy,
    "metadata": _metadata,
}


def fires(path: Path, marker: Path, reader: str) -> bool:
    """Whether reading it makes the marker; it is read in a fork of this process."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            signal.alarm(SECONDS)
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(nothing, stream)
            READERS[reader](path)
        os._exit(0)
    os.waitpid(child, 0)
    return os.path.lexists(marker)


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    found = [
        place
        for place, row in enumerate(plan)
        if fires(Path(row["path"]), Path(row["marker"]), row["reader"])
    ]
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
