"""Named sections of the user's own code, timed while a profiler collects them.

`with profile.section("tokenise", category="data"):` may stand anywhere: in a model, a data set, a
loss or a hook. Without a collector it costs less than a microsecond.
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

MOST = 200  # different names; what comes after is counted under OTHERS
OTHERS = "(others)"
RANGE = "section "  # before the name, in a trace


@dataclass
class Total:
    """All calls of one section."""

    name: str
    category: str
    calls: int = 0
    seconds: float = 0.0  # with the sections inside it; a section inside itself counts once

    @property
    def mean(self) -> float:
        """Seconds a call."""
        return self.seconds / self.calls if self.calls else 0.0


class Totals:
    """Calls and seconds by name and category, from all threads of this process."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.tracing = False  # sections are ranges of a profiler's trace, too
        self.rows: dict[tuple[str, str], Total] = {}
        self.lock = threading.Lock()
        self.threads = threading.local()

    def enter(self, name: str, category: str) -> None:
        """A section begins in this thread."""
        if os.getpid() != self.process:  # a data worker, whose copy is never read
            return
        range_ = None
        if self.tracing:
            range_ = torch.autograd.profiler.record_function(RANGE + name)
            range_.__enter__()  # type: ignore[no-untyped-call]
        self._stack().append((name, category, perf_counter(), range_))

    def leave(self) -> None:
        """The section that began last in this thread ends."""
        stack = self._stack()
        if not stack or os.getpid() != self.process:  # began before there was a collector
            return
        name, category, start, range_ = stack.pop()
        seconds = perf_counter() - start
        if range_ is not None:
            range_.__exit__(None, None, None)
        again = any(outer[0] == name for outer in stack)
        with self.lock:
            if (name, category) not in self.rows and len(self.rows) >= MOST:
                name, category = OTHERS, ""
            row = self.rows.setdefault((name, category), Total(name, category))
            row.calls += 1
            row.seconds += 0.0 if again else seconds

    def _stack(self) -> list[tuple[str, str, float, Any]]:
        """Sections that this thread is in: name, category, start, range of the trace."""
        stack: list[tuple[str, str, float, Any]] = self.threads.__dict__.setdefault("stack", [])
        return stack

    def by_time(self) -> list[Total]:
        """Every section, the longest first."""
        with self.lock:
            return sorted(self.rows.values(), key=lambda row: -row.seconds)


_collecting: Totals | None = None


class Section(ContextDecorator):
    """A stretch of code with a name; also a decorator. Entered as often, and as deep, as it likes.

    Inside a compiled graph it is nothing: there is no Python left to be timed.
    """

    __slots__ = ("category", "name")

    def __init__(self, name: str, category: str = "") -> None:
        self.name, self.category = name, category

    def __enter__(self) -> Section:
        if not torch.compiler.is_compiling() and _collecting is not None:
            _collecting.enter(self.name, self.category)
        return self

    def __exit__(self, *exc: object) -> None:
        if not torch.compiler.is_compiling() and _collecting is not None:
            _collecting.leave()


@contextmanager
def collect() -> Iterator[Totals]:
    """Time sections in here, in all threads: `with profile.collect() as totals:`."""
    global _collecting
    before, _collecting = _collecting, Totals()
    try:
        yield _collecting
    finally:
        _collecting = before


class Sections:
    """The type of `runner.profile`: `section` for one's code, `collect` for one's own loops."""

    section = Section
    collect = staticmethod(collect)


profile = Sections()
