"""Where an error was raised, for the one line that is said of it."""

from __future__ import annotations

import os
import sys
import sysconfig
from traceback import walk_tb
from types import FrameType

from runner.errors import RunnerError

THEIRS = sys.stdlib_module_names | {"runner", "torch"}
INSTALLED = tuple({sysconfig.get_path(kind) + os.sep for kind in ("purelib", "platlib")})


def told(error: BaseException) -> tuple[str, str, int]:
    """What is to be said of an error that was raised, and the file and line where to look.

    That is the innermost line of the user's code, where any is on the way: code that is neither
    torch's, nor ours, nor Python's, and rather what is not installed. Else it is where it was
    raised. What was noted on the error on its way is said too.
    """
    frames = list(walk_tb(error.__traceback__))
    # by the name of the module: what torch generates lies in a cache, which may be anywhere
    users = [(frame, line) for frame, line in frames if _top(frame) not in THEIRS]
    own = [(frame, line) for frame, line in users if not _file(frame).startswith(INSTALLED)]
    frame, line = (own or users or frames)[-1]
    said = "; ".join([gist(error), *getattr(error, "__notes__", [])])
    return " ".join(said.split()), _file(frame), line


def gist(error: BaseException) -> str:
    """What ended a run, on one line. What follows the first of ours is a worker's traceback, and
    the log has that.
    """
    if isinstance(error, RunnerError):
        return str(error).partition("\n")[0]
    return " ".join(f"{type(error).__name__}: {error}".split())


def shorten(text: str, most: int) -> str:
    """`text` on one line; one of more than `most` characters ends between two words, with ` …`."""
    words = " ".join(text.split())
    if len(words) <= most:
        return words
    return f"{words[:most].rpartition(' ')[0] or words[:most]} …"


def _top(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename
