"""Reads hostile files as they want to be read, so that the tests know that they are not inert.

    python careless.py PLAN    PLAN: JSON, a list of {"path", "marker", "reader"}

Each file is read in a fork of this process. Prints as JSON the places in the list of those whose
marker was made. Only for the files beside this module: what they do is to make their marker.
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
from torch.distributed.checkpoint import FileSystemReader

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a library to misuse, too
SECONDS = 20  # for one file


def _stream(path: Path) -> None:
    with path.open("rb") as file:
        while file.peek(1):
            pickle.load(file)  # noqa: S301


def _numpy(path: Path) -> None:
    content = np.load(path, allow_pickle=True)
    if not isinstance(content, np.ndarray):
        for name in content.files:
            content[name]


READERS = {
    "pickle": lambda path: pickle.loads(path.read_bytes()),  # noqa: S301
    "stream": _stream,
    "torch": lambda path: torch.load(path, weights_only=False, map_location="cpu"),
    "numpy": _numpy,
    "metadata": lambda path: FileSystemReader(path).read_metadata(),
}


def fires(path: Path, marker: Path, reader: str) -> bool:
    """Whether reading it makes the marker."""
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


if __name__ == "__main__":
    rows = json.loads(Path(sys.argv[1]).read_text())
    fired = [fires(Path(row["path"]), Path(row["marker"]), row["reader"]) for row in rows]
    sys.stdout.write(json.dumps([place for place, one in enumerate(fired) if one]) + "\n")
