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
from runner.debug.profile import tables
from runner.debug.profile.measured import facts, place, slower_by, tools_seconds
from runner.debug.profile.sections import Totals, collect
from runner.debug.profile.trace import Reading, read
from runner.debug.profile.verdict import Facts, verdicts
from runner.debug.profile.window import Window, keep, load
from runner.debug.tool import Tool
from runner.hook import Report, Step
from runner.record import markdown as md
from runner.run import Run
from runner.stopwatch import PHASES, SETTLING
from runner.storage import replace_text

log = logging.getLogger("runner")

BETWEEN = {"whole_step": "the step as one graph", "other": "between steps"}
PAGE, ROWS = "debug/profile.md", "debug/profile.json"


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
        self.reading: Reading | None = None  # of the latest window
        self.uncompiled: Reading | None = None  # of uncompiled steps, in a run that is compiled
        self.uncompiled_next = False  # the next window is of those
        self.without_modules = ""  # why there are no times by module
        self.totals = Totals()
        self.before: dict[str, float] = {}  # what the watch said when the window began
        self.tools_before = 0.0  # and the other tools
        self.apart = dict.fromkeys(PHASES, 0.0)  # seconds of windows, which are no usual steps
        self.tools = 0.0  # seconds of the other debug tools, when last asked
        self.tools_apart = 0.0  # those in windows, or before the steps that the watch counts
        self.verdicts: list[str] = []
        self.facts = Facts({})
        self.collected = 0.0  # seconds for which sections were counted
        self.entered = perf_counter()
        self.files = True  # until a disk is full

    def due(self, step: int) -> bool:
        """At the ends of windows, and at each step in one."""
        return step >= self.next

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Collect sections all the while; say at the end what it all came to."""
        synchronize = None
        if self.own.cuda_synchronize and not run.device.reads_are_free:
            synchronize = run.device.synchronize
        self.totals, self.entered = Totals(synchronize), perf_counter()
        if self.own.at_most:
            span = self.own.warmup + self.own.steps
            span += span + 1 if _compiled(run) else 0
            start = min(self.own.start, max(1, run.total_steps - run.progress.step - span))
            self.next = run.progress.step + start
        try:
            with collect(self.totals):
                yield
        finally:
            self.collected = perf_counter() - self.entered
            if self.window is not None:
                self._close(run, self.window)
            self._conclude(run)

    def on_step(self, run: Run, step: Step) -> None:
        """Begin a window, count its steps, end it; reads nothing of the step."""
        if self.window is None:
            self._begin(run, step.number)
        elif self.window.step() or step.number >= run.total_steps:
            self._close(run, self.window)

    def on_report(self, run: Run, report: Report) -> None:
        """Remember the seconds of the other tools so far."""
        self.tools = tools_seconds(run)  # here: what they draw at the end is no part of any step
        if len(run.watch.steps) <= SETTLING:
            self.tools_apart = self.tools

    def markdown(self) -> str:
        """All of it as a document."""
        lines = ["# Profile", "", *(f"- {md.escape(said)}" for said in self.verdicts), ""]
        split = [("a step", f"{self.facts.step_ms:.3g} ms")]
        split += [(BETWEEN.get(k, k), f"{v:.1%}") for k, v in self.facts.split.items() if v]
        lines += ["## Time of a step", "", md.table(("", ""), split), ""]
        lines += ["Of the steps that were not profiled, without the time of debug tools.", ""]
        if self.reading is not None:
            row = next(row for row in reversed(self.windows) if not row["eager"])
            last = row["first"] + row["steps"] - 1
            lines += [f"## Steps {row['first']} to {last}, profiled", ""]
            lines += [md.table(("", ""), tables.window(self.reading)), ""]
            lines += ["### Operators", "", tables.operators(self.reading)]
            lines += ["### Modules", "", self._modules(), ""]
        if self.totals.rows:
            lines += ["## Sections", "", tables.sections(self.totals, self.collected or 1.0)]
        if kept := [row["trace"] for row in self.windows if row["trace"]]:
            lines += ["## Traces", "", "To be opened in ui.perfetto.dev:", ""]
            lines += [f"- `{name}`" for name in kept]
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"

    # -- windows -------------------------------------------------------------------------------

    def _begin(self, run: Run, step: int) -> None:
        if self.rests(step):
            self.next = math.inf
            return
        if run.strict:  # the techniques are about to be proved, with a profiler of their own
            self.next = step + 1
            return
        steps, free = place(run, step, self.own.warmup, self.own.steps)
        if free > step:
            self.next = free
            return
        start, self.before = perf_counter(), dict(run.watch.spent)
        self.tools_before = tools_seconds(run)
        try:
            self.window = Window(run, self.own, self.totals, steps, self.uncompiled_next)
        except RuntimeError as error:  # somebody else profiles
            self._give_up(run, error)
        else:
            self.next = step + 1
        self.seconds += perf_counter() - start

    def _close(self, run: Run, window: Window) -> None:
        self.window = None
        step = run.progress.step
        made = sum(not row["eager"] for row in self.windows) + (not window.eager)
        more = made < self.own.at_most and self.own.repeat_every is not None
        self.next = step + (self.own.repeat_every or 0) if more else math.inf
        self.uncompiled_next = not window.eager and self.uncompiled is None and _compiled(run)
        if self.uncompiled_next and step + self.own.warmup + 1 < run.total_steps:
            self.next = step
        slower = slower_by(run, window)
        start = perf_counter()
        path = None
        try:
            path = window.stop()
            if path is not None:
                row: dict[str, Any] = {"first": window.first, "steps": window.recorded}
                row["eager"] = window.eager
                if self.own.handler is not ProfileHandler.trace:
                    self._read(window, load(path), row)
                row["trace"] = self._keep(run, path, window.first)
                self.windows.append(row)
        except (OSError, ValueError, RuntimeError) as error:
            self._give_up(run, error)
        finally:
            if path is not None:
                path.unlink(missing_ok=True)
        took = perf_counter() - start
        spent = run.watch.spent
        for phase in spent:  # the watch may have begun anew since: then it knows of less
            self.apart[phase] += max(0.0, spent[phase] - self.before.get(phase, 0.0))
        self.apart["other"] += took if run.watch.running else 0.0
        self.tools = tools_seconds(run)
        self.tools_apart += self.tools - self.tools_before
        if path is not None:
            self._judge(run)
            self._show(run)
        self.looks += 1
        self.seconds += perf_counter() - start + slower

    def _read(self, window: Window, trace: dict[str, Any] | None, row: dict[str, Any]) -> None:
        if trace is None:
            log.warning("profile: the trace is too large to be read; lower debug.profile.steps")
            return
        reading = read(trace, self.own.shapes, window.recorded)
        reading.calibration_share = median(window.calibrations or [0.0])
        row |= tables.as_rows(reading)
        if window.eager:
            self.uncompiled = reading
        else:
            self.reading, self.without_modules = reading, window.modules

    def _keep(self, run: Run, path: Any, first: int) -> str | None:
        if run.folder is None or self.own.handler is ProfileHandler.table or not self.files:
            return None
        name = f"step_{first:08d}.json.gz"
        try:
            kept = keep(path, run.folder, name, self.own.traces_mb * 2**20)
        except OSError as error:
            self._lose_files(error)
            return None
        if kept is None:
            log.warning("profile: a trace is larger than debug.profile.traces_mb, and not kept")
        return kept

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

    # -- what it says --------------------------------------------------------------------------

    def _judge(self, run: Run) -> None:
        tools = max(0.0, self.tools - self.tools_apart)
        self.facts = facts(run, self.reading, self.uncompiled, self.apart, tools)
        self.verdicts = verdicts(self.facts)
        self.finding = "; ".join(self.verdicts[:2])

    def _modules(self) -> str:
        if self.uncompiled is not None and self.uncompiled.modules:
            return f"Of uncompiled steps:\n\n{tables.modules(self.uncompiled)}"
        if self.reading is not None and self.reading.modules:
            return tables.modules(self.reading)
        return f"No times by module: {self.without_modules or 'debug.profile.modules=false'}.\n"

    def _show(self, run: Run) -> None:
        step, facts = run.progress.step, self.facts
        values = {"step_ms": facts.step_ms}
        values |= {f"{name}_percent": share * 100 for name, share in facts.split.items() if share}
        if self.reading is not None:
            values["operators_per_step"] = facts.operators
            if self.reading.busy is not None:
                values["device_busy_percent"] = self.reading.busy * 100
            if self.reading.tensor_cores is not None:
                values["tensor_core_percent"] = self.reading.tensor_cores * 100
            run.recorder.text("profile/operators", tables.operators(self.reading), step)
            run.recorder.text("profile/modules", self._modules(), step)
        run.recorder.show(step, "profile", values)

    def _conclude(self, run: Run) -> None:
        """The verdict over the whole run, in TensorBoard and in two files."""
        with self._accounted():
            self._judge(run)
            step = run.progress.step
            said = "\n".join(f"- {md.escape(verdict)}" for verdict in self.verdicts)
            run.recorder.text("profile/verdict", said, step)
            if self.totals.rows:
                table = tables.sections(self.totals, self.collected)
                run.recorder.text("profile/sections", table, step)
                sums = self.totals.by_category()
                run.recorder.show(
                    step, "profile/sections", {k or "none": v for k, v in sums.items()}
                )
            if run.folder is not None and self.files:
                rows = {
                    "verdicts": self.verdicts,
                    "facts": asdict(self.facts) | {"techniques": sorted(self.facts.techniques)},
                    "windows": self.windows,
                    "without_modules": self.without_modules,
                    "seconds": self.collected,
                    "sections": tables.section_rows(self.totals.by_time()),
                    "categories": self.totals.by_category(),
                }
                try:
                    _write(run.folder / ROWS, json.dumps(rows, indent=2) + "\n")
                    _write(run.folder / PAGE, self.markdown())
                except OSError as error:
                    self._lose_files(error)

    def _lose_files(self, error: OSError) -> None:
        self.files = False
        log.warning("profile: no more files in debug/, the run goes on: %s", error)

    @contextmanager
    def _accounted(self) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds += perf_counter() - start


def _compiled(run: Run) -> bool:
    return run.whole is not None or (run.compilation is not None and bool(run.compilation.mode))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)
