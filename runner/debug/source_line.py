"""Find the user's source line: the innermost frame that is neither torch's nor ours."""

from __future__ import annotations

import linecache
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import torch

import runner
from runner.format import short_path

FRAME = re.compile(r'File "([^"]+)", line (\d+)')
TORCH = str(Path(torch.__file__).parent) + os.sep
OURS = str(Path(runner.__file__).parent) + os.sep
SHOWN = (f"{OURS}models{os.sep}", f"{OURS}objectives{os.sep}")  # exceptions: models and losses
STEP_MODULE = os.path.join(OURS, "training", "step.py")
CALLERS = (STEP_MODULE, *(os.path.join(OURS, p) for p in ("training/loop.py", "data/batch.py")))
"""The callers of the model; frames above them are not part of the step."""

Place = tuple[str, int]
"""File and line number; the text is read on demand."""


@dataclass
class Line:
    """A line of code outside torch and the runner's own machinery."""

    file: str
    number: int
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"

    @property
    def short(self) -> str:
        """The path relative to the current folder, and the text."""
        near = short_path(Path(self.file))
        return f"{near}:{self.number} `{self.source}`" if self.source else f"{near}:{self.number}"


def is_user_code(path: str) -> bool:
    """Whether code in that file may be the culprit."""
    if path.startswith(("<", TORCH)):
        return False
    return not path.startswith(OURS) or path.startswith(SHOWN)


def line_at(place: Place) -> Line:
    """Return the line with its text."""
    return Line(*place, linecache.getline(*place).strip())


def current_place() -> Place | None:
    """Return the innermost user frame of the current call; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path == STEP_MODULE:
            return None
        if is_user_code(path):
            return path, frame.f_lineno
        frame = frame.f_back
    return None


def raising_line(trace: TracebackType | None) -> Line | None:
    """Return the innermost user line of a traceback within the step."""
    line, begun = None, False
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        begun = begun or path == STEP_MODULE
        if begun and is_user_code(path):
            line = line_at((path, trace.tb_lineno))
        trace = trace.tb_next
    return line


def place_in_text(text: str) -> Place | None:
    """Return the innermost user frame in a printed trace, below the model's caller."""
    frames = [(path, int(number)) for path, number in FRAME.findall(text)]
    called = [i for i, (path, _) in enumerate(frames) if path in CALLERS]
    inside = frames[called[-1] + 1 :] if called else frames
    return next((frame for frame in reversed(inside) if is_user_code(frame[0])), None)
