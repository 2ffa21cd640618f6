"""Write Markdown from untrusted text: class names, file names, model output."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from runner.core.masking import MARKDOWN
from runner.core.record.text import LONGEST_TRACE, limit_length

UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def escape(text: object) -> str:
    """Escape text so that it is shown literally, on one line."""
    flat = re.sub(r"\s+", " ", UNPRINTABLE.sub(" ", limit_length(str(text))))
    return MARKDOWN.sub(r"\\\1", flat)


def code(text: str, language: str = "") -> str:
    """Return a fenced block; the fence is longer than any run of backticks inside."""
    text = limit_length(text, LONGEST_TRACE)
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{UNPRINTABLE.sub('�', text.rstrip())}\n{fence}"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with escaped cells."""
    lines = [header, ["---"] * len(header), *([escape(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
