"""Profile a few steps with torch.profiler; explain where step time goes in the whole run."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, ClassVar

import torch

from runner.core.interfaces.hook import Report, Step
from runner.core.interfaces.run import Run
from runner.core.record import markdown
from runner.core.record.library_files import private_folder
from runner.core.record.storage import write_or_log
from runner.core.schemas.debug import DebugConfig, ProfileConfig
from runner.core.train.step import overrides_event
from runner.core.train.timing import PHASES
from runner.diagnose.debug.module_times import (
    COMPILED,
    COMPILED_GRAPH,
    MODULES_NOTE,
    REST,
    SMALL_OPERATOR_US,
    ModuleRanges,
    ModuleTime,
    module_table,
    quiet_profiler,
    read_trace,
)
from runner.diagnose.debug.sections import SectionTotals, collect
from runner.diagnose.debug.tool import DebugTool

log = logging.getLogger("runner")

PHASE_NAMES = {"whole_step": "the step as one graph", "other": "between steps"}
REPORT_FILE, RESULT_FILE, TRACE_FOLDER = "debug/profile.md", "debug/profile.json", "debug/traces"
MAX_OPERATORS = 15  # operators in a table
SEARCH_STEPS = 1000  # steps to search for a place for the window
WAIT_ROW = re.compile(r"c10d::|gloo:|nccl:|ncclDevKernel|mpi:|ucc:|record_param_comms")
"""Rows that wait for the other processes of a run."""

DATA_WAIT_SHARE = 0.2  # share of a step
LONG_PHASE_SHARE = 0.25  # share of a step, of the optimizer or of what is between steps
BUSY_SHARE = 0.7  # above this share of busy time the accelerator is the limit
MANY_OPERATORS = 100  # operators per step
LARGE_OPERATOR_SHARE = 0.3  # share of operator time above which one operator is reported
LARGE_MODULE_SHARE = 0.5  # the same of a module
MAX_STALLS = 3  # modules named as stalling


@dataclass
class StepMeasurements:
    """A mean step, outside the profiler's window if possible; shares are of its time."""

    split: dict[str, float] = field(default_factory=dict)  # by phase, as in the summary
    step_ms: float = 0.0
    operators: float = 0.0  # called per step
    operator: str = ""  # with the most time
    operator_share: float = 0.0
    operator_ms: float = 0.0  # of that operator, per step
    operators_ms: float = 0.0  # of all operators, per step
    busy: float | None = None  # share of time in which the accelerator computed
    workers: int = 0  # data workers
    in_memory: bool = False
    cores: int = 1
    techniques: list[str] = field(default_factory=list)  # applied ones
    not_applied: list[str] = field(default_factory=list)  # requested, but not applied
    module: str = ""  # with the most operator time
    module_share: float = 0.0
    module_ms: float = 0.0  # of that module, per step
    # ms per step in Python code of modules beyond calling operators, longest first
    stalls: dict[str, float] = field(default_factory=dict)

    @property
    def host_bound(self) -> bool:
        """Whether the host limits the speed of a step."""
        return self.busy is None or self.busy < BUSY_SHARE

    @property
    def python_share(self) -> float:
        """The share of a step outside of operators, waits for data and what is between steps.

        0 if calling the operators, which takes SMALL_OPERATOR_US each, may explain it.
        """
        explained = self._outside_ms * 1e3 < SMALL_OPERATOR_US * self.operators
        if not self.operators_ms or not self.step_ms or explained:
            return 0.0
        return self._outside_ms / self.step_ms

    @property
    def stall_share(self) -> float:
        """The share of a step in which modules stall in Python; 0 if not known."""
        stalls_ms = min(self._outside_ms, sum(self.stalls.values()))
        return max(0.0, stalls_ms / self.step_ms) if self.step_ms else 0.0

    def python_text(self, whole: str) -> str:
        """Say how much of `whole` is spent in Python, and the modules or phase with most of it."""
        share = max(self.python_share, self.stall_share)
        text = f"{share:.0%} of {whole} is spent in Python outside of torch's operators"
        if self.stall_share > share / 2:
            longest = [f"{name} {ms:.3g} ms" for name, ms in self.stalls.items()]
            return f"{text}, most in module {', '.join(longest[:MAX_STALLS])}"
        phases = {k: v for k, v in self.split.items() if k not in ("data", "other")}
        phase = max(phases, key=lambda name: phases[name], default="")
        return f"{text}, most in {PHASE_NAMES.get(phase, phase)}" if phase else text

    def module_text(self) -> str:
        """Name the module with the most operator time, and that time."""
        times = f"{self.module_share:.0%} of the operators' time, {self.module_ms:.3g} ms"
        return f"module {self.module} takes {times}"

    @property
    def _outside_ms(self) -> float:
        inside = 1 - self.split.get("data", 0.0) - self.split.get("other", 0.0)
        return self.step_ms * inside - self.operators_ms

    @property
    def waits_for_data(self) -> bool:
        """Whether waiting for data dominates; never for data in memory."""
        share = self.split.get("data", 0.0)
        return self.host_bound and not self.in_memory and share > DATA_WAIT_SHARE


def find_bottlenecks(measured: StepMeasurements) -> list[str]:
    """Return the conclusions, most important first; never empty."""
    if texts := [*_operator_bottlenecks(measured), *_phase_bottlenecks(measured)]:
        return texts
    shares = ", ".join(f"{name.replace('_', ' ')} {s:.0%}" for name, s in measured.split.items())
    operators = f"{measured.operators:,.0f} operators a step, " if measured.operators else ""
    return [f"no bottleneck: {operators}{shares}" if shares else "too few steps for a result"]


def _operator_bottlenecks(measured: StepMeasurements) -> Iterator[str]:
    small = measured.operators >= MANY_OPERATORS
    small = small and measured.step_ms * 1e3 < SMALL_OPERATOR_US * measured.operators
    operator, share = measured.operator, measured.operator_share
    stacks = ": debug.profile.stacks=true shows where in the trace"
    if measured.stall_share > LARGE_OPERATOR_SHARE:
        yield measured.python_text("step time") + stacks
    elif small and measured.host_bound and not measured.waits_for_data:
        fix = "a larger training.batch_size"
        if "whole_step" not in {*measured.techniques, *measured.not_applied}:
            fix = "optimization.whole_step.enabled=true"
        busy = "" if measured.busy is None else f", the device busy {measured.busy:.0%} of the time"
        yield f"host-bound: {measured.operators:,.0f} small operators a step{busy}: {fix}"
    elif measured.python_share > LARGE_OPERATOR_SHARE:
        yield measured.python_text("step time") + stacks
    elif share > LARGE_OPERATOR_SHARE and WAIT_ROW.match(operator):
        times = f"{measured.operator_ms:.3g} ms a step ({operator})"
        yield f"waiting for the other processes takes {times}: the slowest or the network limits"
    elif share > LARGE_OPERATOR_SHARE and not measured.waits_for_data:
        may_help = "amp" not in measured.techniques and not operator.startswith(COMPILED_GRAPH)
        fix = "; 16 bits may help: optimization.amp.enabled=true" if may_help else ""
        times = f"{share:.0%} of the operators' time, {measured.operator_ms:.3g} ms a step"
        yield f"{operator} takes {times}{fix}"


def _phase_bottlenecks(measured: StepMeasurements) -> Iterator[str]:
    split = measured.split if measured.host_bound else {}
    if (share := split.get("data", 0.0)) > DATA_WAIT_SHARE:
        fix = f"raise data.workers (now {measured.workers}), or make samples cheaper to read"
        if measured.workers >= measured.cores:
            fix = f"all {measured.cores} cores fetch already; make samples cheaper to read"
        if measured.in_memory:
            fix = "the data is in memory; use a larger training.batch_size"
        yield f"{share:.0%} of step time waits for data: {fix}"
    if (share := split.get("other", 0.0)) > LONG_PHASE_SHARE:
        fix = "raise monitoring.every and debug.every"
        yield f"{share:.0%} of step time is spent between steps, in hooks and the record: {fix}"
    if (share := split.get("optimizer", 0.0)) > LONG_PHASE_SHARE:
        is_fused = "fused_optimizer" in measured.techniques
        fix = "" if is_fused else "optimization.fused_optimizer.enabled=true, or "
        yield f"the optimizer takes {share:.0%} of a step: {fix}a larger training.batch_size"
    if measured.module_share > LARGE_MODULE_SHARE:
        yield f"{measured.module_text()} a step"


class ProfileTool(DebugTool):
    """Profiles a window of steps and the user's sections; reports what limits the speed.

    Steps outside the window are not slowed down. Its cost is starting the profiler and reading its
    events.
    """

    name: ClassVar[str] = "profile"
    SAVED = "named_step trace_file trace_start trace_steps operators busy".split()

    def __init__(self, config: DebugConfig) -> None:
        super().__init__(config)
        self.settings = config.profile
        self.next_step: float | None = None  # step after which it acts; None: not planned yet
        self.window: ProfilerWindow | None = None
        self.operators: list[dict[str, Any]] = []
        self.modules: list[ModuleTime] = []
        self.busy: float | None = None
        self.trace_file, self.named_step = "", 0  # first step of the first window
        self.trace_start, self.trace_steps = 0, 0  # of the trace
        self.totals = SectionTotals()
        self.seconds_before: dict[str, float] = {}  # stopwatch at the start of the window
        self.excluded = dict.fromkeys(PHASES, 0.0)  # seconds by phase within the window
        self.verdicts: list[str] = []
        self.measurements = StepMeasurements()
        self.other_tools_seconds = 0.0  # of the other debug tools so far

    def due(self, step: int) -> bool:
        """Whether the window starts, runs or ends at this step."""
        return self.next_step is not None and step >= self.next_step

    def state(self) -> dict[str, Any]:
        """Return the trace, and the step after which a window opens, also for one that is open."""
        next_step = self.window.first if self.window is not None else self.next_step
        saved = {name: getattr(self, name) for name in self.SAVED}
        return {"next_step": next_step, **saved, "modules": [asdict(row) for row in self.modules]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Profile the same steps, or none again."""
        for name in ("next_step", *self.SAVED):
            setattr(self, name, state[name])
        # checkpoints of earlier versions lack `modules`
        self.modules = [ModuleTime(**row) for row in state.get("modules", [])]

    @contextmanager
    def session(self, run: Run) -> Iterator[None]:
        """Collect sections during the session; write the results at the end."""
        if self.next_step is None:
            step, window = run.progress.step, self.settings.warmup + self.settings.steps
            latest = run.total_steps - step - window
            self.next_step = step + min(self.settings.start, max(1, latest))
        start_time = perf_counter()
        with quiet_profiler():
            try:
                with collect() as self.totals:
                    yield
            finally:
                collected_s = perf_counter() - start_time
                if self.window is not None:
                    self._close_window(run, self.window)
                self._write_results(run, collected_s)

    def on_step(self, run: Run, step: Step) -> None:
        """Start the window, count its steps, end it; without synchronisation."""
        if self.window is not None:
            self.looked_steps.append(run.stopwatch.count)
        if self.window is None:
            self._start_window(run, step.number)
        elif self.window.step() or step.number >= run.total_steps:
            self._close_window(run, self.window)

    def on_report(self, run: Run, report: Report) -> None:
        """Record the time of the other tools so far."""
        tools = (hook for hook in run.hooks if isinstance(hook, DebugTool) and hook is not self)
        self.other_tools_seconds = sum(tool.seconds for tool in tools)

    def _start_window(self, run: Run, step: int) -> None:
        if self.is_resting(step) or run.strict:  # the techniques' proof uses its own profiler
            self.next_step = step + 1 if run.strict else math.inf
            return
        steps, start_step = place_window(run, step, self.settings.warmup, self.settings.steps)
        self.next_step = max(start_step, step + 1)
        if start_step > step:
            return
        self.seconds_before = dict(run.stopwatch.phase_seconds)
        try:
            self.window = ProfilerWindow(run, self.settings, self.totals, steps)
        except RuntimeError as error:  # another profiler is active
            self._record_missing_trace(run, error)
            return
        self.named_step = self.named_step or self.window.first
        run.stopwatch.inspects_next = True

    def _close_window(self, run: Run, window: ProfilerWindow) -> None:
        self.window, self.next_step = None, math.inf
        run.stopwatch.inspects_next = False
        start = perf_counter()
        try:
            window.stop()
            if window.recorded:
                self._read_window(run, window)
        except (RuntimeError, ValueError) as error:  # other code has ended the profiler
            self._record_missing_trace(run, error)
        for phase, seconds in run.stopwatch.phase_seconds.items():
            # the stopwatch may have been reset since
            self.excluded[phase] = max(0.0, seconds - self.seconds_before.get(phase, 0.0))
        self.excluded["other"] += perf_counter() - start if run.stopwatch.running else 0.0
        self._update_verdicts(run)
        self.inspections += 1

    def _read_window(self, run: Run, window: ProfilerWindow) -> None:
        self.trace_start, self.trace_steps = window.first, window.recorded
        trace = read_trace(window.profiler, window.recorded)
        self.operators, self.modules = trace.operators, trace.modules
        if trace.kernel_seconds and window.seconds:
            self.busy = min(1.0, trace.kernel_seconds / window.seconds)
        self._export_trace(run, window)

    def _record_missing_trace(self, run: Run, error: Exception) -> None:
        self.next_step = math.inf
        message, step = f"torch.profiler: {error}", run.progress.step
        run.history.add(
            "no_profile", message, step=step, category="performance", action="no trace", error=error
        )

    def _export_trace(self, run: Run, window: ProfilerWindow) -> None:
        if run.folder is None:
            return
        name = f"step_{self.named_step:08d}.json.gz"
        try:
            with private_folder(run.folder / TRACE_FOLDER, owned=True) as folder:
                window.profiler.export_chrome_trace(str(folder / name))
            self.trace_file = f"{TRACE_FOLDER}/{name}"
        except OSError as error:
            log.warning("profile: no trace: %s", error)

    # -- findings ------------------------------------------------------------------------------

    def _update_verdicts(self, run: Run) -> None:
        self.measurements = self._measure_step(run)
        self.verdicts = find_bottlenecks(self.measurements)
        self.finding = "; ".join(self.verdicts[:2])

    def _measure_step(self, run: Run) -> StepMeasurements:
        """Measure the steps outside the window.

        Other debug tools mostly run between steps; all their time is subtracted there, which may be
        too much.
        """
        outside = {p: max(0.0, run.stopwatch.phase_seconds[p] - self.excluded[p]) for p in PHASES}
        outside["other"] = max(0.0, outside["other"] - self.other_tools_seconds)
        speed = run.stopwatch.throughput(None)
        if run.stopwatch.on_accelerator and any(speed.split.values()):
            outside = speed.split  # by the device, without profiled steps
        elif not any(outside.values()):
            outside = dict(run.stopwatch.phase_seconds)
        total = sum(outside.values())
        workers = next((choice for choice in run.choices if choice.key == "data.workers"), None)
        names = [name for name, _ in run.techniques if name not in run.fallback_reasons]
        return StepMeasurements(
            split={phase: seconds / total for phase, seconds in outside.items()} if total else {},
            step_ms=speed.step_ms.p50,
            **operator_totals(self.operators, self.modules, self.trace_steps or 1),
            busy=self.busy,
            workers=int(workers.value if workers else run.settings.get("data.workers") or 0),
            in_memory=bool(workers and "in memory" in workers.reason),
            cores=run.device.cores,
            techniques=sorted(names),
            not_applied=sorted(row.name for row in run.unapplied_techniques if row.requested),
        )

    def _write_results(self, run: Run, collected_s: float) -> None:
        """Write the final verdict to TensorBoard and two files."""
        self._update_verdicts(run)
        page = self.markdown(collected_s)
        run.recorder.text("profile/report", page, run.progress.step)
        record = {
            "verdicts": self.verdicts,
            "facts": asdict(self.measurements),
            "first": self.trace_start,
            "trace_file": self.trace_file,
            "trace": {"steps": self.trace_steps, "operators": self.operators},
            "modules": [asdict(row) for row in self.modules],
            "seconds": collected_s,
            "sections": [vars(total) | {"mean": total.mean} for total in self.totals.by_time()],
        }
        self.write_json(run.folder, RESULT_FILE, record)
        if run.folder is not None:
            write_or_log(run.folder / REPORT_FILE, page)

    def markdown(self, collected_s: float) -> str:
        """Return the report as Markdown; sections were collected for `collected_s` seconds."""
        shares = {PHASE_NAMES.get(k, k): v for k, v in self.measurements.split.items() if v}
        split = [("a step", f"{self.measurements.step_ms:.3g} ms")]
        split += [(name, f"{share:.1%}") for name, share in shares.items()]
        parts = [
            f"## Time of a step\n\n{markdown.table(('', ''), split)}",
            "Of the steps that were not profiled, without the time of debug tools.",
        ]
        if self.operators:
            last = self.trace_start + self.trace_steps - 1
            parts.append(f"## Steps {self.trace_start} to {last}, profiled")
            parts.append(operator_table(self.operators, self.trace_steps))
        if self.modules:
            parts += [module_table(self.modules), MODULES_NOTE]
        if totals := self.totals.by_time():
            rows = [(f"{t.name} {t.category}".strip(), float(t.calls), t.seconds) for t in totals]
            parts += ["## Sections", time_table("section", rows, collected_s or 1.0)]
            parts.append("Of this process; sections in data workers are not seen.")
        return report_page(self.verdicts, parts, self.trace_file)


def report_page(verdicts: Iterable[str], parts: Sequence[str], trace_file: str) -> str:
    """Return a report as Markdown: verdicts, parts, and where the trace is."""
    texts = "\n".join(f"- {markdown.escape(text)}" for text in verdicts)
    trace = [f"To be opened in ui.perfetto.dev: `{trace_file}`"] if trace_file else []
    return "\n\n".join(["# Profile", texts, *parts, *trace]) + "\n"


def operator_table(operators: Sequence[Mapping[str, Any]], steps: int) -> str:
    """Return a Markdown table of the slowest operators in a mean step."""
    rows = [(row["name"], row["calls"] / steps, row["seconds"] / steps) for row in operators]
    total_s = sum(seconds for *_, seconds in rows)
    return time_table("operator", rows[:MAX_OPERATORS], total_s or 1.0)


def time_table(heading: str, rows: Iterable[tuple[str, float, float]], total_s: float) -> str:
    """Format names, calls and seconds with their share of `total_s` as a Markdown table."""
    cells = [(n, f"{calls:,.4g}", f"{s * 1e3:,.3g}", f"{s / total_s:.1%}") for n, calls, s in rows]
    return markdown.table((heading, "calls", "ms", "share"), cells)


# -- the profiler's window -----------------------------------------------------------------------


class ProfilerWindow:
    """A window of steps under torch.profiler, created between steps and advanced by `step`."""

    def __init__(self, run: Run, config: ProfileConfig, totals: SectionTotals, steps: int) -> None:
        """Start a window of `steps` steps; RuntimeError if another profiler is active."""
        if torch._C._autograd._profiler_enabled():
            raise RuntimeError("another profiler is already active")
        self.run, self.totals, self.steps = run, totals, steps
        self.first = run.progress.step + config.warmup + 1  # first step in the trace
        self.remaining = config.warmup + steps
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
        self.scope = ExitStack()
        if config.modules:
            self.scope.enter_context(ModuleRanges(run.model).record())
        self.start_time = perf_counter()
        self.seconds = 0.0  # wall time of the steps in the trace
        totals.tracing = True

    @property
    def recorded(self) -> int:
        """Number of steps in the trace so far."""
        return max(0, self.steps - self.remaining)

    def step(self) -> bool:
        """Count a finished step; returns whether it was the last."""
        self.remaining -= 1
        if self.remaining == 0:
            self.run.device.synchronize()  # waits: kernels still under way belong to the window
        self.seconds = perf_counter() - self.start_time if self.recorded else 0.0
        if self.remaining == 0:
            return True
        self.profiler.step()
        if not self.recorded:
            self.start_time = perf_counter()
        return False

    def stop(self) -> None:
        """Stop the profiler, possibly early."""
        self.totals.tracing = False
        self.scope.close()
        self.profiler.stop()


def operator_totals(
    operators: Sequence[Mapping[str, Any]], modules: Sequence[ModuleTime], steps: int
) -> dict[str, Any]:
    """Return fields of StepMeasurements, per step, of operators and modules, each by time."""
    seconds = sum(row["seconds"] for row in operators)
    own = [row for row in modules if row.module not in (COMPILED, REST)]
    stalls = sorted((row for row in own if row.stall_ms), key=lambda row: -row.stall_ms)
    totals = {
        "operators": sum(row["calls"] for row in operators) / steps,
        "operators_ms": seconds / steps * 1e3,
        "stalls": {row.module: row.stall_ms for row in stalls},
    }
    if operators:
        longest_s = operators[0]["seconds"]
        totals["operator"], totals["operator_ms"] = operators[0]["name"], longest_s / steps * 1e3
        totals["operator_share"] = longest_s / (seconds or 1.0)
    if own:
        totals["module"], totals["module_ms"] = own[0].module, own[0].total_ms
        totals["module_share"] = own[0].share
    return totals


def place_window(run: Run, step: int, warmup: int, steps: int) -> tuple[int, int]:
    """Return how many steps to profile, and the step after which to start.

    The window is moved or shortened to avoid validations, checkpoints and other tools' steps. If
    there is no such place, it contains them.
    """
    tools = [h for h in run.hooks if isinstance(h, DebugTool) and overrides_event(h, "around")]
    inspections = [tool.every for tool in tools if tool.every > 2]  # of each n-th step
    pauses = [n for n in (run.validate_every, run.checkpoint_every) if n]  # after each n-th step
    available = [interval - 1 - warmup for interval in (*pauses, *inspections)]
    steps = min([steps, *(count for count in available if count > 0)])
    for first in range(step, min(step + SEARCH_STEPS, run.total_steps - warmup - steps) + 1):
        window = range(first, first + warmup + steps)
        if all(n % interval for n in window for interval in pauses) and all(
            (n + 1) % interval for n in window for interval in inspections
        ):
            return steps, first
    return steps, step
