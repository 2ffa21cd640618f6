"""What keeps a run from being faster, in words and tables: one table of rules over the facts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from runner.debug.profile_trace import ATTENTION, Trace
from runner.debug.sections import Totals
from runner.record import markdown

WAITS = 0.2  # share of a step
BUSY = 0.7  # an accelerator that computes more of the time than this is what limits the run
MANY = 100  # operators in a step
CALLS = 0.5  # share of the CPU time: loops of small operators 0.8 to 2, others up to 0.45
HOT = 0.5  # share of the operators' time, from which one module is worth a word
NAMED = 0.05  # share of the time, from which a kind of operator is worth a word
SHOWN = 15  # rows of a table
LITTLE = 0.002  # of the operators' time, below which one is not shown
MIB = 2**20


@dataclass(frozen=True)
class Facts:
    """Of a step, outside the profiler's windows where possible; shares are of its time."""

    split: dict[str, float]  # shares of data, forward, backward, optimizer, whole_step, other
    step_ms: float = 0.0
    operators: float = 0.0  # called in a step
    calling: float = 0.0  # share of the CPU time that calling operators takes, by their number
    operator_share: float = 0.0  # of the window's time, in operators
    kinds: dict[str, float] = field(default_factory=dict)  # shares of it: attention, …
    graph: float = 0.0  # share of the operators' time in compiled graphs
    graph_ms: float = 0.0  # of a step
    module: str = ""  # that takes most of the operators' time by itself
    module_share: float = 0.0
    module_calls: float = 0.0  # in a step
    module_operators: float = 0.0  # called by it in a step, forward and backward
    module_eager: bool = False  # in uncompiled steps of a run whose steps are compiled
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
    def host_share(self) -> float:
        """Share of the time that goes to calling operators, where these are many."""
        if self.operators < MANY or not self.idle or self.waits:
            return 0.0
        return self.calling if self.busy is None else 1.0 - self.busy

    @property
    def hot_module(self) -> float:
        """Share of the module that is worth a word by itself."""
        known = self.waits or self.module_eager or self.host_share > CALLS
        return 0.0 if known else self.module_share

    @property
    def compute(self) -> float:
        """Share of attention, convolutions and products, where these decide how fast a step is."""
        if self.waits or self.host_share > CALLS or self.operator_share < 0.3:
            return 0.0
        return sum(self.kinds.values())

    def phase(self, name: str) -> float:
        """Share of a phase, where the host decides how fast a step is."""
        return self.split.get(name, 0.0) if self.idle else 0.0


def _data(facts: Facts, share: float) -> str:
    waits = f"{share:.0%} of step time waits for data: "
    if facts.in_memory:
        return waits + "it is in memory, so a larger training.batch_size is what helps"
    if facts.workers >= facts.cores:
        return waits + f"all {facts.cores} cores fetch already; make samples cheaper to read"
    return waits + f"raise data.workers (now {facts.workers})"


def _between(facts: Facts, share: float) -> str:
    return (
        f"{share:.0%} of step time is spent between steps, in hooks and the record: "
        "raise monitoring.every and debug.every"
    )


def _optimizer(facts: Facts, share: float) -> str:
    takes = f"the optimizer takes {share:.0%} of a step: "
    if "fused_optimizer" not in facts.techniques:
        return takes + "optimization.fused_optimizer.enabled=true"
    return takes + "a larger training.batch_size needs fewer updates"


def _copies(facts: Facts, share: float) -> str:
    return (
        f"{share:.0%} of the time copies between host and device: data.pin_memory=true, "
        "data.device_prefetch=true, and no .cpu() in the model"
    )


def _module(facts: Facts, share: float) -> str:
    text = f"{share:.0%} of the operators' time is in {facts.module}"
    if facts.module_operators > MANY:
        text += f", which makes {facts.module_operators:,.0f} of them a step"
    return text


def _host(facts: Facts, share: float) -> str:
    text = f"host-bound: {facts.operators:,.0f} operators a step, "
    if facts.busy is not None:
        text += f"the device busy {facts.busy:.0%} of the time"
    else:
        text += "so small that calling them is most of the work"
    ways = ["a larger training.batch_size"]
    if "whole_step" not in facts.techniques:
        ways = ["optimization.whole_step.enabled=true"]
    if facts.module_share > HOT:
        text += f"; {_module(facts, facts.module_share)}"
        if facts.module_operators > MANY:
            ways.insert(0, "operators on whole tensors instead of a loop over samples or time")
    return f"{text}: {', or '.join(ways)}"


def _compute(facts: Facts, share: float) -> str:
    (most, largest), *rest = sorted(facts.kinds.items(), key=lambda item: -item[1])
    verb = "takes" if most == ATTENTION else "take"
    parts = [f"{most} {verb} {largest:.0%} of the operators' time"]
    parts += [f"{name} {part:.0%}" for name, part in rest if part >= NAMED]
    text = f"compute-bound: {', '.join(parts)}"
    if most == ATTENTION and "attention" not in facts.techniques:
        text += "; optimization.attention.enabled=true takes the fastest kernel"
    if "amp" not in facts.techniques:
        text += "; 16 bits may help: optimization.amp.enabled=true"
    return text


def _graph(facts: Facts, share: float) -> str:
    time = f"{facts.graph_ms:.3g} ms a step"
    text = f"compiled graphs take {share:.0%} of the operators' time, {time}"
    if facts.module_eager:
        most = f"{facts.module_share:.0%}"
        text += f"; uncompiled, {facts.module} takes the most of all modules, {most}"
    return text


@dataclass(frozen=True)
class Rule:
    """Speaks when its share is above the threshold."""

    above: float
    share: Callable[[Facts], float]
    words: Callable[[Facts, float], str]


RULES = (  # the most important first; the first two that speak are the finding
    Rule(CALLS, lambda facts: facts.host_share, _host),
    Rule(HOT, lambda facts: facts.hot_module, _module),
    Rule(WAITS, lambda facts: facts.phase("data"), _data),
    Rule(0.25, lambda facts: facts.phase("other"), _between),
    Rule(0.25, lambda facts: facts.phase("optimizer"), _optimizer),
    Rule(0.20, lambda facts: facts.copies, _copies),
    Rule(0.50, lambda facts: facts.compute, _compute),
    Rule(0.0, lambda facts: facts.graph, _graph),
)


def verdicts(facts: Facts) -> list[str]:
    """What can be said, the most important first; never empty."""
    shares = [(rule, rule.share(facts)) for rule in RULES]
    if texts := [rule.words(facts, share) for rule, share in shares if share > rule.above]:
        return texts
    parts = sorted(facts.split.items(), key=lambda item: -item[1])
    split = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in parts if share)
    if not split:
        return ["too few steps to say anything"]
    many = f"{facts.operators:,.0f} operators a step, " if facts.operators else ""
    return [f"nothing stands out: {many}{split}"]


# -- tables -----------------------------------------------------------------------------------


def operator_name(name: str) -> str:
    """An operator's name for a table: a graph's without the marks of the trace, its hash short."""
    call = re.match(r"^## Call CompiledFxGraph (\S+) ##$", name)
    return f"compiled graph {call[1][:8]}" if call else name


def operator_table(trace: Trace) -> str:
    """The operators that take the most, without those that they call."""
    whole, steps = trace.operator_seconds or 1.0, max(1, trace.steps)
    shapes = any(operator.shapes for operator in trace.operators)
    allocated = any(operator.allocated for operator in trace.operators)
    rows: list[list[str]] = []
    for operator in trace.operators[:SHOWN]:
        spent = trace.spent(operator)
        if rows and spent < LITTLE * whole:
            break
        row = [operator_name(operator.name), *([operator.shapes] if shapes else [])]
        row += [f"{operator.calls / steps:,.4g}", _ms(spent / steps), f"{spent / whole:.1%}"]
        row.append(f"{spent / operator.calls * 1e6:,.1f}" if operator.calls else "")
        row += [_ms(operator.seconds / steps)] if trace.kernels else []
        row += [f"{operator.allocated / steps / MIB:,.2f}"] if allocated else []
        rows.append(row)
    header = ["operator", *(["inputs"] if shapes else [])]
    header += ["calls a step", "ms a step", "share", "µs a call"]
    header += ["host ms a step"] if trace.kernels else []
    header += ["MiB a step"] if allocated else []
    total = f"{trace.calls / steps:,.0f} operators a step, {_ms(whole / steps)} ms in them"
    return f"{markdown.table(header, rows)}\n\n{total}; each without those that it calls.\n"


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
    where = "kernels" if trace.kernels else "operators"
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
    sums = [
        (name or "(none)", f"{part:.3f}", f"{part / seconds:.1%}")
        for name, part in totals.by_category().items()
    ]
    categories = markdown.table(("category", "s", "of the run"), sums)
    note = "Of this process; sections in data workers are not seen."
    return f"{table}\n\n{categories}\n\n{note}\n"


def window_rows(trace: Trace) -> list[tuple[str, str]]:
    """Facts of a window, by name."""
    steps = max(1, trace.steps)
    rows = [("step, profiled", f"{_ms(trace.seconds / steps)} ms")]
    rows.append(("operators a step", f"{trace.calls / steps:,.0f}"))
    kinds = [(kind, share) for kind, share in trace.kinds.items() if share >= 0.005]
    rows += [(f"in {kind}", f"{share:.0%} of the operators' time") for kind, share in kinds]
    if trace.busy is not None:
        rows.append(("device busy", f"{trace.busy:.0%}"))
    if trace.tensor_cores is not None:
        share = f"{trace.tensor_cores:.0%} of the kernels' time, by their names"
        rows.append(("tensor cores", share))
    for way, copies in sorted(trace.copies.items()):
        text = f"{copies.count / steps:,.4g} a step, {_ms(copies.seconds / steps)} ms"
        if copies.bytes:
            text += f", {copies.bytes / steps / MIB:,.3g} MiB"
            text += f" at {copies.bytes / copies.seconds / 1e9:,.3g} GB/s" if copies.seconds else ""
        rows.append((f"copies {way}", text))
    return rows


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}"
