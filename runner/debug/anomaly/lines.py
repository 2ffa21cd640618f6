"""Which line of somebody's code a trace of the forward pass is about."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

import runner

FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in .+\n(?:    (?P<code>.+)\n?)?')
TORCH = str(Path(torch.__file__).parent) + os.sep
OURS = str(Path(runner.__file__).parent) + os.sep
MODELS = OURS + "models" + os.sep
STEP = tuple(OURS + name for name in ("batch.py", "step.py", "loop.py"))  # what calls the model


@dataclass(frozen=True)
class Line:
    """A line of somebody's code."""

    file: str
    number: int
    code: str

    def __str__(self) -> str:
        path = Path(self.file)
        near = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{near}:{self.number} `{self.code}`" if self.code else f"{near}:{self.number}"


def line_of(trace: str) -> Line | None:
    """The innermost line that is neither torch's nor the runner's, in a trace as Python prints it.

    The runner's own models are named where nobody else's code is in it. None where there is no
    such line, as with a model that is one nn.Sequential.
    """
    found = list(FRAME.finditer(trace))
    called = [i for i, match in enumerate(found) if match["file"].startswith(STEP)]
    found = found[called[-1] + 1 :] if called else found  # before it is whoever started the run
    found = [match for match in found if not match["file"].startswith(TORCH)]
    theirs = [match for match in found if not match["file"].startswith(OURS)]
    for match in reversed(theirs or [m for m in found if m["file"].startswith(MODELS)]):
        return Line(match["file"], int(match["line"]), match["code"] or "")
    return None
