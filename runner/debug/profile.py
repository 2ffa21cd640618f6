"""Where the time of a step goes, in a few profiled steps and over the whole run, and why."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median
from time import perf_counter
from typing import Any, ClassVar

from runner.debug.config import DebugConfig
from runner.debug.profile_report import (
    Facts,
    operator_name,
    section_table,
    trace_table,
    verdicts,
)
from runner.debug.profile_trace import Trace, Window
from runner.debug.sections import Totals, collect
from runner.debug.tool import Tool
from runner.record import markdown as md
from runner.record.storage import replace_text
from runner.training.hook import Report, Step
from runner.training.run import Run
from runner.training.step import overrides_event
from runner.training.timing import PHASES, SETTLING

log = logging.getLogger("runner")

PHASE_NAMES = {"whole_step": "the step as one graph", "other": "between steps"}
PAGE, ROWS, TRACES = "debug/profile.md", "debug/profile.json", "debug/traces"
AHEAD = 1000  # steps in which a place for the window is looked for
QUIET = "KINETO_LOG_LEVEL"


class ProfileTool(Tool):
    """A window of torch.profiler, the user's sections; says what would make a run faster.

    Outside of its window it makes no step slower. On its account: starting the profiler and
    reading its events.
    """

    name: ClassVar[str] = "profile"

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config)
        self.own = config.profile
        self.next = math.inf  # step after which there is something to do
        self.window: Window | None = None
        self.trace: Trace | None = None
        self.trace_file = ""
        self.first = 0  # step of the trace
        self.totals = Totals()
        self.before: dict[str, float] = {}  # the stopwatch when the window began
        self.excluded = dict.fromkeys(PHASES, 0.0)  # seconds of the window: no usual steps
        self.verdicts: list[str] = []
        self.facts = Facts({})
        self.collected = 0.0  # seconds for which sections were counted
        self.tools = 0.0  # seconds of the other debug tools, without what they draw at the end

    def due(self, step: int) -> bool:
        """At the ends of the window, and at each step in it."""
        return step >= self.next

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Collect sections all the while; sum up at the end."""
        latest = run.total_steps - run.progress.step - self.own.warmup - self.own.steps
        self.next = run.progress.step + min(self.own.start, max(1, latest))
        entered, loud = perf_counter(), QUIET not in os.environ
        os.environ.setdefault(QUIET, "6")  # else Kineto says on stderr that it starts and stops
        try:
            with collect() as self.totals:
                yield
        finally:
            self.collected = perf_counter() - entered
            if self.window is not None:
                self._close(run, self.window)
            if loud:
                os.environ.pop(QUIET, None)
            start = perf_counter()
            self._conclude(run)
            self.seconds += perf_counter() - start

    def on_step(self, run: Run, step: Step) -> None:
        """Begin the window, count its steps, end it; reads nothing of the step."""
        if self.window is None:
            self._begin(run, step.number)
        elif self.window.step() or step.number >= run.total_steps:
            self._close(run, self.window)

    def on_report(self, run: Run, report: Report) -> None:
        """Remember what the other tools took so far."""
        tools = (hook for hook in run.hooks if isinstance(hook, Tool) and hook is not self)
        self.tools = sum(tool.seconds for tool in tools)

    # -- the window ----------------------------------------------------------------------------

    def _begin(self, run: Run, step: int) -> None:
        if self.rests(step):
            self.next = math.inf
            return
        if run.strict:  # the techniques are about to be proved, with a profiler of their own
            self.next = step + 1
            return
        steps, free = _place_window(run, step, self.own.warmup, self.own.steps)
        self.next = max(free, step + 1)
        if free > step:
            return
        start = perf_counter()
        self.before = dict(run.watch.spent)
        try:
            self.window = Window(run, self.own, self.totals, steps)
        except RuntimeError as error:  # another profiler is at work
            self._give_up(run, error)
        self.seconds += perf_counter() - start

    def _close(self, run: Run, window: Window) -> None:
        self.window, self.next = None, math.inf
        start = perf_counter()
        try:
            window.stop()
            if window.recorded:
                self.trace, self.first = window.read(), window.first
                self._store(run, window)
        except (ValueError, RuntimeError) as error:
            self._give_up(run, error)
        for phase, seconds in run.watch.spent.items():
            # the watch may have begun anew since: then it knows of less
            self.excluded[phase] = max(0.0, seconds - self.before.get(phase, 0.0))
        self.excluded["other"] += perf_counter() - start if run.watch.running else 0.0
        self._judge(run)
        self._show(run)
        self.looks += 1
        self.seconds += perf_counter() - start

    def _store(self, run: Run, window: Window) -> None:
        if run.folder is None:
            return
        name = f"{TRACES}/step_{window.first:08d}.json.gz"
        try:
            window.store(run.folder / name)
            self.trace_file = name
        except OSError as error:
            log.warning("profile: no trace: %s", error)

    def _give_up(self, run: Run, error: Exception) -> None:
        self.next = math.inf
        run.history.add(
            "no_profile",
            f"torch.profiler: {error}",
            step=run.progress.step,
            category="performance",
            action="no trace",
            error=error,
        )

    # -- findings ------------------------------------------------------------------------------

    def _judge(self, run: Run) -> None:
        self.facts = _collect_facts(run, self.trace, self.excluded, self.tools)
        self.verdicts = verdicts(self.facts)
        self.finding = "; ".join(self.verdicts[:2])

    def _show(self, run: Run) -> None:
        step, facts = run.progress.step, self.facts
        values = {"step_ms": facts.step_ms}
        values |= {f"{name}_percent": share * 100 for name, share in facts.split.items() if share}
        if self.trace is not None:
            values["operators_per_step"] = facts.operators
            run.recorder.text("profile/trace", trace_table(self.trace), step)
        if facts.busy is not None:
            values["device_busy_percent"] = facts.busy * 100
        run.recorder.show(step, "profile", values)

    def _conclude(self, run: Run) -> None:
        """The verdict over the whole run, in TensorBoard and in two files."""
        self._judge(run)
        text = "\n".join(f"- {md.escape(verdict)}" for verdict in self.verdicts)
        run.recorder.text("profile/verdict", text, run.progress.step)
        record = {
            "verdicts": self.verdicts,
            "facts": asdict(self.facts) | {"techniques": sorted(self.facts.techniques)},
            "first": self.first,
            "trace_file": self.trace_file,
            "trace": self.trace.as_dict() if self.trace else None,
            "seconds": self.collected,
            "sections": [vars(total) | {"mean": total.mean} for total in self.totals.by_time()],
        }
        self.write_json(run.folder, ROWS, record)
        if run.folder is not None:
            try:
                replace_text(run.folder / PAGE, self.markdown())
            except OSError as error:
                log.warning("%s is not written: %s", PAGE, error)

    def markdown(self) -> str:
        """All of it as a document."""
        lines = ["# Profile", "", *(f"- {md.escape(verdict)}" for verdict in self.verdicts), ""]
        split = [("a step", f"{self.facts.step_ms:.3g} ms")]
        split += [(PHASE_NAMES.get(k, k), f"{v:.1%}") for k, v in self.facts.split.items() if v]
        lines += ["## Time of a step", "", md.table(("", ""), split), ""]
        lines += ["Of the steps that were not profiled, without the time of debug tools.", ""]
        if self.trace is not None:
            last = self.first + self.trace.steps - 1
            lines += [f"## Steps {self.first} to {last}, profiled", "", trace_table(self.trace)]
        if self.trace_file:
            lines += ["", f"To be opened in ui.perfetto.dev: `{self.trace_file}`"]
        if self.totals.rows:
            lines += ["", "## Sections", "", section_table(self.totals, self.collected)]
        return "\n".join(lines).rstrip() + "\n"


def _place_window(run: Run, step: int, warmup: int, steps: int) -> tuple[int, int]:
    """How many steps to keep, and the first step, from this one on, to begin after.

    Validations, checkpoints and other tools' looks do not belong in a window: it is moved, or made
    smaller, to lie between two of them. Where there is no such place, they are in it.
    """
    looks = [
        hook.every
        for hook in run.hooks
        if isinstance(hook, Tool) and overrides_event(hook, "around") and hook.every > 2
    ]
    ends = [run.validate_every, run.checkpoint_every]  # after a step of these there is a pause
    room = [pace - 1 - warmup for pace in (*ends, *looks)]
    steps = min([steps, *(most for most in room if most > 0)])
    span = warmup + steps

    def is_clear(first: int) -> bool:
        made = range(first, first + span)
        return not any(step % pace == 0 for step in made for pace in ends) and not any(
            (step + 1) % pace == 0 for step in made for pace in looks
        )

    latest = min(step + AHEAD, run.total_steps - span)
    return steps, next((first for first in range(step, latest + 1) if is_clear(first)), step)


def _collect_facts(
    run: Run, trace: Trace | None, excluded: dict[str, float], tools: float
) -> Facts:
    """What is known of the run's steps; `excluded` are seconds of the window by phase.

    The seconds of other debug `tools` lie between steps for the most part: more than the truth is
    excluded rather than less.
    """
    spent = {phase: max(0.0, run.watch.spent[phase] - excluded[phase]) for phase in PHASES}
    spent["other"] = max(0.0, spent["other"] - tools)
    if not any(spent.values()):
        spent = dict(run.watch.spent)
    whole = sum(spent.values())
    steps = run.watch.steps[SETTLING:] or run.watch.steps
    workers = next((choice for choice in run.choices if choice.key == "data.workers"), None)
    return Facts(
        split={phase: seconds / whole for phase, seconds in spent.items()} if whole else {},
        step_ms=median(steps) * 1e3 if steps else 0.0,
        workers=int(workers.value if workers else run.settings.get("data.workers") or 0),
        in_memory=bool(workers and "in memory" in workers.reason),
        cores=run.device.cores,
        techniques=frozenset(name for name, _ in run.techniques if name not in run.fallen),
        **_trace_facts(trace),
    )


def _trace_facts(trace: Trace | None) -> dict[str, Any]:
    if trace is None or not trace.calls or not trace.seconds:
        return {}
    steps, largest = max(1, trace.steps), trace.operators[0]
    (module, share), caller = trace.hot_spot, trace.caller
    return {
        "operators": trace.calls / steps,
        "calling": trace.calling,
        "operator": operator_name(largest.name),
        "operator_share": largest.seconds / (trace.operator_seconds or 1.0),
        "operator_ms": largest.seconds / steps * 1e3,
        "busy": trace.busy,
        "module": module.name if module else "",
        "module_share": share,
        "caller": caller.name if caller else "",
        "caller_operators": caller.operators / steps if caller else 0.0,
    }
