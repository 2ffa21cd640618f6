"""What Hydra prints by itself: configs with names in place of what the environment holds, and
nothing with codes for the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from hydra._internal.hydra import Hydra
from omegaconf import DictConfig, OmegaConf

from runner.masking import masked
from runner.record.text import escape_lines


@contextmanager
def by_name() -> Iterator[None]:
    """While entered, Hydra prints configs without the types of their keys.

    `${oc.env:NAME}` is resolved to that name then, which is no number and no flag.
    """
    before: Any = Hydra.get_sanitized_cfg

    def untyped(self: Hydra, cfg: DictConfig, cfg_type: str) -> DictConfig:
        found: Any = OmegaConf.to_container(before(self, cfg, cfg_type), resolve=False)
        return DictConfig(found)

    Hydra.get_sanitized_cfg = untyped  # type: ignore[method-assign]
    try:
        yield
    finally:
        Hydra.get_sanitized_cfg = before  # type: ignore[method-assign]


@contextmanager
def as_plain_text() -> Iterator[None]:
    """While entered, what is printed is text alone: files of others may be part of it."""
    plain: Any = _Plain(sys.stdout)
    with redirect_stdout(plain):
        yield


class _Plain:
    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(escape_lines(masked(text)))
        return len(text)

    def flush(self) -> None:
        self.stream.flush()
