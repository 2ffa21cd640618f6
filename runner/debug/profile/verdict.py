"""What keeps a run from being faster, in words: one table of rules over what was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from runner.debug.profile.kinds import ATTENTION


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
    def products(self) -> float:
        """Share of the operators' time in attention, convolutions and matrix products."""
        return sum(self.kinds.values())

    @property
    def compiled(self) -> bool:
        """Whether operators are fused into graphs."""
        return bool(self.techniques & {"compile", "whole_step"})

    @property
    def idle(self) -> bool:
        """Whether it is the host that decides how fast a step is."""
        return self.busy is None or self.busy < BUSY

    @property
    def waits(self) -> bool:
        """Whether the data come too late for anything else to matter; from memory they never do."""
        return self.idle and not self.in_memory and self.split.get("data", 0.0) > WAITS


@dataclass(frozen=True)
class Rule:
    """Speaks when its share is above the threshold."""

    name: str
    above: float
    share: Callable[[Facts], float]
    words: Callable[[Facts, float], str]


WAITS = 0.2  # share of a step
BUSY = 0.7  # an accelerator that computes more of the time than this is what limits the run
MANY = 100  # operators in a step
CALLS = 0.5  # share of the CPU time: loops of small operators 0.8 to 2, others up to 0.45
HOT = 0.5  # share of the operators' time, from which one module is worth a word
NAMED = 0.05  # share of the time, from which a kind of operator is worth a word


def _data(facts: Facts, share: float) -> str:
    waits = f"{share:.0%} of step time waits for data: "
    if facts.in_memory:
        return waits + "it is in memory, so a larger training.batch_size is what helps"
    if facts.workers >= facts.cores:
        return waits + f"all {facts.cores} cores fetch already; make samples cheaper to read"
    return waits + f"raise data.workers (now {facts.workers})"


def _optimizer(facts: Facts, share: float) -> str:
    takes = f"the optimizer takes {share:.0%} of a step: "
    if "fused_optimizer" not in facts.techniques:
        return takes + "optimization.fused_optimizer.enabled=true"
    return takes + "a larger training.batch_size needs fewer updates"


def _module(facts: Facts, share: float) -> str:
    says = f"{share:.0%} of the operators' time is in {facts.module}"
    if facts.module_operators > MANY:
        says += f", which makes {facts.module_operators:,.0f} of them a step"
    return says


def _host(facts: Facts, share: float) -> str:
    says = f"host-bound: {facts.operators:,.0f} operators a step, "
    if facts.busy is not None:
        says += f"the device busy {facts.busy:.0%} of the time"
    else:
        says += "so small that calling them is most of the work"
    ways = ["a larger training.batch_size"]
    if "whole_step" not in facts.techniques:
        ways = ["optimization.whole_step.enabled=true"]
    if facts.module_share > HOT:
        says += f"; {_module(facts, facts.module_share)}"
        if facts.module_operators > MANY:
            ways.insert(0, "operators on whole tensors instead of a loop over samples or time")
    return f"{says}: {', or '.join(ways)}"


def _compute(facts: Facts, share: float) -> str:
    kinds = sorted(facts.kinds.items(), key=lambda item: -item[1])
    (most, of), *rest = kinds
    told = [f"{most} {'takes' if most == ATTENTION else 'take'} {of:.0%} of the operators' time"]
    told += [f"{name} {x:.0%}" for name, x in rest if x >= NAMED]
    says = f"compute-bound: {', '.join(told)}"
    if most == ATTENTION and "attention" not in facts.techniques:
        says += "; optimization.attention.enabled=true takes the fastest kernel"
    if "amp" not in facts.techniques:
        says += "; 16 bits may help: optimization.amp.enabled=true"
    return says


def _graph(facts: Facts, share: float) -> str:
    says = (
        f"compiled graphs take {share:.0%} of the operators' time, {facts.graph_ms:.3g} ms a step"
    )
    if facts.module_eager:
        says += f"; uncompiled, {facts.module} takes the most of all modules, "
        says += f"{facts.module_share:.0%}"
    return says


RULES = (
    # name           above  share                                     what to do about it
    # many operators with so little to compute that calling them is the work
    Rule("host",     CALLS, lambda f: _calls(f), _host),
    Rule("module",   HOT,   lambda f: 0.0 if f.waits or f.module_eager or _calls(f) > CALLS
         else f.module_share, _module),
    Rule("data",     WAITS,  lambda f: f.split.get("data", 0.0) if f.idle else 0.0, _data),
    Rule("between",  0.25,  lambda f: f.split.get("other", 0.0) if f.idle else 0.0,
         lambda f, x: f"{x:.0%} of step time is spent between steps, in hooks and the record: "
                      "raise monitoring.every and debug.every"),
    Rule("optimizer", 0.25, lambda f: f.split.get("optimizer", 0.0) if f.idle else 0.0, _optimizer),
    Rule("copies",   0.20,  lambda f: f.copies,
         lambda f, x: f"{x:.0%} of the time copies between host and device: data.pin_memory=true, "
                      "data.device_prefetch=true, and no .cpu() in the model"),
    Rule("compute",  0.50,  lambda f: 0.0 if f.waits or _calls(f) > CALLS or f.operator_share < 0.3
         else f.products, _compute),
    Rule("graph",    0.0,   lambda f: f.graph, _graph),
)  # fmt: skip
"""What is worth looking at comes first; each that speaks is said, the first two are the finding."""


def _calls(facts: Facts) -> float:
    """Share of the time that goes to calling operators, where these are many."""
    if facts.operators < MANY or not facts.idle or facts.waits:
        return 0.0
    if facts.busy is not None:
        return 1.0 - facts.busy
    return facts.calling


def verdicts(facts: Facts) -> list[str]:
    """What can be said, the most important first; never empty."""
    said = [rule.words(facts, share) for rule in RULES if (share := rule.share(facts)) > rule.above]
    if said:
        return said
    parts = sorted(facts.split.items(), key=lambda item: -item[1])
    told = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in parts if share)
    if not told:
        return ["too few steps to say anything"]
    many = f"{facts.operators:,.0f} operators a step, " if facts.operators else ""
    return [f"nothing stands out: {many}{told}"]
