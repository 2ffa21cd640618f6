"""Settings as one types them: read back by Hydra, and pasted into a shell, as they are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

INTERPOLATION = re.compile(r"(\\*)\$\{")
PLAIN = re.compile(r"[A-Za-z0-9_./:+-]+")  # neither Hydra nor a shell reads anything into these


def quoted(text: str, mark: str = "single") -> str:
    """The text as a value that Hydra reads back as it is; `mark` is single or double.

    It takes backslashes for escapes only before a quote, and OmegaConf only before `${`.
    """
    from hydra.core.override_parser.types import Quote, QuotedString

    literal = INTERPOLATION.sub(r"\1\1\\${", text)
    return QuotedString(literal, Quote[mark]).with_quotes()


def in_shell(key: str, value: object) -> str:
    """`key=value` with the quotes that it takes at a shell's prompt."""
    text = str(value)
    if PLAIN.fullmatch(text):
        return f"{key}={text}"
    return shlex.quote(f"{key}={quoted(text, 'double')}")


def resuming(folder: Path) -> str:
    """What goes on with the run in `folder`."""
    return in_shell("checkpoint.resume", folder)
