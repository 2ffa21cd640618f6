"""The base class of debug tools: limits, cost accounting, isolation of their errors."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from runner.core.errors import RunnerError, error_text
from runner.core.interfaces.hook import Cost, Hook
from runner.core.interfaces.run import Run
from runner.core.record.storage import write_or_log
from runner.core.schemas.debug import DebugConfig
from runner.core.train.device_timing import DeviceStopwatch
from runner.core.train.timing import SETTLING, Stopwatch

log = logging.getLogger("runner")

REFUSED = "state_refused"  # key of a state that is not in the checkpoint


class DebugTool(Hook):
    """A hook for selected steps that rests after debug.max_iterations and timeout_s.

    It also rests after an error in its own code, which is recorded as a fault. A `RunnerError`, or
    an error of the step itself, is not suppressed.
    """

    name: ClassVar[str]
    failure: str = ""  # the error

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        guards: dict[str, Any] = dict.fromkeys((*Hook.EVENTS, "cost"), _guard_event)
        guards |= {"due": _guard_due, "session": _guard_context, "around": _guard_context}
        for name in set(guards) & set(vars(cls)):
            setattr(cls, name, guards[name](vars(cls)[name]))

    def __init__(self, config: DebugConfig, every: int | None = None) -> None:
        self.config = config
        self.every = every or config.every
        self.inspections = 0
        self.seconds = 0.0  # in sessions and events, which no step's time includes
        self.finding = ""
        self.looked_steps: list[int] = []  # inside `around`, by the stopwatch's count
        self.state_refused = False  # `state` had a value that JSON does not have
        self.start_time = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether to act at this step: every n-th, until it rests."""
        return step % self.every == 0 and not self.is_resting(step)

    def is_resting(self, step: int) -> bool:
        """Whether it has failed or reached its limits."""
        if self.failure:
            return True
        max_step, timeout_s = self.config.max_iterations, self.config.timeout_s
        if max_step is not None and step > max_step:
            return True
        return timeout_s is not None and time.monotonic() - self.start_time > timeout_s

    def resume_state(self) -> str:
        """Return `state` with the number of inspections and the finding.

        A state with a value that JSON does not have is left out, with one warning: a save must not
        end the run.
        """
        common = {"inspections": self.inspections, "finding": self.finding}
        try:
            return json.dumps({**common, **self.state()})
        except (TypeError, ValueError) as error:
            if not self.state_refused:
                problem = f"{type(self).__name__}.state: {error}; return values of JSON types"
                log.warning("%s: a resumed run starts the tool without it", problem)
            self.state_refused = True
            return json.dumps({**common, REFUSED: True})

    def load_resume_state(self, text: str) -> None:
        """Continue with that state."""
        state = json.loads(text)
        self.inspections, self.finding = state["inspections"], state["finding"]
        if REFUSED not in state:
            self.load(state)

    def state(self) -> dict[str, Any]:
        """Return more for a resumed run, so that it acts at the steps of an uninterrupted one."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Set what `state` returned, with the types of JSON."""

    def write_json(self, folder: Path | None, name: str, record: Mapping[str, Any]) -> None:
        """Replace a file in the run's folder; an OSError is logged."""
        if folder is not None:
            write_or_log(folder / name, json.dumps(record) + "\n")

    def cost(self, run: Run) -> Cost | None:
        """Return the tool's row in the summary."""
        failed = f"failed: {self.failure}" if self.failure else ""
        finding = "; ".join(filter(None, [self.finding, failed]))
        return Cost(self.name, self.inspections, self.total_seconds(run), finding)

    def total_seconds(self, run: Run) -> float | None:
        """Return what the tool took: `seconds`, and its steps beyond the median of the others.

        None if there is no other step to compare with.
        """
        if not self.looked_steps:
            return self.seconds
        others = run.stopwatch.uninspected_step_seconds(SETTLING)
        timed = _step_seconds(run.stopwatch)
        looked = [timed[step] for step in self.looked_steps if step in timed]
        if not looked or not len(others):
            return None
        extra = float(np.mean(looked)) - float(np.median(others))
        return max(0.0, extra * len(self.looked_steps)) + self.seconds

    @contextmanager
    def isolate_errors(
        self, run: Run, reraised: BaseException | None = None, timed: bool = True
    ) -> Iterator[None]:
        """Suppress and record errors of the tool, except `reraised`; afterwards it rests.

        The time inside is added to the tool's, unless a step's time includes it.
        """
        start = time.perf_counter()
        try:
            yield
        except RunnerError:
            raise
        except Exception as error:  # any error of the tool, the model or the disk
            if error is reraised:
                raise
            self.record_failure(run, error)
        finally:
            self.seconds += time.perf_counter() - start if timed else 0.0

    def record_failure(self, run: Run, error: Exception) -> None:
        """Record the first error; the tool rests from now on."""
        if self.failure:
            return
        self.failure = error_text(error).partition("\n")[0]
        message, step = f"debug tool {self.name}: {self.failure}", run.progress.step
        history, action = run.history, "tool disabled, the run continues"
        history.add("tool_failed", message, step=step, category="code", action=action, error=error)


def _step_seconds(stopwatch: Stopwatch) -> dict[int, float]:
    """Return the seconds of each kept step, on an accelerator of the sampled ones, by number."""
    if isinstance(stopwatch, DeviceStopwatch):
        return {number: seconds for number, seconds, _ in stopwatch.sampled_steps}
    seconds = stopwatch.step_seconds()
    return dict(zip(range(stopwatch.count - len(seconds), stopwatch.count), seconds, strict=True))


def _guard_due(due: Callable[[Any, int], bool]) -> Callable[[Any, int], bool]:
    @wraps(due)
    def guarded(self: DebugTool, step: int) -> bool:
        return not self.failure and due(self, step)

    return guarded


def _guard_event(event: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an event or `cost`; after a failure `cost` is the default row."""

    @wraps(event)
    def guarded(self: DebugTool, run: Run, *arguments: Any) -> Any:
        if not self.failure:
            with self.isolate_errors(run), run.stopwatch.exclude_time(keep_phase=True):
                return event(self, run, *arguments)
        return None if arguments else DebugTool.cost(self, run)

    return guarded


def _guard_context(make_context: Callable[..., AbstractContextManager[Any]]) -> Callable[..., Any]:
    """Wrap `session` or `around`; the time of a session counts, that of a step is in the step."""

    @wraps(make_context)
    @contextmanager
    def guarded(self: DebugTool, run: Run) -> Iterator[None]:
        entered: AbstractContextManager[Any] = nullcontext()
        is_around = make_context.__name__ == "around"
        if not self.failure:
            with self.isolate_errors(run, timed=not is_around):
                if is_around:
                    run.stopwatch.inspect_step()
                    self.looked_steps.append(run.stopwatch.count)
                context = make_context(self, run)
                context.__enter__()
                entered = context
        try:
            yield
        except BaseException as error:
            with self.isolate_errors(run, reraised=error):
                entered.__exit__(type(error), error, error.__traceback__)
            raise
        with self.isolate_errors(run, timed=not is_around):
            entered.__exit__(None, None, None)

    return guarded
