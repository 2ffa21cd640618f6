"""Profile a few steps with torch.profiler; explain where step time goes in the whole run."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import torch
from torch._C._autograd import DeviceType

from runner.debug.config import DebugConfig, ProfileConfig
from runner.debug.sections import Totals, collect
from runner.debug.tool import Tool
from runner.record import markdown
from runner.record.storage import write_or_log
from runner.training.hook import Report, Step
from runner.training.run import Run
from runner.training.step import overrides_event
from runner.training.timing import PHASES

log = logging.getLogger("runner")

PHASE_NAMES = {"whole_step": "the step as one graph", "other": "between steps"}
PAGE, ROWS, TRACES = "debug/profile.md", "debug/profile.json", "debug/traces"
QUIET = "KINETO_LOG_LEVEL"
SHOWN = 15  # operators in a table
AHEAD = 1000  # steps to search for a place for the window
GRAPH = "compiled graph"

WAITS = 0.2  # share of a step
LONG = 0.25  # share of a step, of the optimizer or of what is between steps
BUSY = 0.7  # above this share of busy time the accelerator is the limit
MANY = 100  # operators per step
SMALL_US = 20.0  # step time per operator; a call takes 5 to 15
LARGE = 0.3  # share of operator time above which one operator is reported


@dataclass
class Facts:
    """Measurements of a step, outside the profiler's window if possible; shares are of its time."""

    split: dict[str, float] = field(default_factory=dict)  # by phase, as in the summary
    step_ms: float = 0.0
    operators: float = 0.0  # called per step
    operator: str = ""  # with the most time
    operator_share: float = 0.0
    operator_ms: float = 0.0  # of that operator, per step
    busy: float | None = None  # share of time in which the accelerator computed
    workers: int = 0  # data workers
    in_memory: bool = False
    cores: int = 1
    techniques: list[str] = field(default_factory=list)  # applied ones

    @property
    def idle(self) -> bool:
        """Whether the host limits the speed of a step."""
        return self.busy is None or self.busy < BUSY

    @property
    def waits(self) -> bool:
        """Whether waiting for data dominates; never for data in memory."""
        return self.idle and not self.in_memory and self.split.get("data", 0.0) > WAITS


def verdicts(facts: Facts) -> list[str]:
    """Return the conclusions, most important first; never empty."""
    split = facts.split if facts.idle else {}
    texts = [*_operators(facts), *_phases(facts, split)]
    if texts:
        return texts
    parts = sorted(facts.split.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in parts if share)
    many = f"{facts.operators:,.0f} operators a step, " if facts.operators else ""
    return [f"no bottleneck: {many}{shares}" if shares else "too few steps for a result"]


def _operators(facts: Facts) -> Iterator[str]:
    small = facts.operators >= MANY and facts.step_ms * 1e3 < SMALL_US * facts.operators
    if small and facts.idle and not facts.waits:
        compiled = "whole_step" in facts.techniques
        fix = "a larger training.batch_size" if compiled else "optimization.whole_step.enabled=true"
        busy = "" if facts.busy is None else f", the device busy {facts.busy:.0%} of the time"
        yield f"host-bound: {facts.operators:,.0f} small operators a step{busy}: {fix}"
    elif not facts.waits and facts.operator_share > LARGE:
        text = f"{facts.operator} takes {facts.operator_share:.0%} of the operators' time, "
        text += f"{facts.operator_ms:.3g} ms a step"
        if "amp" not in facts.techniques and not facts.operator.startswith(GRAPH):
            text += "; 16 bits may help: optimization.amp.enabled=true"
        yield text


def _phases(facts: Facts, split: dict[str, float]) -> Iterator[str]:
    if (share := split.get("data", 0.0)) > WAITS:
        fix = f"raise data.workers (now {facts.workers})"
        if facts.workers >= facts.cores:
            fix = f"all {facts.cores} cores fetch already; make samples cheaper to read"
        if facts.in_memory:
            fix = "the data is in memory; use a larger training.batch_size"
        yield f"{share:.0%} of step time waits for data: {fix}"
    if (share := split.get("other", 0.0)) > LONG:
        fix = "raise monitoring.every and debug.every"
        yield f"{share:.0%} of step time is spent between steps, in hooks and the record: {fix}"
    if (share := split.get("optimizer", 0.0)) > LONG:
        fused = "fused_optimizer" in facts.techniques
        fix = "optimization.fused_optimizer.enabled=true"
        fix = "a larger training.batch_size needs fewer updates" if fused else fix
        yield f"the optimizer takes {share:.0%} of a step: {fix}"


class ProfileTool(Tool):
    """Profiles a window of steps and the user's sections; reports what limits the speed.

    Steps outside the window are not slowed down. Its cost is starting the profiler and reading its
    events.
    """

    name: ClassVar[str] = "profile"

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config)
        self.own = config.profile
        self.next = math.inf  # step after which it has to act
        self.window: Window | None = None
        self.operators: list[dict[str, Any]] = []
        self.busy: float | None = None
        self.trace_file = ""
        self.first, self.steps = 0, 0  # of the trace
        self.totals = Totals()
        self.before: dict[str, float] = {}  # stopwatch at the start of the window
        self.excluded = dict.fromkeys(PHASES, 0.0)  # seconds by phase within the window
        self.verdicts: list[str] = []
        self.facts = Facts()
        self.tools = 0.0  # seconds of the other debug tools so far

    def due(self, step: int) -> bool:
        """Whether the window starts, runs or ends at this step."""
        return step >= self.next

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Collect sections during the session; write the results at the end."""
        latest = run.total_steps - run.progress.step - self.own.warmup - self.own.steps
        self.next = run.progress.step + min(self.own.start, max(1, latest))
        entered, loud = perf_counter(), QUIET not in os.environ
        os.environ.setdefault(QUIET, "6")  # else Kineto logs start and stop to stderr
        try:
            with collect() as self.totals:
                yield
        finally:
            collected = perf_counter() - entered
            if self.window is not None:
                self._close(run, self.window)
            if loud:
                os.environ.pop(QUIET, None)
            start = perf_counter()
            self._conclude(run, collected)
            self.seconds += perf_counter() - start

    def on_step(self, run: Run, step: Step) -> None:
        """Start the window, count its steps, end it; without synchronisation."""
        if self.window is None:
            self._begin(run, step.number)
        elif self.window.step() or step.number >= run.total_steps:
            self._close(run, self.window)

    def on_report(self, run: Run, report: Report) -> None:
        """Record the time of the other tools so far."""
        tools = (hook for hook in run.hooks if isinstance(hook, Tool) and hook is not self)
        self.tools = sum(tool.seconds for tool in tools)

    def _begin(self, run: Run, step: int) -> None:
        if self.rests(step):
            self.next = math.inf
            return
        if run.strict:  # the techniques' proof uses its own profiler
            self.next = step + 1
            return
        steps, free = place_window(run, step, self.own.warmup, self.own.steps)
        self.next = max(free, step + 1)
        if free > step:
            return
        start = perf_counter()
        self.before = dict(run.watch.spent)
        try:
            self.window = Window(run, self.own, self.totals, steps)
        except RuntimeError as error:  # another profiler is active
            self._give_up(run, error)
        self.seconds += perf_counter() - start

    def _close(self, run: Run, window: Window) -> None:
        self.window, self.next = None, math.inf
        start = perf_counter()
        try:
            window.stop()
            if window.recorded:
                self.first, self.steps = window.first, window.recorded
                self.operators, self.busy = window.rows()
                self._store(run, window)
        except (ValueError, RuntimeError) as error:
            self._give_up(run, error)
        for phase, seconds in run.watch.spent.items():
            # the watch may have been reset since
            self.excluded[phase] = max(0.0, seconds - self.before.get(phase, 0.0))
        self.excluded["other"] += perf_counter() - start if run.watch.running else 0.0
        self._judge(run)
        self.looks += 1
        self.seconds += perf_counter() - start

    def _store(self, run: Run, window: Window) -> None:
        if run.folder is None:
            return
        name = f"{TRACES}/step_{window.first:08d}.json.gz"
        try:
            (run.folder / TRACES).mkdir(parents=True, exist_ok=True)
            window.profiler.export_chrome_trace(str(run.folder / name))
            self.trace_file = name
        except OSError as error:
            log.warning("profile: no trace: %s", error)

    def _give_up(self, run: Run, error: Exception) -> None:
        self.next = math.inf
        message, step = f"torch.profiler: {error}", run.progress.step
        run.history.add(
            "no_profile", message, step=step, category="performance", action="no trace", error=error
        )

    # -- findings ------------------------------------------------------------------------------

    def _judge(self, run: Run) -> None:
        self.facts = self._facts(run)
        self.verdicts = verdicts(self.facts)
        self.finding = "; ".join(self.verdicts[:2])

    def _facts(self, run: Run) -> Facts:
        """Return facts on the steps outside the window.

        Other debug tools mostly run between steps; all their time is subtracted there, which may be
        too much.
        """
        spent = {p: max(0.0, run.watch.spent[p] - self.excluded[p]) for p in PHASES}
        spent["other"] = max(0.0, spent["other"] - self.tools)
        if not any(spent.values()):
            spent = dict(run.watch.spent)
        whole = sum(spent.values())
        workers = next((choice for choice in run.choices if choice.key == "data.workers"), None)
        facts = Facts(
            split={phase: seconds / whole for phase, seconds in spent.items()} if whole else {},
            step_ms=float(np.median(run.watch.settled_laps())) * 1e3 if run.watch.count else 0.0,
            busy=self.busy,
            workers=int(workers.value if workers else run.settings.get("data.workers") or 0),
            in_memory=bool(workers and "in memory" in workers.reason),
            cores=run.device.cores,
            techniques=sorted(name for name, _ in run.techniques if name not in run.fallen),
        )
        if self.operators:
            largest = self.operators[0]
            facts.operators = sum(row["calls"] for row in self.operators) / self.steps
            facts.operator, facts.operator_ms = (
                largest["name"],
                largest["seconds"] / self.steps * 1e3,
            )
            facts.operator_share = largest["seconds"] / (self._operator_seconds() or 1.0)
        return facts

    def _operator_seconds(self) -> float:
        return float(sum(row["seconds"] for row in self.operators))

    def _conclude(self, run: Run, collected: float) -> None:
        """Write the final verdict to TensorBoard and two files."""
        self._judge(run)
        text = "\n".join(f"- {markdown.escape(verdict)}" for verdict in self.verdicts)
        run.recorder.text("profile/verdict", text, run.progress.step)
        if self.operators:
            run.recorder.text("profile/trace", self._operator_table(), run.progress.step)
        record = {
            "verdicts": self.verdicts,
            "facts": asdict(self.facts),
            "first": self.first,
            "trace_file": self.trace_file,
            "trace": {"steps": self.steps, "operators": self.operators},
            "seconds": collected,
            "sections": [vars(total) | {"mean": total.mean} for total in self.totals.by_time()],
        }
        self.write_json(run.folder, ROWS, record)
        if run.folder is not None:
            write_or_log(run.folder / PAGE, self.markdown(collected))

    def markdown(self, collected: float) -> str:
        """Return the report as Markdown; sections were collected for `collected` seconds."""
        lines = ["# Profile", "", *(f"- {markdown.escape(text)}" for text in self.verdicts), ""]
        split = [("a step", f"{self.facts.step_ms:.3g} ms")]
        split += [(PHASE_NAMES.get(k, k), f"{v:.1%}") for k, v in self.facts.split.items() if v]
        lines += ["## Time of a step", "", markdown.table(("", ""), split), ""]
        lines += ["Of the steps that were not profiled, without the time of debug tools.", ""]
        if self.operators:
            last = self.first + self.steps - 1
            lines += [f"## Steps {self.first} to {last}, profiled", "", self._operator_table()]
        if self.trace_file:
            lines += ["", f"To be opened in ui.perfetto.dev: `{self.trace_file}`"]
        if self.totals.rows:
            rows = [
                (f"{t.name} {t.category}".strip(), float(t.calls), t.seconds)
                for t in self.totals.by_time()
            ]
            lines += ["", "## Sections", "", _table("section", rows, collected or 1.0), ""]
            lines += ["Of this process; sections in data workers are not seen."]
        return "\n".join(lines).rstrip() + "\n"

    def _operator_table(self) -> str:
        """Return a table of the slowest operators by self time."""
        steps = max(1, self.steps)
        rows = [
            (row["name"], row["calls"] / steps, row["seconds"] / steps)
            for row in self.operators[:SHOWN]
        ]
        return _table("operator", rows, self._operator_seconds() / steps or 1.0)


def _table(heading: str, rows: Iterable[tuple[str, float, float]], whole: float) -> str:
    """Format names, calls and seconds with their share of `whole` as a Markdown table."""
    cells = [
        (name, f"{calls:,.4g}" if calls else "", f"{seconds * 1e3:,.3g}", f"{seconds / whole:.1%}")
        for name, calls, seconds in rows
    ]
    return markdown.table((heading, "calls", "ms", "share"), cells)


# -- the profiler's window -----------------------------------------------------------------------


class Window:
    """A window of steps under torch.profiler, created between steps and advanced by `step`."""

    def __init__(self, run: Run, config: ProfileConfig, totals: Totals, steps: int) -> None:
        """Start a window of `steps` steps; RuntimeError if another profiler is active."""
        if torch._C._autograd._profiler_enabled():
            raise RuntimeError("another profiler is already active")
        self.run, self.totals, self.steps = run, totals, steps
        self.first = run.progress.step + config.warmup + 1  # first step in the trace
        self.left = config.warmup + steps
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if run.device.kind == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(
            activities=kinds,
            schedule=torch.profiler.schedule(wait=0, warmup=config.warmup, active=steps, repeat=1),
            record_shapes=config.shapes,
            profile_memory=config.memory,
            with_stack=config.stacks,
        )
        run.device.synchronize()  # waits: else kernels of earlier steps would be in the window
        self.profiler.start()
        self.start = perf_counter()
        self.seconds = 0.0  # wall time of the steps in the trace
        totals.tracing = True

    @property
    def recorded(self) -> int:
        """Number of steps in the trace so far."""
        return max(0, self.steps - self.left)

    def step(self) -> bool:
        """Count a finished step; returns whether it was the last."""
        self.left -= 1
        if self.left == 0:
            self.run.device.synchronize()  # waits: kernels still under way belong to the window
        self.seconds = perf_counter() - self.start if self.recorded else 0.0
        if self.left == 0:
            return True
        self.profiler.step()
        if not self.recorded:
            self.start = perf_counter()
        return False

    def stop(self) -> None:
        """Stop the profiler, possibly early."""
        self.totals.tracing = False
        self.profiler.stop()

    def rows(self) -> tuple[list[dict[str, Any]], float | None]:
        """Return operators by self time, and the share of time in which a GPU computed."""
        on_gpu = self.run.device.kind == "cuda"
        spent = "self_device_time_total" if on_gpu else "self_cpu_time_total"  # µs
        events = [e for e in self.profiler.key_averages() if not e.is_user_annotation]
        kernels = [e for e in events if e.device_type != DeviceType.CPU]
        operators = [
            {"name": operator_name(e.key), "calls": e.count, "seconds": getattr(e, spent) / 1e6}
            for e in events
            if e.device_type == DeviceType.CPU
            and not e.key.startswith(("cuda", "hip", "ProfilerStep"))
        ]
        operators.sort(key=lambda row: -row["seconds"])
        computed = sum(e.self_device_time_total for e in kernels) / 1e6
        return operators, min(1.0, computed / self.seconds) if kernels and self.seconds else None


def operator_name(key: str) -> str:
    """Return an operator's name; that of a compiled graph is shortened."""
    call = re.match(r"^## Call CompiledFxGraph (\S+) ##$", key)
    return f"{GRAPH} {call[1][:8]}" if call else key


def place_window(run: Run, step: int, warmup: int, steps: int) -> tuple[int, int]:
    """Return how many steps to profile, and the step after which to start.

    The window is moved or shortened to avoid validations, checkpoints and other tools' steps. If
    there is no such place, it contains them.
    """
    looks = [
        hook.every
        for hook in run.hooks
        if isinstance(hook, Tool) and overrides_event(hook, "around") and hook.every > 2
    ]
    ends = [run.validate_every, run.checkpoint_every]  # after a step of these there is a pause
    room = [pace - 1 - warmup for pace in (*ends, *looks)]
    steps = min([steps, *(most for most in room if most > 0)])
    for first in range(step, min(step + AHEAD, run.total_steps - warmup - steps) + 1):
        made = range(first, first + warmup + steps)
        after = any(number % pace == 0 for number in made for pace in ends)
        if not after and not any((number + 1) % pace == 0 for number in made for pace in looks):
            return steps, first
    return steps, step
