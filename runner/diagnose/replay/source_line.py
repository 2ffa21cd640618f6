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

from runner.core.format import short_path
from runner.core.module_path import PACKAGE

FRAME_PATTERN = re.compile(r'File "([^"]+)", line (\d+)')
TORCH_FOLDER = str(Path(torch.__file__).parent) + os.sep
RUNNER_FOLDER = PACKAGE + os.sep
# models and losses of ours count as the user's code
USER_CODE = tuple(os.path.join(RUNNER_FOLDER, "core", p, "") for p in ("models", "objectives"))
STEP_MODULE = os.path.join(RUNNER_FOLDER, "core", "train", "step.py")
CALLERS = tuple(
    os.path.join(RUNNER_FOLDER, p)
    for p in ("core/train/step.py", "core/train/loop.py", "core/interfaces/batch.py")
)
"""The callers of the model; frames above them are not part of the step."""

SourceLocation = tuple[str, int]
"""File and line number; the text is read on demand."""


@dataclass
class SourceLine:
    """A line of code outside torch and the runner's own machinery."""

    file: str
    number: int
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"

    @property
    def short(self) -> str:
        """The path relative to the current folder, and the text."""
        path = short_path(Path(self.file))
        return f"{path}:{self.number} `{self.source}`" if self.source else f"{path}:{self.number}"


def is_user_code(path: str) -> bool:
    """Whether code in that file may be the culprit."""
    if path.startswith(("<", TORCH_FOLDER)):
        return False
    return not path.startswith(RUNNER_FOLDER) or path.startswith(USER_CODE)


def read_source_line(location: SourceLocation) -> SourceLine:
    """Return the line with its text."""
    return SourceLine(*location, linecache.getline(*location).strip())


def current_location() -> SourceLocation | None:
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


def raising_line(trace: TracebackType | None) -> SourceLine | None:
    """Return the innermost user line of a traceback within the step."""
    line, in_step = None, False
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        in_step = in_step or path == STEP_MODULE
        if in_step and is_user_code(path):
            line = read_source_line((path, trace.tb_lineno))
        trace = trace.tb_next
    return line


def location_in_trace(text: str) -> SourceLocation | None:
    """Return the innermost user frame in a printed trace, below the model's caller."""
    frames = [(path, int(number)) for path, number in FRAME_PATTERN.findall(text)]
    callers = [i for i, (path, _) in enumerate(frames) if path in CALLERS]
    model_frames = frames[callers[-1] + 1 :] if callers else frames
    return next((frame for frame in reversed(model_frames) if is_user_code(frame[0])), None)
