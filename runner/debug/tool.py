"""The base class of debug tools: limits, cost accounting, isolation of their errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

from runner.debug.config import DebugConfig
from runner.errors import RunnerError
from runner.record.storage import write_or_log
from runner.training.hook import Cost, Hook
from runner.training.run import Run


class Tool(Hook):
    """A hook for selected steps that rests after debug.max_iterations and timeout_s.

    It also rests after an error in its own code, which is recorded as a fault. A `RunnerError`, or
    an error of the step itself, is not suppressed.
    """

    name: ClassVar[str]
    broken: str = ""  # the error

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        guards: dict[str, Callable[[Any], Any]] = dict.fromkeys((*Hook.EVENTS, "cost"), _event)
        guards |= {"due": _due, "session": _context, "around": _context}
        for name in set(guards) & set(vars(cls)):
            setattr(cls, name, guards[name](vars(cls)[name]))

    def __init__(self, config: DebugConfig, every: int | None = None) -> None:
        self.config = config
        self.every = every or config.every
        self.looks = 0
        self.seconds = 0.0
        self.finding = ""
        self.began = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether to act at this step: every n-th, until it rests."""
        return step % self.every == 0 and not self.rests(step)

    def rests(self, step: int) -> bool:
        """Whether it has failed or reached its limits."""
        if self.broken:
            return True
        most, seconds = self.config.max_iterations, self.config.timeout_s
        if most is not None and step > most:
            return True
        return seconds is not None and time.monotonic() - self.began > seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count a look, and add its time to the tool's cost."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.looks += 1
            self.seconds += time.perf_counter() - start

    def write_json(self, folder: Path | None, name: str, record: Mapping[str, Any]) -> None:
        """Replace a file in the run's folder; an OSError is logged."""
        if folder is not None:
            write_or_log(folder / name, json.dumps(record) + "\n")

    def cost(self, run: Run) -> Cost | None:
        """Return the tool's row in the summary."""
        failed = f"failed: {self.broken}" if self.broken else ""
        finding = "; ".join(filter(None, [self.finding, failed]))
        return Cost(self.name, self.looks, self.seconds, finding)

    @contextmanager
    def shielded(self, run: Run, passes: BaseException | None = None) -> Iterator[None]:
        """Suppress and record errors of the tool, except `passes`; afterwards it rests."""
        try:
            yield
        except RunnerError:
            raise
        except Exception as error:  # any error of the tool, the model or the disk
            if error is passes:
                raise
            self.fail(run, error)

    def fail(self, run: Run, error: Exception) -> None:
        """Record the first error; the tool rests from now on."""
        if self.broken:
            return
        self.broken = f"{type(error).__name__}: {error}".partition("\n")[0]
        run.history.add(
            "tool_failed",
            f"debug tool {self.name}: {self.broken}",
            step=run.progress.step,
            category="code",
            action="tool disabled, the run continues",
            error=error,
        )


def _due(due: Callable[[Any, int], bool]) -> Callable[[Any, int], bool]:
    @wraps(due)
    def guarded(self: Tool, step: int) -> bool:
        return not self.broken and due(self, step)

    return guarded


def _event(event: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an event or `cost`; after a failure `cost` is the default row."""

    @wraps(event)
    def guarded(self: Tool, run: Run, *what: Any) -> Any:
        if not self.broken:
            with self.shielded(run):
                return event(self, run, *what)
        return None if what else Tool.cost(self, run)

    return guarded


def _context(make: Callable[..., AbstractContextManager[Any]]) -> Callable[..., Any]:
    @wraps(make)
    @contextmanager
    def guarded(self: Tool, run: Run) -> Iterator[None]:
        inner: AbstractContextManager[Any] = nullcontext()
        if not self.broken:
            with self.shielded(run):
                own = make(self, run)
                own.__enter__()
                inner = own
        try:
            yield
        except BaseException as error:
            with self.shielded(run, passes=error):
                inner.__exit__(type(error), error, error.__traceback__)
            raise
        with self.shielded(run):
            inner.__exit__(None, None, None)

    return guarded
