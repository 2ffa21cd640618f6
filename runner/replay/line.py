"""The line of the user's code that runs: the innermost frame that is neither torch's nor ours."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from types import FrameType, TracebackType

import torch

import runner
from runner.replay.findings import Line

TORCH = str(Path(torch.__file__).parent) + os.sep
OURS = str(Path(runner.__file__).parent) + os.sep
SHOWN = tuple(OURS + part for part in ("models" + os.sep, "objectives" + os.sep, "deferred.py"))
"""Of ours what a model or a loss is made of."""
END = OURS + "step.py"  # what called the model; what called that is no part of the step


Place = tuple[str, int]
"""A file and the number of a line; its text is read when it is wanted."""


def here() -> Place | None:
    """The line that led to the call; None where it was torch all the way."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path == END:
            return None
        if is_shown(path):
            return path, frame.f_lineno
        frame = frame.f_back
    return None


def raised(trail: TracebackType | None) -> Line | None:
    """The innermost such line of a traceback."""
    found, begun = None, False
    while trail is not None:
        path = trail.tb_frame.f_code.co_filename
        begun = begun or path == END
        if begun and is_shown(path):
            found = at((path, trail.tb_lineno))
        trail = trail.tb_next
    return found


def is_shown(path: str) -> bool:
    """Whether code of that file may be the culprit."""
    if path.startswith(("<", TORCH)):
        return False
    return not path.startswith(OURS) or path.startswith(SHOWN)


def at(place: Place) -> Line:
    """That line with its text."""
    return Line(*place, linecache.getline(*place).strip())
