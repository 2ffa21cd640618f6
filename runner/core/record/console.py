"""Console output during a run: log lines on stderr and in the run's folder."""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from runner.core.masking import mask_secrets
from runner.core.record import text as texts
from runner.core.record.history import normalize_message
from runner.core.record.storage import safe_opener, write_again
from runner.core.record.text import escape_control_chars, limit_length

COLOURS = {"DEBUG": "dim", "WARNING": "yellow", "ERROR": "bold red", "CRITICAL": "bold red"}
LOG = "run.log"
NOTEBOOK_ENV = "JPY_PARENT_PID"  # set by Jupyter kernels: colours, but no cursor control
UNLIMITED_WIDTH = 100_000  # columns, for output of unlimited width
FILE_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"


class EscapingConsole(Console):
    """The only console; it escapes markup and control characters. A closed pipe raises OSError."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Render a cell, heading, title or caption on one line."""
        return super().render_str(escape_control_chars(text), **options)

    def render_lines(self, renderable: RenderableType, *args: Any, **options: Any) -> Any:
        """Render a cell; a Text is put on one line."""
        if isinstance(renderable, Text) and texts.CONTROL.search(renderable.plain):
            renderable = Text(escape_control_chars(renderable.plain), renderable.style)
        return super().render_lines(renderable, *args, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Mask secrets before lines are folded; escape control characters in all other output."""
        if isinstance(renderable, Text) and renderable.plain != mask_secrets(renderable.plain):
            renderable = Text(mask_secrets(renderable.plain), renderable.style)
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else texts.escape_lines(segment.text)
            yield segment if text is segment.text else Segment(text, segment.style)

    def on_broken_pipe(self) -> None:
        """Raise instead of exiting, as Rich does."""
        raise BrokenPipeError("the reader closed this output")


def print_stdout(*parts: RenderableType, fold: bool = True, **options: Any) -> None:
    """Print to stdout; a pipe gets unfolded lines unless `fold`. A closed one is no error."""
    screen = EscapingConsole()
    if not (fold or screen.is_terminal or "COLUMNS" in os.environ):
        screen.width = UNLIMITED_WIDTH
    try:
        with screen.capture() as printed:  # which also flushes the stream
            for part in parts:
                screen.print(part, **options)
        text = "\n".join(line.rstrip(" ") for line in printed.get().split("\n"))
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # a program may replace stdout
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        print(text, end="", flush=True)  # noqa: T201
    except OSError:
        with open(os.devnull, "wb") as devnull, suppress(io.UnsupportedOperation):
            os.dup2(devnull.fileno(), sys.stdout.fileno())


@cache
def _console_for(stream: object) -> EscapingConsole:
    return EscapingConsole(stderr=True, soft_wrap=True)


def to_html(renderable: RenderableType, width: int = 100) -> str:
    """Return what would be printed as HTML, for a notebook."""
    screen = EscapingConsole(file=io.StringIO(), record=True, width=width, force_terminal=True)
    screen.print(renderable)
    form = "<pre style='line-height:1.3'>{code}</pre>"
    return screen.export_html(inline_styles=True, code_format=form)


def console() -> EscapingConsole:
    """Return the console on stderr, shared by live display and log lines so that neither breaks."""
    stream = getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # unwraps a live display
    return _console_for(stream)  # a new one if stderr was replaced


def supports_live_display(screen: EscapingConsole) -> bool:
    """Whether it is a terminal that can redraw lines; a notebook's `!` command is not."""
    return screen.is_terminal and not screen.is_dumb_terminal and NOTEBOOK_ENV not in os.environ


def plain_text(value: object, style: str = "") -> Text:
    """Return one line of Text, without Rich markup or control characters.

    A bare `str` in a Rich table is parsed as markup: `[red]` vanishes, `[link=…]` becomes a link.
    """
    return Text(escape_control_chars(limit_length(str(value))), style)


def facts_table(rows: Iterable[tuple[str, object, str]], width: int = 15) -> Table:
    """Return a two-column table of names and values; rows are (name, value, style)."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=width, max_width=32, overflow="fold")
    table.add_column(overflow="fold")
    for name, value, style in rows:
        cell = value if isinstance(value, Text | Group) else plain_text(value, style)
        table.add_row(plain_text(name), cell)
    return table


def set_up_logging(level: str, folder: Path | None, screen: bool = True) -> None:
    """Set up logging to stderr, and to `run.log` in `folder` if given, in place of any other.

    Debug messages of libraries are dropped; a warning that differs only in numbers is logged once.
    """
    close_logging()
    _reset_loggers()
    logging.setLogRecordFactory(_RecordFactory(logging.getLogRecordFactory()))
    root, number = logging.getLogger(), logging.getLevelNamesMapping()[level.upper()]
    if screen:
        _handlers.append(_ConsoleLog())
    if folder is not None:
        try:
            _handlers.append(_FileLog(folder / LOG))
        except OSError as error:
            logging.getLogger("runner").warning("no run.log: %s", error)
    for handler in _handlers:
        root.addHandler(handler)
    root.setLevel(max(number, logging.INFO))
    logging.getLogger("runner").setLevel(number)
    logging.captureWarnings(True)
    _states[:] = [_logging_state(), logging.getLogRecordFactory()]


_handlers: list[_ConsoleLog | _FileLog] = []  # of `set_up_logging`, until `close_logging`
_states: list[Any] = []  # `_logging_state` after it, and its record factory


def _logging_state() -> tuple[Any, ...]:
    """Return what other code can change that would keep our records from our handlers."""
    root, ours = logging.getLogger(), logging.getLogger("runner")
    own = ours.disabled, ours.propagate, ours.level, len(ours.filters)
    attached = [(handler in root.handlers, handler.level) for handler in _handlers]
    return attached, own, root.manager.disable


def restore_logging() -> None:
    """Put our handlers back if other code has set up logging again, and say so once.

    Without `set_up_logging` nothing is changed. Costs 2 µs if nothing is to be done.
    """
    if not _handlers or _logging_state() == _states[0]:
        return
    root, level = logging.getLogger(), _states[0][1][2]
    _reset_loggers()
    logging.disable(logging.NOTSET)
    if not isinstance(logging.getLogRecordFactory(), _RecordFactory):
        logging.setLogRecordFactory(_states[1])
    for handler in _handlers:
        handler.setLevel(logging.NOTSET)
        if handler not in root.handlers:
            root.addHandler(handler)
    ours = logging.getLogger("runner")
    ours.setLevel(level)
    logging.captureWarnings(True)
    ours.warning("other code has set up logging again; run.log and these lines continue")


def recreate_log_file() -> None:
    """Write a run.log that was deleted or moved again, with all its lines. Raises OSError."""
    for handler in _handlers:
        if isinstance(handler, _FileLog):
            handler.recreate()


def has_log_file() -> bool:
    """Whether lines of the log reach a run.log."""
    return any(isinstance(handler, _FileLog) and not handler.failed for handler in _handlers)


def _reset_loggers() -> None:
    """Reset our loggers and `py.warnings` so that all records reach the root's handlers."""
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == "runner" or name == "py.warnings":
            logger = logging.getLogger(name)
            logger.disabled, logger.propagate = False, True
            logger.filters.clear()
            logger.handlers.clear()
            logger.setLevel(logging.NOTSET)


def close_logging() -> None:
    """Undo `set_up_logging`, and an earlier one whose handlers other code has put back."""
    root = logging.getLogger()
    returned = [each for each in root.handlers if isinstance(each, _ConsoleLog | _FileLog)]
    for handler in {*_handlers, *returned}:
        root.removeHandler(handler)
        handler.close()
    _handlers.clear()
    factory = logging.getLogRecordFactory()
    if isinstance(factory, _RecordFactory):
        logging.setLogRecordFactory(factory.base_factory)
    logging.captureWarnings(False)


class _RecordFactory:
    """Creates log records that are safe for every handler, including other libraries':
    secrets and control characters are replaced, and exceptions are kept only as such text.
    """

    def __init__(self, base_factory: Callable[..., logging.LogRecord]) -> None:
        self.base_factory = base_factory

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self.base_factory(*args, **kwargs)
        record.msg, error = _message(record), record.exc_info
        record.args, record.exc_info = (), None
        if error and error[0] is not None:  # formatters append it to the message
            record.exc_text = _prefix_lines(logging.Formatter().formatException(error))
        if record.stack_info is not None:
            record.stack_info = _prefix_lines(record.stack_info)
        return record


def _message(record: logging.LogRecord) -> str:
    """Return the message on one line, masked."""
    try:
        message = record.getMessage()
    except Exception as error:  # a log call with wrong arguments must not end the run
        message = f"{record.msg!r} (its arguments do not fit: {error})"
    if record.name == "py.warnings":
        message = message.strip().partition("\n")[0]  # the second line only quotes the source
    return escape_control_chars(limit_length(mask_secrets(message)))


def _prefix_lines(text: str) -> str:
    lines = map(limit_length, limit_length(mask_secrets(text), texts.LONGEST_TRACE).split("\n"))
    return "\n".join(f"  | {escape_control_chars(line)}" for line in lines)


class _RepeatedWarningFilter(logging.Filter):
    """Passes each warning once."""

    def __init__(self) -> None:
        super().__init__()
        self.warned: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        key = record.name, normalize_message(record.msg)
        if record.levelno != logging.WARNING:
            return True
        is_new = key not in self.warned
        self.warned.add(key)
        return is_new


class _ConsoleLog(logging.Handler):
    """Logs to stderr, in colour on a terminal; disables itself once the stream is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(_RepeatedWarningFilter())
        self.failed = False  # the stream is closed

    def emit(self, record: logging.LogRecord) -> None:
        if self.failed or getattr(record, "live", False):  # the live display shows it
            return
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        text = Text(f"{clock} ", style="dim")
        text.append(level + record.msg, style=COLOURS.get(record.levelname, "not dim"))
        text.append(f"\n{record.exc_text}" if record.exc_text else "", style="dim")
        try:
            console().print(text)
        except (OSError, ValueError):
            self.failed = True


class _FileLog(logging.StreamHandler[TextIO]):
    """Logs to `run.log` with full timestamps; disables itself after the first write error.

    A file that other code has closed (`logging.shutdown`, `dictConfig`) is opened again.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.failed = path.absolute(), False
        super().__init__(self._open())
        self.addFilter(_RepeatedWarningFilter())
        self.setFormatter(logging.Formatter(FILE_FORMAT, "%Y-%m-%dT%H:%M:%S"))

    def _open(self, descriptor: int | None = None) -> TextIO:
        if descriptor is None:
            descriptor = safe_opener(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        return os.fdopen(descriptor, "a+", encoding="utf-8", errors="backslashreplace")

    def recreate(self) -> None:
        """Write the file again, with all its lines, if it was deleted or moved."""
        if not (self.failed or self.stream.closed or self.path.exists()):
            self.stream.flush()
            descriptor = write_again(os.dup(self.stream.fileno()), self.path)
            self.stream.close()
            self.stream = self._open(descriptor)

    def emit(self, record: logging.LogRecord) -> None:
        if self.failed:
            return
        if self.stream.closed:
            try:
                self.stream = self._open()
            except OSError:
                self.failed = True
                return
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        self.failed = True

    def close(self) -> None:
        try:
            self.stream.close()
        except OSError:  # buffered lines are lost; the run continues
            pass
        super().close()
