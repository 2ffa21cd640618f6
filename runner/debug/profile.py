"""Where the time of a step goes, in a few profiled steps and over the whole run, and why."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, ClassVar

from runner.debug.config import DebugConfig, ProfileHandler
from runner.debug.profile_report import (
    Facts,
    module_table,
    operator_table,
    section_table,
    verdicts,
    window_rows,
)
from runner.debug.profile_trace import GRAPHS, Trace, read_trace
from runner.debug.profile_window import Window, store_trace
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
PAGE, ROWS = "debug/profile.md", "debug/profile.json"
AHEAD = 1000  # steps in which a place for a window is looked for
BEFORE = 50  # steps before a window that say how long one takes by itself
LARGEST = 512 * 2**20  # bytes of a trace that is read; it takes seconds and memory


def _is_compiled(run: Run) -> bool:
    return run.whole is not None or (run.compilation is not None and bool(run.compilation.mode))


def _tool_seconds(run: Run) -> float:
    """What the other debug tools have on their accounts so far."""
    tools = (hook for hook in run.hooks if isinstance(hook, Tool) and hook.name != "profile")
    return sum(tool.seconds for tool in tools)


def _slowdown(run: Run, window: Window) -> float:
    """Seconds by which the window's steps were longer than those before it."""
    steps, span = run.watch.steps, window.made
    usual = steps[SETTLING : max(0, len(steps) - span)][-BEFORE:]
    inside = steps[len(steps) - span + 1 :] if span > 1 else []  # the first one has the start in it
    if not usual or not inside:
        return 0.0
    return max(0.0, sum(inside) - len(inside) * median(usual))


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
    run: Run, trace: Trace | None, eager: Trace | None, excluded: dict[str, float], tools: float
) -> Facts:
    """What is known of the run's steps; `eager` is the trace of uncompiled ones.

    `excluded` are seconds of windows by phase. Those of debug `tools` lie between steps for the
    most part, and are taken from there; where some are in a forward or backward, less than the
    truth is said to be between steps.
    """
    spent = {phase: max(0.0, run.watch.spent[phase] - excluded[phase]) for phase in PHASES}
    spent["other"] = max(0.0, spent["other"] - tools)
    if not any(spent.values()):
        spent = dict(run.watch.spent)
    whole = sum(spent.values())
    steps = run.watch.steps[SETTLING:] or run.watch.steps
    workers = next((choice for choice in run.choices if choice.key == "data.workers"), None)
    known: dict[str, Any] = _trace_facts(trace) if trace is not None else {}
    shown = eager or trace
    module, share = shown.hot_spot if shown is not None else (None, 0.0)
    if shown is not None and module is not None:
        known |= {
            "module": module.name,
            "module_share": share,
            "module_calls": module.calls / max(1, shown.steps),
            "module_operators": module.operators / max(1, shown.steps),
            "module_eager": eager is not None,
        }
    return Facts(
        split={phase: seconds / whole for phase, seconds in spent.items()} if whole else {},
        step_ms=median(steps) * 1e3 if steps else 0.0,
        workers=int(workers.value if workers else run.settings.get("data.workers") or 0),
        in_memory=bool(workers and "in memory" in workers.reason),
        cores=run.device.cores,
        techniques=frozenset(name for name, _ in run.techniques if name not in run.fallen),
        **known,
    )


def _trace_facts(trace: Trace) -> dict[str, Any]:
    if not trace.calls or not trace.seconds:
        return {}
    kinds, steps = trace.kinds, max(1, trace.steps)
    copied = sum(c.seconds for way, c in trace.copies.items() if way in ("HtoD", "DtoH"))
    graph = kinds.pop(GRAPHS, 0.0)
    return {
        "operators": trace.calls / steps,
        "calling": trace.calling,
        "operator_share": trace.operator_seconds / trace.seconds,
        "kinds": kinds,
        "graph": graph,
        "graph_ms": graph * trace.operator_seconds / steps * 1e3,
        "copies": copied / trace.seconds,
        "busy": trace.busy,
    }


class Profile(Tool):
    """Windows of torch.profiler, the user's sections; says what would make a run faster.

    A window shows the run as it is, compiled or not; where steps are compiled, a second one shows
    the modules of uncompiled steps, once a run. Outside of windows it makes no step slower.
    What is on its account: starting the profiler, by how much the steps of a window were longer
    than those before, and reading the trace, 10 µs an operator.
    """

    name: ClassVar[str] = "profile"

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config)
        self.own = config.profile
        self.next = math.inf  # step after which there is something to do
        self.window: Window | None = None
        self.windows: list[dict[str, Any]] = []
        self.trace: Trace | None = None  # of the latest window
        self.uncompiled: Trace | None = None  # of uncompiled steps, in a run that is compiled
        self.uncompiled_next = False  # the next window is of those
        self.without_modules = ""  # why there are no times by module
        self.totals = Totals()
        self.before: dict[str, float] = {}  # the stopwatch when the window began
        self.tools_before = 0.0  # and the other tools
        self.excluded = dict.fromkeys(PHASES, 0.0)  # seconds of windows, which are no usual steps
        self.tools = 0.0  # seconds of the other debug tools, when last asked
        self.tools_excluded = 0.0  # those in windows, or before the steps that the watch counts
        self.verdicts: list[str] = []
        self.facts = Facts({})
        self.collected = 0.0  # seconds for which sections were counted
        self.files = True  # until a disk is full

    def due(self, step: int) -> bool:
        """At the ends of windows, and at each step in one."""
        return step >= self.next

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Collect sections all the while; sum up at the end."""
        waits = self.own.cuda_synchronize and not run.device.reads_are_free
        self.totals, entered = Totals(run.device.synchronize if waits else None), perf_counter()
        if self.own.at_most:
            span = self.own.warmup + self.own.steps
            span += span + 1 if _is_compiled(run) else 0
            start = min(self.own.start, max(1, run.total_steps - run.progress.step - span))
            self.next = run.progress.step + start
        try:
            with collect(self.totals):
                yield
        finally:
            self.collected = perf_counter() - entered
            if self.window is not None:
                self._close(run, self.window)
            start_s = perf_counter()
            self._conclude(run)
            self.seconds += perf_counter() - start_s

    def on_step(self, run: Run, step: Step) -> None:
        """Begin a window, count its steps, end it; reads nothing of the step."""
        if self.window is None:
            self._begin(run, step.number)
        elif self.window.step() or step.number >= run.total_steps:
            self._close(run, self.window)

    def on_report(self, run: Run, report: Report) -> None:
        """Remember the seconds of the other tools so far: what they draw at the end is no step."""
        self.tools = _tool_seconds(run)
        if len(run.watch.steps) <= SETTLING:
            self.tools_excluded = self.tools

    # -- windows -------------------------------------------------------------------------------

    def _begin(self, run: Run, step: int) -> None:
        if self.rests(step):
            self.next = math.inf
            return
        if run.strict:  # the techniques are about to be proved, with a profiler of their own
            self.next = step + 1
            return
        steps, free = _place_window(run, step, self.own.warmup, self.own.steps)
        if free > step:
            self.next = free
            return
        start, self.before = perf_counter(), dict(run.watch.spent)
        self.tools_before = _tool_seconds(run)
        try:
            self.window = Window(run, self.own, self.totals, steps, self.uncompiled_next)
            self.next = step + 1
        except RuntimeError as error:  # another profiler is at work
            self._give_up(run, error)
        self.seconds += perf_counter() - start

    def _close(self, run: Run, window: Window) -> None:
        self.window = None
        self._schedule_next(run, window)
        slower, start, path = _slowdown(run, window), perf_counter(), None
        try:
            path = window.stop()
            if path is not None:
                self._add_window(run, window, path)
        except (OSError, ValueError, RuntimeError) as error:
            self._give_up(run, error)
        finally:
            if path is not None:
                path.unlink(missing_ok=True)
        self._exclude(run, perf_counter() - start)
        if path is not None:
            self._judge(run)
            self._show(run)
        self.looks += 1
        self.seconds += perf_counter() - start + slower

    def _schedule_next(self, run: Run, window: Window) -> None:
        step = run.progress.step
        made = sum(not row["eager"] for row in self.windows) + (not window.eager)
        more = made < self.own.at_most and self.own.repeat_every is not None
        self.next = step + (self.own.repeat_every or 0) if more else math.inf
        self.uncompiled_next = not window.eager and self.uncompiled is None and _is_compiled(run)
        if self.uncompiled_next and step + self.own.warmup + 1 < run.total_steps:
            self.next = step

    def _exclude(self, run: Run, reading_s: float) -> None:
        """Take the window's seconds, and those of reading it, from the usual steps."""
        for phase, seconds in run.watch.spent.items():
            # the watch may have begun anew since: then it knows of less
            self.excluded[phase] += max(0.0, seconds - self.before.get(phase, 0.0))
        self.excluded["other"] += reading_s if run.watch.running else 0.0
        self.tools = _tool_seconds(run)
        self.tools_excluded += self.tools - self.tools_before

    def _add_window(self, run: Run, window: Window, path: Path) -> None:
        row: dict[str, Any] = {"first": window.first, "steps": window.recorded}
        row["eager"] = window.eager
        if self.own.handler is not ProfileHandler.trace:
            self._read(window, path, row)
        row["trace"] = self._keep(run, path, window.first)
        self.windows.append(row)

    def _read(self, window: Window, path: Path, row: dict[str, Any]) -> None:
        if path.stat().st_size > LARGEST:
            log.warning("profile: the trace is too large to be read; lower debug.profile.steps")
            return
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        trace = read_trace(content, self.own.shapes, window.recorded)
        trace.calibration_share = median(window.calibrations or [0.0])
        row |= trace.as_dict()
        if window.eager:
            self.uncompiled = trace
        else:
            self.trace, self.without_modules = trace, window.without_modules

    def _keep(self, run: Run, path: Path, first: int) -> str | None:
        if run.folder is None or self.own.handler is ProfileHandler.table or not self.files:
            return None
        name = f"step_{first:08d}.json.gz"
        try:
            stored = store_trace(path, run.folder, name, self.own.traces_mb * 2**20)
        except OSError as error:
            self._stop_writing(error)
            return None
        if stored is None:
            log.warning("profile: a trace is larger than debug.profile.traces_mb, and not kept")
        return stored

    def _give_up(self, run: Run, error: Exception) -> None:
        self.next = math.inf
        run.history.add(
            "no_profile",
            f"torch.profiler: {error}",
            step=run.progress.step,
            category="performance",
            action="no more windows",
            error=error,
        )

    # -- findings ------------------------------------------------------------------------------

    def _judge(self, run: Run) -> None:
        tools = max(0.0, self.tools - self.tools_excluded)
        self.facts = _collect_facts(run, self.trace, self.uncompiled, self.excluded, tools)
        self.verdicts = verdicts(self.facts)
        self.finding = "; ".join(self.verdicts[:2])

    def _modules(self) -> str:
        if self.uncompiled is not None and self.uncompiled.modules:
            return f"Of uncompiled steps:\n\n{module_table(self.uncompiled)}"
        if self.trace is not None and self.trace.modules:
            return module_table(self.trace)
        return f"No times by module: {self.without_modules or 'debug.profile.modules=false'}.\n"

    def _show(self, run: Run) -> None:
        step, facts, trace = run.progress.step, self.facts, self.trace
        values = {"step_ms": facts.step_ms}
        values |= {f"{name}_percent": share * 100 for name, share in facts.split.items() if share}
        if trace is not None:
            values["operators_per_step"] = facts.operators
            if trace.busy is not None:
                values["device_busy_percent"] = trace.busy * 100
            if trace.tensor_cores is not None:
                values["tensor_core_percent"] = trace.tensor_cores * 100
            run.recorder.text("profile/operators", operator_table(trace), step)
            run.recorder.text("profile/modules", self._modules(), step)
        run.recorder.show(step, "profile", values)

    def _conclude(self, run: Run) -> None:
        """The verdict over the whole run, in TensorBoard and in two files."""
        self._judge(run)
        step, categories = run.progress.step, self.totals.by_category()
        text = "\n".join(f"- {md.escape(verdict)}" for verdict in self.verdicts)
        run.recorder.text("profile/verdict", text, step)
        if self.totals.rows:
            table = section_table(self.totals, self.collected)
            run.recorder.text("profile/sections", table, step)
            sums = {name or "none": seconds for name, seconds in categories.items()}
            run.recorder.show(step, "profile/sections", sums)
        if run.folder is None or not self.files:
            return
        record = {
            "verdicts": self.verdicts,
            "facts": asdict(self.facts) | {"techniques": sorted(self.facts.techniques)},
            "windows": self.windows,
            "without_modules": self.without_modules,
            "seconds": self.collected,
            "sections": [vars(total) | {"mean": total.mean} for total in self.totals.by_time()],
            "categories": categories,
        }
        try:
            (run.folder / ROWS).parent.mkdir(parents=True, exist_ok=True)
            replace_text(run.folder / ROWS, json.dumps(record, indent=2) + "\n")
            replace_text(run.folder / PAGE, self.markdown())
        except OSError as error:
            self._stop_writing(error)

    def markdown(self) -> str:
        """All of it as a document."""
        lines = ["# Profile", "", *(f"- {md.escape(said)}" for said in self.verdicts), ""]
        split = [("a step", f"{self.facts.step_ms:.3g} ms")]
        split += [(PHASE_NAMES.get(k, k), f"{v:.1%}") for k, v in self.facts.split.items() if v]
        lines += ["## Time of a step", "", md.table(("", ""), split), ""]
        lines += ["Of the steps that were not profiled, without the time of debug tools.", ""]
        if self.trace is not None:
            row = next(row for row in reversed(self.windows) if not row["eager"])
            last = row["first"] + row["steps"] - 1
            lines += [f"## Steps {row['first']} to {last}, profiled", ""]
            lines += [md.table(("", ""), window_rows(self.trace)), ""]
            lines += ["### Operators", "", operator_table(self.trace)]
            lines += ["### Modules", "", self._modules(), ""]
        if self.totals.rows:
            lines += ["## Sections", "", section_table(self.totals, self.collected or 1.0)]
        if traces := [row["trace"] for row in self.windows if row["trace"]]:
            lines += ["## Traces", "", "To be opened in ui.perfetto.dev:", ""]
            lines += [f"- `{name}`" for name in traces]
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"

    def _stop_writing(self, error: OSError) -> None:
        self.files = False
        log.warning("profile: no more files in debug/, the run goes on: %s", error)
