"""The live display of a run's progress on a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from runner.core.record.text import escape_control_chars


def draw(live: Live, steps: tuple[int, int], counts: str, texts: Iterable[str]) -> None:
    """Show a bar of (all, done) steps, `counts` and texts. OSError or ValueError: it has gone."""
    header = Table.grid(padding=(0, 1), expand=True)
    header.add_column(ratio=1)
    header.add_column(no_wrap=True)
    header.add_row(ProgressBar(*steps), _single_line(counts))
    live.update(Group(header, *map(_single_line, filter(None, texts))), refresh=True)


def _single_line(text: str) -> Text:
    return Text(escape_control_chars(text), no_wrap=True, overflow="ellipsis")
