"""stdout and stderr of a command: what they cannot take never changes its exit code."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

TYPE_CHECKING = False  # `typing` may lie in the current folder, still first on the module path
if TYPE_CHECKING:
    from typing import TextIO


def prepare_streams() -> None:
    """Escape characters that stdout or stderr lack; open the null device for a closed one."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed: no other file may become descriptor 1 or 2
            setattr(sys, name, open(os.devnull, "w"))
        elif isinstance(stream, TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def write_stream(stream: TextIO, text: str = "") -> None:
    """Write and flush; drop the text, and all later ones, if a pipe is closed or a disk full."""
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
