"""Named sections of the user's own code, timed while somebody collects them.

`with profile.section("tokenise", category="data"):` may stand anywhere: in a model, a data set, a
loss or a hook. Without a collector it costs less than a microsecond.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
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
    """All calls of one section. Sections inside it count in `seconds`, and not in `own`."""

    name: str
    category: str
    calls: int = 0
    seconds: float = 0.0
    own: float = 0.0

    @property
    def mean(self) -> float:
        """Seconds a call."""
        return self.seconds / self.calls if self.calls else 0.0


class Totals:
    """Calls and seconds by name and category, from all threads."""

    def __init__(self, synchronize: Callable[[], object] | None = None) -> None:
        """`synchronize` is called at both ends of each section: the host waits for the device."""
        self.synchronize = synchronize or (lambda: None)
        self.process = os.getpid()
        self.tracing = False  # sections are ranges of a profiler's trace, too
        self.rows: dict[tuple[str, str], Total] = {}
        self.lock = threading.Lock()
        self.threads = threading.local()

    def enter(self, name: str, category: str) -> None:
        """A section begins in this thread."""
        if os.getpid() != self.process:  # a data worker, whose copy is never read
            return
        self.synchronize()  # waits for the device where asked for
        range_ = None
        if self.tracing:
            range_ = torch.autograd.profiler.record_function(RANGE + name)
            range_.__enter__()  # type: ignore[no-untyped-call]
        self._stack().append([name, category, perf_counter(), 0.0, range_])

    def leave(self) -> None:
        """The section that began last in this thread ends."""
        stack = self._stack()
        if not stack or os.getpid() != self.process:  # began before there was a collector
            return
        self.synchronize()  # waits for the device where asked for
        name, category, start, inside, range_ = stack.pop()
        took = perf_counter() - start
        if range_ is not None:
            range_.__exit__(None, None, None)
        if stack:
            stack[-1][3] += took
        again = any(outer[0] == name for outer in stack)  # a section in itself counts once
        with self.lock:
            if (name, category) not in self.rows and len(self.rows) >= MOST:
                name, category = OTHERS, ""
            row = self.rows.setdefault((name, category), Total(name, category))
            row.calls += 1
            row.seconds += 0.0 if again else took
            row.own += took - inside

    def _stack(self) -> list[list[Any]]:
        """Sections that this thread is in: name, category, start, seconds of inner ones, range."""
        stack: list[list[Any]] = self.threads.__dict__.setdefault("stack", [])
        return stack

    def by_time(self) -> list[Total]:
        """Every section, the longest first."""
        with self.lock:
            return sorted(self.rows.values(), key=lambda row: -row.seconds)

    def by_category(self) -> dict[str, float]:
        """Seconds of each category, each counted once where sections lie in one another."""
        sums: dict[str, float] = {}
        for row in self.by_time():
            sums[row.category] = sums.get(row.category, 0.0) + row.own
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


_collecting: Totals | None = None


class Section(ContextDecorator):
    """A stretch of code with a name; also a decorator. Entered as often, and as deep, as it likes.

    Inside a compiled graph it is nothing: there is no Python left to be timed.
    """

    __slots__ = ("category", "entered", "name")

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
def collect(totals: Totals) -> Iterator[Totals]:
    """Sections count in `totals` meanwhile, in all threads; in no other process."""
    global _collecting
    before, _collecting = _collecting, totals
    try:
        yield totals
    finally:
        _collecting = before


class Sections:
    """The type of `runner.profile`: `section` for one's code, `collect` for one's own loops."""

    section = Section

    @staticmethod
    def collect(synchronize: Callable[[], object] | None = None) -> Any:
        """Time sections in here: `with profile.collect() as totals:`, then `totals.by_time()`."""
        return collect(Totals(synchronize))


profile = Sections()
