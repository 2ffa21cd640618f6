"""Named sections of user code, timed while a profiler collects them.

`with profile.section("tokenise", category="data"):` works anywhere: in a model, data set, loss or
hook. Without a collector it costs less than 1 µs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

MAX_SECTIONS = 200  # distinct names; later ones are counted under OTHERS
OTHERS = "(others)"
RANGE_PREFIX = "section "  # prefix of the name in a trace


@dataclass
class SectionTotal:
    """All calls of one section."""

    name: str
    category: str
    calls: int = 0
    seconds: float = 0.0  # including nested sections; recursion counts once

    @property
    def mean(self) -> float:
        """Mean seconds per call."""
        return self.seconds / self.calls if self.calls else 0.0


class SectionTotals:
    """Calls and seconds by name and category, from all threads of this process."""

    def __init__(self, row_type: type[SectionTotal] = SectionTotal) -> None:
        self.row_type = row_type
        self.pid = os.getpid()
        self.tracing = False  # also record sections as ranges in a profiler's trace
        self.rows: dict[tuple[str, str], SectionTotal] = {}
        self.lock = threading.Lock()
        self.threads = threading.local()

    def enter(self, name: str, category: str) -> None:
        """Enter a section in this thread."""
        if os.getpid() != self.pid:  # a data worker, whose copy is never read
            return
        range_ = None
        if self.tracing:
            range_ = torch.autograd.profiler.record_function(RANGE_PREFIX + name)
            range_.__enter__()  # type: ignore[no-untyped-call]
        self._stack().append((name, category, perf_counter(), range_))

    def leave(self) -> float | None:
        """Leave the innermost section of this thread; return its seconds, None without one."""
        stack = self._stack()
        if not stack or os.getpid() != self.pid:  # entered before collecting started
            return None
        name, category, start, range_ = stack.pop()
        seconds = perf_counter() - start
        if range_ is not None:
            range_.__exit__(None, None, None)
        nested = any(outer[0] == name for outer in stack)
        with self.lock:
            row = self.row(name, category)
            row.calls += 1
            row.seconds += 0.0 if nested else seconds
        return seconds

    def row(self, name: str, category: str) -> SectionTotal:
        """Return a section's row, created if needed; the caller holds `lock`."""
        if (name, category) not in self.rows and len(self.rows) >= MAX_SECTIONS:
            name, category = OTHERS, ""
        return self.rows.setdefault((name, category), self.row_type(name, category))

    def _stack(self) -> list[tuple[str, str, float, Any]]:
        """Return this thread's open sections: name, category, start, trace range."""
        stack: list[tuple[str, str, float, Any]] = self.threads.__dict__.setdefault("stack", [])
        return stack

    def open_names(self) -> list[str]:
        """Return the names of this thread's open sections, outermost first."""
        return [name for name, *_ in self._stack()]

    def by_time(self) -> list[SectionTotal]:
        """Return all sections, slowest first."""
        with self.lock:
            return sorted(self.rows.values(), key=lambda row: -row.seconds)


_active_totals: SectionTotals | None = None


class Section(ContextDecorator):
    """A named stretch of code, as context manager or decorator; may be nested and reused.

    Inside a compiled graph it has no effect.
    """

    __slots__ = ("category", "name")

    def __init__(self, name: str, category: str = "") -> None:
        self.name, self.category = name, category

    def __enter__(self) -> Section:
        if not torch.compiler.is_compiling() and _active_totals is not None:
            _active_totals.enter(self.name, self.category)
        return self

    def __exit__(self, *exc: object) -> None:
        if not torch.compiler.is_compiling() and _active_totals is not None:
            _active_totals.leave()


@contextmanager
def collect() -> Iterator[SectionTotals]:
    """Time sections within, in all threads: `with profile.collect() as totals:`."""
    global _active_totals
    outer, _active_totals = _active_totals, SectionTotals()
    try:
        yield _active_totals
    finally:
        _active_totals = outer


class Sections:
    """The type of `runner.profile`: `section` marks code, `collect` times it in own loops."""

    section = Section
    collect = staticmethod(collect)


profile = Sections()
