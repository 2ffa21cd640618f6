"""What the program prints while it works: log lines on stderr and in the run's folder."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from runner.masking import masked
from runner.record.history import normalize_message
from runner.record.storage import for_owners
from runner.record.text import CONTROL, escape_control_chars, escape_lines

COLOURS = {"DEBUG": "dim", "WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}
LOG = "run.log"
NOTEBOOK = "JPY_PARENT_PID"  # a kernel of Jupyter's sets it: its cells take colours, not movements
UNFOLDED = 100_000  # columns of what has no width
FILE_LINE = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"


class Screen(Console):
    """The only console here: no text that it prints is markup, or has codes for the terminal.

    A reader that has gone is an OSError, not the end of the process.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """A cell, a heading, a title or a caption: one line."""
        return super().render_str(escape_control_chars(text), **options)

    def render_lines(self, renderable: RenderableType, *args: Any, **options: Any) -> Any:
        """A cell that is a Text with styles: one line, too."""
        if isinstance(renderable, Text) and CONTROL.search(renderable.plain):
            renderable = Text(escape_control_chars(renderable.plain), renderable.style)
        return super().render_lines(renderable, *args, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Escape control characters in everything else that is printed."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else escape_lines(segment.text)
            yield segment if text is segment.text else Segment(text, segment.style)

    def on_broken_pipe(self) -> None:
        """Leave it to the caller; rich would exit here."""
        raise BrokenPipeError("the reader of this output has gone")


def print_stdout(*parts: RenderableType, fold: bool = True, **options: Any) -> None:
    """Print a result, in a pipe without blanks at the ends of lines, and folded only if `fold`.

    A reader that has read enough (`| head`), or a full disk behind it, is no error.
    """
    screen = Screen()
    if not (fold or screen.is_terminal or "COLUMNS" in os.environ):
        screen.width = UNFOLDED
    try:
        with screen.capture() as printed:  # which flushes the stream, too
            for part in parts:
                screen.print(part, **options)
        lines = printed.get().split("\n")
        print("\n".join(line.rstrip(" ") for line in lines), end="", flush=True)  # noqa: T201
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@cache
def _console(stream: object) -> Screen:
    return Screen(stderr=True, soft_wrap=True)


def console() -> Screen:
    """The console on stderr; a live display and log lines share it, so neither tears the other."""
    stream = getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # behind a live display's own
    return _console(stream)  # a new one when the stream was replaced


def takes_live_display(screen: Screen) -> bool:
    """Whether it is a terminal on which lines can be drawn anew; a notebook's `!` is none."""
    return screen.is_terminal and not screen.is_dumb_terminal and NOTEBOOK not in os.environ


def plain_text(value: object, style: str = "") -> Text:
    """What shows as it is, on one line: neither rich's markup nor a terminal's codes mean anything.

    A bare `str` in a table of rich's is markup, in which `[red]` vanishes and `[link=…]` is a link.
    """
    return Text(escape_control_chars(str(value)), style)


def facts_table(rows: Iterable[tuple[str, object, str]], width: int = 15) -> Table:
    """Names and values side by side; the third of each row is the style of its value."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=width, max_width=32, overflow="fold")
    table.add_column(overflow="fold")
    for name, value, style in rows:
        cell = value if isinstance(value, Text | Group) else plain_text(value, style)
        table.add_row(plain_text(name), cell)
    return table


def set_up_logging(level: str, folder: Path | None, screen: bool = True) -> None:
    """Log from here on at `level` to stderr, and to `run.log` in `folder` if there is one.

    Replaces what an earlier call set up, and what a config did to our own loggers. Other libraries'
    debug messages stay out; a warning that repeats but for its numbers is logged once.
    """
    close_logging()
    _reset_loggers()
    logging.setLogRecordFactory(_RecordFactory(logging.getLogRecordFactory()))
    root, number = logging.getLogger(), logging.getLevelNamesMapping()[level.upper()]
    if screen:
        root.addHandler(_ConsoleLog())
    if folder is not None:
        try:
            root.addHandler(_FileLog(folder / LOG))
        except OSError as error:
            logging.getLogger("runner").warning("no run.log: %s", error)
    root.setLevel(max(number, logging.INFO))
    logging.getLogger("runner").setLevel(number)
    logging.captureWarnings(True)


def _reset_loggers() -> None:
    """Let all records of our loggers, and Python's warnings, through to the root's handlers."""
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == "runner" or name == "py.warnings":
            logger = logging.getLogger(name)
            logger.disabled, logger.propagate = False, True
            logger.filters.clear()
            logger.handlers.clear()
            logger.setLevel(logging.NOTSET)


def close_logging() -> None:
    """Undo `set_up_logging`."""
    root = logging.getLogger()
    for handler in [x for x in root.handlers if isinstance(x, _ConsoleLog | _FileLog)]:
        root.removeHandler(handler)
        handler.close()
    factory = logging.getLogRecordFactory()
    if isinstance(factory, _RecordFactory):
        logging.setLogRecordFactory(factory.make)
    logging.captureWarnings(False)


class _RecordFactory:
    """Makes log records of which every handler, also another library's, has the text that ours
    have: no value of the environment, no codes for a terminal, and no error to quote them from.
    """

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self.make = make

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self.make(*args, **kwargs)
        record.msg, error = _message(record), record.exc_info
        record.args, record.exc_info = (), None
        if error and error[0] is not None:  # what formatters write below the message
            record.exc_text = _behind_bars(logging.Formatter().formatException(error))
        if record.stack_info is not None:
            record.stack_info = _behind_bars(record.stack_info)
        return record


def _message(record: logging.LogRecord) -> str:
    """The message on one line."""
    try:
        message = record.getMessage()
    except Exception as error:  # a log call with wrong arguments must not end the run
        message = f"{record.msg!r} (its arguments do not fit: {error})"
    if record.name == "py.warnings":
        message = message.strip().partition("\n")[0]  # the second line only quotes the source
    return escape_control_chars(masked(message))


def _behind_bars(text: str) -> str:
    return "\n".join(f"  | {escape_control_chars(line)}" for line in masked(text).split("\n"))


class _Repeats(logging.Filter):
    """Lets a warning through once."""

    def __init__(self) -> None:
        super().__init__()
        self.warned: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        key = record.name, normalize_message(record.msg)
        repeats = record.levelno == logging.WARNING and key in self.warned
        if record.levelno == logging.WARNING:
            self.warned.add(key)
        return not repeats


class _ConsoleLog(logging.Handler):
    """Coloured on a terminal, plain elsewhere; silent for good once its reader has gone."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(_Repeats())
        self.gone = False

    def emit(self, record: logging.LogRecord) -> None:
        if self.gone or getattr(record, "live", False):  # a live display shows such a line already
            return
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        text = Text(f"{clock} ", style="dim")
        text.append(level + record.msg, style=COLOURS.get(record.levelname, "not dim"))
        text.append(f"\n{record.exc_text}" if record.exc_text else "", style="dim")
        try:
            console().print(text)
        except (OSError, ValueError):
            self.gone = True


class _FileLog(logging.StreamHandler[TextIO]):
    """`run.log`, every line with its full time; silent for good once the disk is full."""

    def __init__(self, path: Path) -> None:
        if path.is_symlink():
            raise OSError(f"{path} is a link")
        super().__init__(
            open(path, "a", encoding="utf-8", errors="backslashreplace", opener=for_owners)
        )
        self.addFilter(_Repeats())
        self.setFormatter(logging.Formatter(FILE_LINE, "%Y-%m-%dT%H:%M:%S"))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        self.setLevel(logging.CRITICAL + 1)

    def close(self) -> None:
        try:
            self.stream.close()
        except OSError:  # what was buffered is lost; the run continues
            pass
        super().close()
