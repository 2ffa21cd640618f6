"""What keeps a run from being faster, in words and tables: a list of rules over the facts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from runner.debug.profile_trace import ATTENTION, GRAPHS, Trace
from runner.debug.sections import Totals
from runner.record import markdown

WAITS = 0.2  # share of a step
BUSY = 0.7  # an accelerator that computes more of the time than this is what limits the run
MANY = 100  # operators in a step
CALLS = 0.5  # share of the CPU time: loops of small operators 0.8 to 2, others up to 0.45
HOT = 0.5  # share of the operators' time, from which one module is worth a word
NAMED = 0.05  # share of the time, from which a kind of operator is worth a word
SHOWN = 15  # rows of a table


@dataclass(frozen=True)
class Facts:
    """Of a step, outside the profiler's windows where possible; shares are of its time."""

    split: dict[str, float]  # shares of data, forward, backward, optimizer, whole_step, other
    step_ms: float = 0.0
    operators: float = 0.0  # called in a step
    calling: float = 0.0  # share of the CPU time that calling operators takes, by their number
    operator_share: float = 0.0  # of the window's time, in operators
    operator_ms: float = 0.0  # of a step
    kinds: dict[str, float] = field(default_factory=dict)  # shares of it: attention, …
    module: str = ""  # that takes most of the operators' time by itself
    module_share: float = 0.0
    module_operators: float = 0.0  # called by it in a step, forward and backward
    copies: float = 0.0  # share of the window's time in copies to and from the device
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
    if facts.module_share > HOT:
        text += f"; {_hot_spot(facts)}"
        if facts.module_operators > MANY:
            way = f"operators on whole tensors instead of a loop over samples or time, or {way}"
    return f"{text}: {way}"


def _module(facts: Facts) -> str:
    elsewhere = facts.waits or facts.host_bound
    return "" if elsewhere or facts.module_share <= HOT else _hot_spot(facts)


def _hot_spot(facts: Facts) -> str:
    text = f"{facts.module_share:.0%} of the operators' time is in {facts.module}"
    if facts.module_operators > MANY:
        text += f", which makes {facts.module_operators:,.0f} of them a step"
    return text


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


def _copies(facts: Facts) -> str:
    if facts.copies <= 0.2:
        return ""
    return (
        f"{facts.copies:.0%} of the time copies between host and device: data.pin_memory=true, "
        "data.device_prefetch=true, and no .cpu() in the model"
    )


def _compute(facts: Facts) -> str:
    kinds = sorted(facts.kinds.items(), key=lambda item: -item[1])
    kinds = [(kind, share) for kind, share in kinds if kind != GRAPHS]
    elsewhere = facts.waits or facts.host_bound or facts.operator_share < 0.3
    if elsewhere or sum(share for _, share in kinds) <= 0.5:
        return ""
    (most, largest), *rest = kinds
    verb = "takes" if most == ATTENTION else "take"
    parts = [f"{most} {verb} {largest:.0%} of the operators' time"]
    parts += [f"{name} {part:.0%}" for name, part in rest if part >= NAMED]
    text = f"compute-bound: {', '.join(parts)}"
    if most == ATTENTION and "attention" not in facts.techniques:
        text += "; optimization.attention.enabled=true takes the fastest kernel"
    if "amp" not in facts.techniques:
        text += "; 16 bits may help: optimization.amp.enabled=true"
    return text


def _graph(facts: Facts) -> str:
    share = facts.kinds.get(GRAPHS, 0.0)
    if not share:
        return ""
    time = f"{share * facts.operator_ms:.3g} ms a step"
    return f"compiled graphs take {share:.0%} of the operators' time, {time}"


RULES = (_host, _module, _data, _between, _optimizer, _copies, _compute, _graph)
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


def operator_table(trace: Trace) -> str:
    """The operators that take the most, without those that they call."""
    whole, steps = trace.operator_seconds or 1.0, max(1, trace.steps)
    rows = [
        (
            operator_name(operator.name),
            f"{operator.calls / steps:,.4g}",
            _ms(trace.spent(operator) / steps),
            f"{trace.spent(operator) / whole:.1%}",
        )
        for operator in trace.operators[:SHOWN]
    ]
    total = f"{trace.calls / steps:,.0f} operators a step, {_ms(whole / steps)} ms in them"
    table = markdown.table(("operator", "calls a step", "ms a step", "share"), rows)
    return f"{table}\n\n{total}; each without those that it calls.\n"


def operator_name(name: str) -> str:
    """An operator's name for a table: a graph's without the marks of the trace, its hash short."""
    call = re.match(r"^## Call CompiledFxGraph (\S+) ##$", name)
    return f"compiled graph {call[1][:8]}" if call else name


def module_table(trace: Trace) -> str:
    """The modules in which the operators take the most, each without those inside it."""
    whole, steps = trace.operator_seconds or 1.0, max(1, trace.steps)
    rows = [
        (
            module.name,
            f"{module.calls / steps:,.4g}" if module.calls else "",
            f"{module.operators / steps:,.4g}",
            _ms(module.forward / steps),
            _ms(module.backward / steps),
            f"{module.seconds / whole:.1%}",
        )
        for module in trace.modules[:SHOWN]
        if module.seconds
    ]
    header = ("module", "calls a step", "operators", "forward, ms", "backward, ms", "share")
    where = "kernels" if trace.on_device else "operators"
    note = f"Time in {where}, a step; outside the modules are the loss, the update and the rest."
    return f"{markdown.table(header, rows)}\n\n{note}\n"


def section_table(totals: Totals, seconds: float) -> str:
    """The user's own sections; `seconds` is how long they were collected."""
    rows = [
        [t.name, t.category, f"{t.calls:,}", f"{t.seconds:.3f}", _ms(t.mean)]
        + [f"{t.seconds / seconds:.1%}"]
        for t in totals.by_time()
    ]
    table = markdown.table(("section", "category", "calls", "s", "ms a call", "of the run"), rows)
    return f"{table}\n\nOf this process; sections in data workers are not seen.\n"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}"
