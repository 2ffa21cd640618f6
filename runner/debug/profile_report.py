"""What keeps a run from being faster, in words and tables: a list of rules over the facts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from runner.debug.profile_trace import Trace
from runner.debug.sections import Totals
from runner.record import markdown

WAITS = 0.2  # share of a step
BUSY = 0.7  # an accelerator that computes more of the time than this is what limits the run
MANY = 100  # operators in a step
CALLS = 0.5  # share of the CPU time: loops of small operators 0.8 to 2, others up to 0.45
LARGE = 0.3  # share of the operators' time, from which one operator is worth a word
GRAPH = "compiled graph"
SIXTEEN_BITS = "16 bits may help: optimization.amp.enabled=true"
HOT = 0.5  # share of the operators, or of their time, from which one module is named
SHOWN = 15  # rows of a table


@dataclass(frozen=True)
class Facts:
    """Of a step, outside the profiler's window where possible; shares are of its time."""

    split: dict[str, float]  # shares of data, forward, backward, optimizer, whole_step, other
    step_ms: float = 0.0
    operators: float = 0.0  # called in a step
    calling: float = 0.0  # share of the CPU time that calling operators takes, by their number
    operator: str = ""  # that takes most of the operators' time
    operator_share: float = 0.0
    operator_ms: float = 0.0  # of it, a step
    module: str = ""  # that takes most of the operators' time by itself
    module_share: float = 0.0
    caller: str = ""  # the module that calls the most operators by itself
    caller_operators: float = 0.0  # in a step, forward and backward
    busy: float | None = None  # share of the time in which an accelerator computed
    workers: int = 0  # that fetch data
    in_memory: bool = False
    cores: int = 1
    techniques: frozenset[str] = field(default_factory=frozenset)  # those applied

    @property
    def idle(self) -> bool:
        """Whether it is the host that decides how fast a step is."""
        return self.busy is None or self.busy < BUSY

    @property
    def waits(self) -> bool:
        """Whether the data come too late for anything else to matter; from memory they never do."""
        return self.idle and not self.in_memory and self.split.get("data", 0.0) > WAITS

    @property
    def host_bound(self) -> bool:
        """Whether calling operators takes most of the time, and there are many."""
        share = self.calling if self.busy is None else 1.0 - self.busy
        return self.operators >= MANY and self.idle and not self.waits and share > CALLS

    def phase(self, name: str) -> float:
        """Share of a phase, where the host decides how fast a step is."""
        return self.split.get(name, 0.0) if self.idle else 0.0


def _host(facts: Facts) -> str:
    if not facts.host_bound:
        return ""
    text = f"host-bound: {facts.operators:,.0f} operators a step, "
    if facts.busy is not None:
        text += f"the device busy {facts.busy:.0%} of the time"
    else:
        text += "so small that calling them is most of the work"
    compiled = "whole_step" in facts.techniques
    way = "a larger training.batch_size" if compiled else "optimization.whole_step.enabled=true"
    # by their number: how long so small operators take depends on how busy the machine is
    if facts.caller_operators > HOT * facts.operators:
        share = facts.caller_operators / facts.operators
        text += f"; {facts.caller} calls {share:.0%} of them"
        if facts.caller_operators > MANY:
            way = f"operators on whole tensors instead of a loop over samples or time, or {way}"
    return f"{text}: {way}"


def _module(facts: Facts) -> str:
    if facts.waits or facts.host_bound or facts.module_share <= HOT:
        return ""
    return f"{facts.module_share:.0%} of the operators' time is in {facts.module}"


def _data(facts: Facts) -> str:
    share = facts.phase("data")
    if share <= WAITS:
        return ""
    text = f"{share:.0%} of step time waits for data: "
    if facts.in_memory:
        return text + "it is in memory, so a larger training.batch_size is what helps"
    if facts.workers >= facts.cores:
        return text + f"all {facts.cores} cores fetch already; make samples cheaper to read"
    return text + f"raise data.workers (now {facts.workers})"


def _between(facts: Facts) -> str:
    share = facts.phase("other")
    if share <= 0.25:
        return ""
    return (
        f"{share:.0%} of step time is spent between steps, in hooks and the record: "
        "raise monitoring.every and debug.every"
    )


def _optimizer(facts: Facts) -> str:
    share = facts.phase("optimizer")
    if share <= 0.25:
        return ""
    text = f"the optimizer takes {share:.0%} of a step: "
    if "fused_optimizer" not in facts.techniques:
        return text + "optimization.fused_optimizer.enabled=true"
    return text + "a larger training.batch_size needs fewer updates"


def _operator(facts: Facts) -> str:
    if facts.waits or facts.host_bound or facts.operator_share <= LARGE:
        return ""
    text = f"{facts.operator} takes {facts.operator_share:.0%} of the operators' time, "
    text += f"{facts.operator_ms:.3g} ms a step"
    full = "amp" not in facts.techniques and not facts.operator.startswith(GRAPH)
    return text + (f"; {SIXTEEN_BITS}" if full else "")


RULES = (_host, _module, _data, _between, _optimizer, _operator)
"""The most important first; the first two that speak are the finding."""


def verdicts(facts: Facts) -> list[str]:
    """What can be said, the most important first; never empty."""
    if texts := [text for rule in RULES if (text := rule(facts))]:
        return texts
    parts = sorted(facts.split.items(), key=lambda item: -item[1])
    split = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in parts if share)
    if not split:
        return ["too few steps to say anything"]
    many = f"{facts.operators:,.0f} operators a step, " if facts.operators else ""
    return [f"nothing stands out: {many}{split}"]


# -- tables -----------------------------------------------------------------------------------


def _table(heading: str, rows: Iterable[tuple[str, float, float]], whole: float) -> str:
    """Names, calls of operators and seconds, with their share of `whole`, in Markdown."""
    cells = [
        (name, f"{calls:,.4g}" if calls else "", f"{seconds * 1e3:,.3g}", f"{seconds / whole:.1%}")
        for name, calls, seconds in rows
    ]
    return markdown.table((heading, "calls", "ms", "share"), cells)


def operator_name(name: str) -> str:
    """An operator's name for a table: a graph's without the marks of the trace, its hash short."""
    call = re.match(r"^## Call CompiledFxGraph (\S+) ##$", name)
    return f"{GRAPH} {call[1][:8]}" if call else name


def trace_table(trace: Trace) -> str:
    """Where a step spends the most: modules, or operators where the steps are compiled."""
    whole, steps = trace.operator_seconds or 1.0, max(1, trace.steps)
    operators = [(operator_name(o.name), o.calls, o.seconds) for o in trace.operators]
    modules = [(m.name, m.operators, m.seconds) for m in trace.modules if m.seconds]
    rows = [(n, calls / steps, s / steps) for n, calls, s in (modules or operators)[:SHOWN]]
    table = _table("module" if modules else "operator", rows, whole / steps)
    note = (
        f"{trace.calls / steps:,.0f} operators a step, {whole / steps * 1e3:,.3g} ms in them; each "
        "row without those inside it"
    )
    outside = "outside the modules are the loss, the update and the rest"
    compiled = "steps are compiled: optimization=none shows the modules of uncompiled ones"
    return f"{table}\n\n{note}; {outside if modules else compiled}."


def section_table(totals: Totals, seconds: float) -> str:
    """The user's own sections; `seconds` is how long they were collected."""
    rows = [(f"{t.name} {t.category}".strip(), float(t.calls), t.seconds) for t in totals.by_time()]
    note = "Of this process; sections in data workers are not seen."
    return f"{_table('section', rows, seconds or 1.0)}\n\n{note}"
