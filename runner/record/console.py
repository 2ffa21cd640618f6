"""What the program says while it works: log lines on stderr and in the run's folder."""

from __future__ import annotations

import logging
import re
import sys
import time
import warnings
from collections import Counter
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.text import Text

from runner.masking import masked
from runner.record.history import alike

COLOURS = {"DEBUG": "dim", "WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}
FORGING = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What could end a line, move the cursor, or turn the direction of writing; lone surrogates too."""


class Screen(Console):
    """A console on which a reader that has gone is an OSError, not the end of the process."""

    def on_broken_pipe(self) -> None:
        """Leave it to the caller; rich would exit here."""
        raise BrokenPipeError("nobody reads this any more")


@cache
def _console(stream: object) -> Screen:
    return Screen(stderr=True, soft_wrap=True, highlight=False)


def console() -> Screen:
    """The console on stderr; a live display and log lines share it, so neither tears the other."""
    return _console(sys.stderr)  # a new one when somebody replaced the stream


def set_up_logging(level: str, folder: Path | None) -> None:
    """Log from here on at `level` to stderr, and to `run.log` in `folder` if there is one.

    Replaces what an earlier call set up. Other libraries' debug messages stay out.
    """
    close_logging()
    root, repeats = logging.getLogger(), _Repeats()

    def add(handler: logging.Handler) -> None:
        handler.addFilter(repeats)
        root.addHandler(handler)

    add(_OnConsole())
    if folder is not None:
        try:
            add(_InFile(folder / "run.log"))
        except OSError as error:
            logging.getLogger("runner").warning("no run.log: %s", error)
    number = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(number, logging.INFO))
    logging.getLogger("runner").setLevel(number)
    logging.captureWarnings(True)


def close_logging() -> None:
    """Undo `set_up_logging`."""
    root = logging.getLogger()
    ours = [handler for handler in root.handlers if isinstance(handler, _OnConsole | _InFile)]
    for repeats in {one for handler in ours for one in handler.filters if type(one) is _Repeats}:
        repeats.tell()
    for handler in ours:
        root.removeHandler(handler)
        handler.close()
    logging.captureWarnings(False)


class _Repeats(logging.Filter):
    """Lets a warning pass the first time; one that is alike but for its numbers is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, str]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        known = vars(record)  # asked by each handler, to be counted once
        if "repeats" not in known:
            key = record.name, alike(_lines(record)[0])
            known["repeats"] = self.seen[key] > 0
            self.seen[key] += 1
        return not known["repeats"]

    def tell(self) -> None:
        for (name, text), count in self.seen.items():
            if count > 1:
                logging.getLogger(name).info("%d times in all: %s", count, text)
        self.seen.clear()


def one_line(text: str) -> str:
    """`text` with everything escaped that could make it look like something else."""
    return FORGING.sub(
        lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text
    )


def plain_text(value: object, style: str = "") -> Text:
    """What shows as it is, on one line: neither rich's markup nor a terminal's codes mean anything.

    A bare `str` in a table of rich's is markup, in which `[red]` vanishes and `[link=…]` is a link.
    """
    return Text(one_line(str(value)), style)


def _lines(record: logging.LogRecord) -> list[str]:
    """The message on one line, then the traceback, each of its lines behind a bar."""
    try:
        message = record.getMessage()
    except Exception as error:  # a log call with wrong arguments must not end the run
        message = f"{record.msg!r} (its arguments do not fit: {error})"
    if record.name == "py.warnings":
        message = message.strip().partition("\n")[0]  # the second line only quotes the source
    lines = [one_line(masked(message))]
    if record.exc_info and record.exc_info[0] is not None:
        trace = masked(logging.Formatter().formatException(record.exc_info))
        lines += [f"  | {one_line(line)}" for line in trace.split("\n")]
    return lines


class _OnConsole(logging.Handler):
    """Coloured on a terminal, plain elsewhere; silent for good once nobody listens."""

    gone = False  # not removed: the logger is walking through its handlers just then

    def emit(self, record: logging.LogRecord) -> None:
        if self.gone or getattr(record, "live", False):
            return  # a live display shows such a line already
        screen = console()
        first, *rest = _lines(record)
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        text = Text(f"{clock} ", style="dim")
        text.append(Text(level + first, style=COLOURS.get(record.levelname, "not dim")))
        for line in rest:
            text.append(Text("\n" + line, style="dim"))
        try:
            screen.print(text)
        except (OSError, ValueError):  # closed, or a pipe whose reader has gone
            self.gone = True


class _InFile(logging.Handler):
    """`run.log`, every line with its full time; given up quietly when the disk is."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.gone = False
        if path.is_symlink():
            raise OSError(f"{path} is a link")
        self.file = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)

    def emit(self, record: logging.LogRecord) -> None:
        if self.gone:
            return
        first, *rest = _lines(record)
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        head = f"{clock}.{int(record.msecs):03d} {record.levelname:7} {record.name}: {first}"
        try:
            self.file.write("\n".join([head, *rest]) + "\n")
        except (OSError, ValueError):
            self.gone = True

    def close(self) -> None:
        try:
            self.file.close()
        except OSError as error:  # what it still held is lost; the run is not
            warnings.warn(f"run.log: {error}", stacklevel=2)
        super().close()
