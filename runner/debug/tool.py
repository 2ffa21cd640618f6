"""What the tools have in common: they are bounded, say what they cost, and fail for themselves."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from runner.debug.config import DebugConfig
from runner.errors import RunnerError
from runner.record.storage import replace_text
from runner.training.hook import Cost, Hook
from runner.training.run import Run

log = logging.getLogger("runner")


class Tool(Hook):
    """A hook that takes time at some steps, and rests after debug.max_iterations and timeout_s.

    It rests as well once its own code has failed: that is a fault of the run, not its end. What it
    raises on purpose, a `RunnerError`, passes, and so does what the step itself raises.
    """

    name: ClassVar[str]
    broken: str = ""  # what it failed with

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for names, guard in (
            (("due",), _awake),
            ((*Hook.EVENTS, "cost"), _answered),
            (("session", "around"), _entered),
        ):
            for name in set(names) & set(vars(cls)):
                setattr(cls, name, guard(vars(cls)[name]))

    def __init__(self, config: DebugConfig, every: int | None = None) -> None:
        self.config = config
        self.every = every or config.every
        self.looks = 0
        self.seconds = 0.0
        self.finding = ""
        self.began = time.monotonic()

    def due(self, step: int) -> bool:
        """Each n-th step, until it rests."""
        return step % self.every == 0 and not self.rests(step)

    def rests(self, step: int) -> bool:
        """Whether it has done what it may."""
        if self.broken:
            return True
        most, seconds = self.config.max_iterations, self.config.timeout_s
        if most is not None and step > most:
            return True
        return seconds is not None and time.monotonic() - self.began > seconds

    @contextmanager
    def looking(self) -> Iterator[None]:
        """What happens meanwhile is on the tool's account."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.looks += 1
            self.seconds += time.perf_counter() - start

    def write_json(self, folder: Path | None, name: str, record: Mapping[str, Any]) -> None:
        """Replace a file of the run's folder; a full disk is logged and ends nothing."""
        if folder is None:
            return
        try:
            (folder / name).parent.mkdir(exist_ok=True)
            replace_text(folder / name, json.dumps(record) + "\n")
        except OSError as error:
            log.warning("%s is not written: %s", name, error)

    def cost(self, run: Run) -> Cost | None:
        """Its row of the summary."""
        failed = f"failed: {self.broken}" if self.broken else ""
        finding = "; ".join(filter(None, [self.finding, failed]))
        return Cost(self.name, self.looks, self.seconds, finding)

    def fail(self, run: Run, error: Exception) -> None:
        """From here on it rests; said once."""
        said = f"{type(error).__name__}: {error}"
        if self.broken:
            log.debug("debug tool %s failed again: %s", self.name, said)
            return
        self.broken = said.partition("\n")[0]
        run.history.add(
            "tool_failed",
            f"debug tool {self.name}: {self.broken}",
            step=run.progress.step,
            category="code",
            action="it rests, the run goes on",
            error=error,
        )


def _awake(due: Callable[[Any, int], bool]) -> Callable[[Any, int], bool]:
    @wraps(due)
    def guarded(self: Tool, step: int) -> bool:
        return not self.broken and due(self, step)

    return guarded


def _answered(event: Callable[..., Any]) -> Callable[..., Any]:
    """An event or `cost`; of a tool that failed there is the plain row of the summary left."""

    @wraps(event)
    def guarded(self: Tool, run: Run, *what: Any) -> Any:
        if not self.broken:
            try:
                return event(self, run, *what)
            except RunnerError:
                raise
            except Exception as error:  # whatever a model or a disk has in store for it
                self.fail(run, error)
        return None if what else Tool.cost(self, run)

    return guarded


def _entered(make: Callable[..., AbstractContextManager[Any]]) -> Callable[..., Any]:
    @wraps(make)
    def guarded(self: Tool, run: Run) -> _Guarded:
        return _Guarded(self, run, make)

    return guarded


class _Guarded(AbstractContextManager[None]):
    """A tool's context, whose own errors stay with the tool."""

    def __init__(
        self, tool: Tool, run: Run, make: Callable[..., AbstractContextManager[Any]]
    ) -> None:
        self.tool, self.run, self.make = tool, run, make
        self.inner: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        if self.tool.broken:
            return
        try:
            inner = self.make(self.tool, self.run)
            inner.__enter__()
            self.inner = inner
        except RunnerError:
            raise
        except Exception as error:
            self.tool.fail(self.run, error)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if self.inner is None:
            return None
        try:
            return self.inner.__exit__(kind, error, trace)
        except RunnerError:
            raise
        except Exception as own:
            if own is error:
                raise
            self.tool.fail(self.run, own)
            return None  # what the step raised, if it did, goes on
